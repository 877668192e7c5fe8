"""Entry point of `earmill`: guards signals and streams before it imports the commands."""

from __future__ import annotations

from typing import NoReturn

from earmill.jobs.process import CommandLine, run_and_exit


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    run_and_exit(_commands)


def _commands() -> CommandLine:
    from earmill.jobs import cli

    return cli.run


if __name__ == "__main__":
    main()
