"""The `earmill` command: parses, calls, and turns every deliberate error into one line.

Exit codes: 0 done; 1 failed or stopped; 2 bad usage, spec, source or output, found before any work;
3 done, but more rows are in quarantine than the job allows. Nothing heavy is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from jobs.commands import demo, extract, inspect, models, plan, plot, verify
from pipeline.errors import EarmillError

app = typer.Typer(
    name="earmill",
    help="Grind audio corpora into auditory-model features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("extract")(extract.extract)
app.command("plan")(plan.plan)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("plot")(plot.plot)
app.command("models")(models.models)
app.command("demo")(demo.demo)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        app(args=list(arguments), prog_name="earmill")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except EarmillError as error:
        print(f"earmill: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    return 0


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def main() -> None:
    """Entry point of the `earmill` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
