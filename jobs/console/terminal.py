"""Output of commands: text made visible, JSON lines, and structured log lines.

`say` and `console` show escape sequences and rich markup of row ids and error texts instead of
passing them to the terminal. `log_line` makes one JSON object on one line, without secrets; names
of its fields are part of the interface (docs/watching.md lists them, a test compares).
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from earmill.jobs.console.process import OutputLost
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.redact import redact_text
from earmill.pipeline.common.text import json_value, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

EXPLAIN = "earmill explain"  # Error lines name this command with a topic.
_log_lines = [False]  # True in a process whose error events are log lines.


def say(text: str, file: IO[str] | None = None) -> None:
    """Print one line to standard output or `file`; a line break in it is shown as an escape."""
    print(visible(text), file=file or sys.stdout, flush=True)


def teller(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints on standard error that a step begins."""

    def tell(text: str) -> None:
        if not quiet:
            say(f"{text} ...", sys.stderr)

    return tell


def say_json(value: Any, file: IO[str] | None = None) -> None:
    print(json.dumps(value), file=file or sys.stdout, flush=True)


def error_event(
    exit_code: int, message: str, topic: str | None = None, *, as_json: bool = False
) -> None:
    """Print the last JSON or log line of a command that failed without a result, if it is asked
    for. Standard error has the message already, so a lost standard output is no further error."""
    hint = {"help": f"{EXPLAIN} {topic}"} if topic else {}
    with suppress(OutputLost, BrokenPipeError):
        if _log_lines[0]:
            print(log_line("error", ERROR, message, exit_code=exit_code, **hint), flush=True)
        elif as_json:
            say_json({"event": "error", "exit_code": exit_code, "message": message, **hint})


def tell_errors_as_log_lines(wanted: bool = True) -> None:
    _log_lines[0] = wanted


def console(**options: Any) -> Console:
    """Return a rich console that shows markup, emoji codes and control characters as text."""
    from rich.console import Console
    from rich.text import Text

    class VisibleConsole(Console):
        def render_str(self, text: str, **style: Any) -> Text:
            return super().render_str(visible(text, keep="\n"), **style)

    return VisibleConsole(markup=False, emoji=False, highlight=False, **options)


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts:
        table.add_row(name, value)
    console().print(table)


# Beginning of a URI after `Path` has merged its slashes; a single letter is a drive.
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: Path) -> None:
    """Refuse a URI, for which a folder such as `s3:` would be created on this machine."""
    if URI.match(str(path)):
        raise OutputError(f"expected a path of this machine, got {path}, which reads as a uri")


INFO, WARNING, ERROR = "info", "warning", "error"
LONGEST_TEXT = 4000  # Characters of a text; an exception may quote megabytes.
RUN_ID = os.urandom(4).hex()  # Identifies the log lines of this process.


def log_line(event: str, level: str, message: str, **fields: Any) -> str:
    """Return a log line without its line break; `event` is a stable name."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": now, "level": level, "event": event, "message": one_line(message)}
    process = {"run": RUN_ID, "host": socket.gethostname(), "pid": os.getpid()}
    clean = json_value({**head, **process, **fields}, lambda text: redact_text(text)[:LONGEST_TEXT])
    return json.dumps(clean, allow_nan=False)
