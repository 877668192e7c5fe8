"""The way out to a terminal: all that commands print goes through here, and is made visible first.

A row id or an error text may hold escape sequences or rich markup; here they are shown, not obeyed.
JSON needs no such care: its own escapes cover every control character.

`log_line` makes a structured log line: one JSON object on one line, for collectors of logs.

Names of fields are part of the interface (docs/watching.md lists them, a test compares). Texts come
from exceptions, file names and rows: secrets of their uris go, line breaks and whatever is no text
are escapes, and a line stays one line whatever they hold.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.redact import redact_text
from earmill.pipeline.common.text import one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

LINE_BREAK = "\n"
# What an error names: this with a topic.
EXPLAIN = "earmill explain"
# Whether what a command prints is log lines.
_log_lines = [False]


def say(text: str, file: IO[str] | None = None) -> None:
    """Print one line to standard output or `file`; a line break in it is shown as an escape."""
    print(visible(text), file=file or sys.stdout, flush=True)


def teller(*, quiet: bool = False) -> Callable[[str], None]:
    """Return what tells on standard error that something begins, which may take a while.

    Args:
        quiet: Tell nothing.
    """

    def tell(text: str) -> None:
        if not quiet:
            say(f"{text} ...", sys.stderr)

    return tell


def say_json(value: Any, file: IO[str] | None = None) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(value), file=file or sys.stdout, flush=True)


def say_error(message: str, topic: str | None = None) -> None:
    """The one line on standard error with which a command ends.

    Args:
        topic: Of `earmill explain`, which helps.
    """
    told = f" (help: {EXPLAIN} {topic})" if topic else ""
    print(f"earmill: {one_line(message)}{told}", file=sys.stderr, flush=True)


def error_event(exit_code: int, message: str, topic: str | None = None) -> None:
    """The last JSON or log line of a command that failed without a result."""
    told = {"help": f"{EXPLAIN} {topic}"} if topic else {}
    if has_log_lines():
        print(log_line("error", ERROR, message, exit_code=exit_code, **told), flush=True)
    else:
        say_json({"event": "error", "exit_code": exit_code, "message": message, **told})


def tell_errors_as_log_lines(wanted: bool = True) -> None:
    """From now on `error_event` is a log line."""
    _log_lines[0] = wanted


def has_log_lines() -> bool:
    """Whether it is."""
    return _log_lines[0]


def console(**options: Any) -> Console:
    """A rich console that shows markup, emoji codes and control characters instead of obeying."""
    from rich.console import Console
    from rich.text import Text

    class VisibleConsole(Console):
        def render_str(self, text: str, **style: Any) -> Text:
            return super().render_str(visible(text, keep=LINE_BREAK), **style)

    return VisibleConsole(markup=False, emoji=False, highlight=False, **options)


# What `Path` leaves of the beginning of a uri; one letter is a drive.
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: Path) -> None:
    """Refuse what is no path of this machine.

    Raises:
        OutputError: It is a uri, of which a folder `s3:` would be made here.
    """
    if URI.match(str(path)):
        raise OutputError(f"expected a path of this machine, got {path}, which reads as a uri")


INFO, WARNING, ERROR = "info", "warning", "error"
# Of one text; an exception may quote megabytes.
LONGEST_TEXT = 4000
# A process is one run; its lines are found again by this.
RUN_ID = os.urandom(4).hex()


def log_line(event: str, level: str, message: str, **fields: Any) -> str:
    """One line, without its end.

    Args:
        event: What happened; a stable name. fields: Plain values.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"time": now, "level": level, "event": event, "message": one_line(message)}
    process = {"run": RUN_ID, "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(_clean({**head, **process, **fields}), allow_nan=False)


def _clean(value: Any) -> Any:
    """A plain value as JSON has it: texts without secrets, and no number that is none."""
    if isinstance(value, str):
        return redact_text(value)[:LONGEST_TEXT]
    if isinstance(value, Mapping):
        return {str(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
