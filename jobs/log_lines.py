"""A run as structured log lines: one JSON object a line, for collectors of logs.

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
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

from earmill.pipeline.common.one_line import one_line
from earmill.pipeline.common.redact import redact_text

if TYPE_CHECKING:
    from earmill.pipeline.driver.events import Event

INFO, WARNING, ERROR = "info", "warning", "error"
# Totals are told so often, s.
PROGRESS_EVERY_S = 10.0
# Of one text; an exception may quote megabytes.
LONGEST_TEXT = 4000
_WARNINGS = frozenset(
    {
        "source_changed",
        "shard_retry",
        "shard_waits",
        "worker_lost",
        "bisect_started",
        "culprit_found",
        "row_quarantined",
        "draining",
    }
)
# Fields of events that are called otherwise in a log, where lines of all kinds stand together.
_CALLED = {"shard_id": "shard", "text": "message"}
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


class LogLines:
    """Every event as a line; the totals every few seconds.

    Args:
        stream: Where to. clock: Monotonic seconds.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        from earmill.pipeline.driver.tally import Tally

        self._stream, self._clock = stream, clock
        self._tally = Tally(clock)
        self._told_at = clock()
        self._job: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        fields = event.to_dict()
        kind = fields.pop("event")
        if kind == "in_flight":
            self._progress()
            return
        if kind == "job_started":
            self._job = {"job": fields.pop("job"), "plan_id": fields.pop("plan_id")}
        fields = {_CALLED.get(name, name): value for name, value in fields.items()}
        fields.pop("message", None)
        self._write(log_line(kind, level_of(event), text_of(event), **self._job, **fields))

    def close(self) -> None:
        """Nothing is held open."""

    def _progress(self) -> None:
        now = self._clock()
        if not self._tally.working or now - self._told_at < PROGRESS_EVERY_S:
            return
        from earmill.jobs.progress import totals

        self._told_at = now
        fields = self._tally.to_dict()
        self._write(log_line(fields.pop("event"), INFO, totals(self._tally), **self._job, **fields))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def text_of(event: Event) -> str:
    """Return an event for people; empty where it has only figures."""
    from earmill.jobs.progress import news
    from earmill.pipeline.driver import events

    if (told := news(event)) is not None:
        return told
    if isinstance(event, events.ShardDone):
        return f"shard {event.shard_id} is committed"
    if isinstance(event, events.RowQuarantined):
        return f"row {event.row_id!r} quarantined: {event.error_class}: {event.message}"
    return ""


def level_of(event: Event) -> str:
    """Return `info`, `warning` or `error`."""
    from earmill.pipeline.driver.events import JobFinished

    failed = isinstance(event, JobFinished) and event.exit_code
    if failed or event.kind == "shard_failed":
        return ERROR
    return WARNING if event.kind in _WARNINGS else INFO


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
