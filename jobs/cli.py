"""The `earmill` command: parse the command line, call the command, print errors in one line.

Exit codes: 0 done; 1 failed or stopped; 2 bad usage, spec, source or output, found before any work;
3 done, but more rows are in quarantine than the job allows; 141 standard output has no reader; 128
plus the number of a signal that ended the command. With `--json` a command without a result ends
with an `error` event. No heavy module is imported here.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from inspect import getdoc
from typing import Annotated

import typer

from earmill.jobs.commands.demo import demo
from earmill.jobs.commands.doctor import doctor
from earmill.jobs.commands.init import init
from earmill.jobs.commands.inspect import inspect, verify
from earmill.jobs.commands.models import kernels, models
from earmill.jobs.commands.options import wants_log_lines
from earmill.jobs.commands.push import push
from earmill.jobs.commands.reference import explain, spec
from earmill.jobs.commands.runs import add_features, extract, plan, retry
from earmill.jobs.commands.show import plot, report
from earmill.jobs.commands.snapshots import compact, diff, gc, log
from earmill.jobs.commands.watch import watch
from earmill.jobs.console import process
from earmill.jobs.console.process import OutputLost
from earmill.jobs.console.terminal import EXPLAIN, error_event, tell_errors_as_log_lines
from earmill.pipeline.common.errors import EarmillError, StorageError, is_out_of_memory, memory_text
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.text import one_line
from earmill.pipeline.storage.retrying import is_store_error, store_line

DEBUG = "--debug"
# Help topics of errors that are no `EarmillError`.
OF_A_MODEL, A_DEFECT, NO_MEMORY = "a-model", "a-defect", "memory"

app = typer.Typer(
    name="earmill",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Commands by the groups of `earmill --help`.
GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "To begin, and to run jobs": (init, demo, plan, extract),
    "To look at jobs and their features": (watch, inspect, plot, report, log, diff, verify),
    "To keep and to share features": (retry, add_features, compact, gc, push),
    "This installation": (models, spec, explain, doctor, kernels),
}
for _group, _commands in GROUPS.items():
    for _command in _commands:
        # Each paragraph on one line; the terminal wraps the lines.
        _paragraphs = (getdoc(_command) or "").split("\n\n")
        _help = "\n\n".join(_paragraph.replace("\n", " ") for _paragraph in _paragraphs)
        _name = _command.__name__.replace("_", "-")
        app.command(_name, help=_help, rich_help_panel=_group)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"earmill {version('earmill')}")
        raise typer.Exit


@app.callback()
def _earmill(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error; goes before the command.")
    ] = False,
) -> None:
    """Compute features of audio corpora with models of hearing."""


def run(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    tell_errors_as_log_lines(wants_log_lines(arguments))
    try:
        app(args=arguments, prog_name="earmill")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        # The message is printed already; with --json an event follows.
        if usage := getattr(end.__context__, "format_message", None):
            error_event(code, one_line(usage()), as_json="--json" in arguments)
        elif code == process.INTERRUPTED:
            return _fail(arguments, process.exit_code(), process.interruption())
        return code
    except OutputLost as lost:
        return lost.tell()
    except Exception as error:
        return _report(arguments, error)
    return 0


def _report(arguments: Sequence[str], error: Exception) -> int:
    shown = bool(arguments) and arguments[0] == DEBUG
    if shown:
        traceback.print_exc()
    if is_out_of_memory(error):  # also where another error was raised from it
        return _fail(arguments, 1, memory_text(error), NO_MEMORY)
    if isinstance(error, EarmillError):
        return _fail(arguments, error.exit_code, str(error), error.help_topic)
    if type(error).__module__ == "amtcore.errors":  # not imported: it takes seconds
        return _fail(arguments, 2, str(error), OF_A_MODEL)
    if is_store_error(error):
        message = f"{store_line(error)}; a job goes on with --resume"
        return _fail(arguments, 1, message, StorageError.help_topic)
    if isinstance(error, ImportError):
        missing = missing_package(error)
        return _fail(arguments, missing.exit_code, str(missing), missing.help_topic)
    where = "see the traceback" if shown else f"traceback: {_save(error)}, or {DEBUG} COMMAND ..."
    message = (
        f"unexpected {type(error).__name__}: {error}; this is a defect of earmill, please report "
        f"it ({where})"
    )
    return _fail(arguments, 1, message, A_DEFECT)


def _fail(arguments: Sequence[str], code: int, message: str, topic: str | None = None) -> int:
    line = one_line(message)
    hint = f" (help: {EXPLAIN} {topic})" if topic else ""
    print(f"earmill: {line}{hint}", file=sys.stderr, flush=True)
    error_event(code, line, topic, as_json="--json" in arguments)
    return code


def _save(error: Exception) -> str:
    """Write the traceback to a file that only its owner can read, and return the file's name."""
    try:
        handle, name = tempfile.mkstemp(prefix="earmill-traceback-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    except OSError as why:
        return f"could not be written ({why})"
    return name
