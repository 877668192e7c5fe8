"""What an exception or a text says, on one line: every message of ours that quotes another's.

Secrets of uris go, line breaks become spaces, and what a terminal would obey is shown as an escape.
Doing it twice changes nothing.
"""

from __future__ import annotations

import os
import traceback

from earmill.pipeline.common.plain_text import visible
from earmill.pipeline.common.redact import redact_text

MESSAGE_LIMIT = 600
# Of a value or a name that a message quotes.
VALUE_LIMIT = 60


def one_line(said: BaseException | str) -> str:
    """The text alone, whole."""
    return visible(redact_text(" ".join(str(said).split())))


def cut(text: str) -> str:
    """A text of at most `VALUE_LIMIT` characters."""
    return text if len(text) <= VALUE_LIMIT else f"{text[: VALUE_LIMIT - 3]}..."


def named_line(error: BaseException, *, where: bool = False) -> str:
    """Class and text, cut to `MESSAGE_LIMIT` characters; on request also the innermost place."""
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if where and frames:
        last = frames[-1]
        place = f" ({os.path.basename(last.filename)}:{last.lineno} {last.name})"
    return f"{type(error).__name__}: {one_line(error) or 'no message'}"[:MESSAGE_LIMIT] + place
