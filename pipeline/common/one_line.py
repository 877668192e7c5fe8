"""An exception as one line."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

from earmill.pipeline.common.redact import redact_text

if TYPE_CHECKING:
    pass


MESSAGE_LIMIT = 600


def one_line(error: BaseException, *, where: bool = False) -> str:
    """An exception as one line: class, text and, on request, the innermost place."""
    text = redact_text(" ".join(str(error).split())) or "no message"
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if where and frames:
        last = frames[-1]
        place = f" ({os.path.basename(last.filename)}:{last.lineno} {last.name})"
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] + place
