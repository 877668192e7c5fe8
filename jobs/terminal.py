"""The way out to a terminal: all that commands print goes through here, and is made visible first.

A row id or an error text may hold escape sequences or rich markup; here they are shown, not obeyed.
JSON needs no such care: its own escapes cover every control character.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

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
        from earmill.jobs.log_lines import ERROR, log_line

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
