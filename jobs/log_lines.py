"""A structured log line: one JSON object on one line, for collectors of logs.

Names of fields are part of the interface (docs/watching.md lists them, a test compares). Texts come
from exceptions, file names and rows: secrets of their uris go, line breaks and whatever is no text
are escapes, and a line stays one line whatever they hold.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from earmill.pipeline.common.redact import redact_text
from earmill.pipeline.common.text import one_line

INFO, WARNING, ERROR = "info", "warning", "error"
# Of one text; an exception may quote megabytes.
LONGEST_TEXT = 4000
# A process is one run; its lines are found again by this.
RUN_ID = secrets.token_hex(4)


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
