"""Run events for people and machines: a bar on a terminal, plain lines elsewhere, JSON on request.

All three are fed the same events and share one `Tally`. Progress, rate and time left are counted
in audio seconds, never in rows or shards: rows differ in length, and audio is what costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Protocol

from pipeline import events

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Plain lines end up in log files: totals at most this often, and unchanged ones far less.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
# Below this much work the rate says nothing.
RATE_AFTER_S = 0.5


class Reporter(Protocol):
    """Takes every event of a run; closed once at the end, whatever happened."""

    def __call__(self, event: events.Event) -> None: ...

    def close(self) -> None: ...


class Tally:
    """Running totals of one run.

    Args:
        clock: Monotonic seconds.
    Attributes:
        done_s, total_s: Audio seconds, committed shards of earlier runs included.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work_began: float | None = None
        self._before_s = 0.0
        self._committed_s = 0.0
        self._in_flight_s = 0.0
        self.job = ""
        self.total_s = 0.0
        self.rows_ok = self.rows_bad = self.rows_total = 0

    def take(self, event: events.Event) -> None:
        """Update the totals."""
        if isinstance(event, events.JobStarted):
            self.job, self.total_s = event.job, event.seconds_total
            self._before_s = self._committed_s = event.seconds_done
            self.rows_ok, self.rows_bad = event.rows_ok, event.rows_bad
            self.rows_total = event.rows_total
        elif isinstance(event, events.WorkersReady):
            self._work_began = self._clock()
        elif isinstance(event, events.InFlight):
            self._in_flight_s = event.seconds
        elif isinstance(event, events.ShardDone):
            self._committed_s += event.seconds
            self._in_flight_s = max(0.0, self._in_flight_s - event.seconds)
            self.rows_ok += event.rows_ok
            self.rows_bad += event.rows_bad

    @property
    def working(self) -> bool:
        """The workers are ready."""
        return self._work_began is not None

    @property
    def done_s(self) -> float:
        return min(self._committed_s + self._in_flight_s, self.total_s)

    @property
    def times_real_time(self) -> float | None:
        """Audio seconds per second since the workers were ready; None while unknown."""
        worked_s = 0.0 if self._work_began is None else self._clock() - self._work_began
        gained_s = self.done_s - self._before_s
        if worked_s < RATE_AFTER_S or gained_s <= 0:
            return None
        return gained_s / worked_s

    @property
    def left_s(self) -> float | None:
        """Seconds of waiting that are left at this rate; None while unknown."""
        rate = self.times_real_time
        return None if rate is None else (self.total_s - self.done_s) / rate

    def to_dict(self) -> dict[str, Any]:
        """The totals as a JSON progress record."""
        rate, left_s = self.times_real_time, self.left_s
        return {
            "event": "progress",
            "audio_s_done": round(self.done_s, 3),
            "audio_s_total": round(self.total_s, 3),
            "audio_s_left": round(self.total_s - self.done_s, 3),
            "times_real_time": None if rate is None else round(rate, 2),
            "eta_s": None if left_s is None else round(left_s, 1),
            "rows_ok": self.rows_ok,
            "rows_bad": self.rows_bad,
            "rows_total": self.rows_total,
        }


def audio(seconds: float) -> str:
    """Audio seconds as people say them: 42 s, 12.5 min, 3.20 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def quantity(n: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def bytes_text(n: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def totals(tally: Tally) -> str:
    """The totals in one line."""
    share = 100 * tally.done_s / tally.total_s if tally.total_s else 100.0
    parts = [f"{audio(tally.done_s)} of {audio(tally.total_s)} audio ({share:.0f} %)"]
    rate, left_s = tally.times_real_time, tally.left_s
    if rate is not None:
        parts.append(f"{rate:.1f} x real time")
    parts.append(f"{tally.rows_ok:,} rows ok, {tally.rows_bad:,} quarantined")
    if left_s is not None and left_s > 0:
        left_audio = audio(tally.total_s - tally.done_s)
        parts.append(f"{left_audio} audio left, about {audio(left_s)}")
    return ", ".join(parts)


def news(event: events.Event) -> str | None:
    """One line for an event worth telling by itself; None for the rest."""
    match event:
        case events.Step():
            return f"{event.text} ..."
        case events.JobStarted():
            done = f", {event.shards_done:,} already committed" if event.shards_done else ""
            return (
                f"{event.job}: {quantity(event.rows_total, 'row')}, {audio(event.seconds_total)} "
                f"audio in {quantity(event.shards_total, 'shard')}{done} -> {event.output}"
            )
        case events.WorkersReady():
            who = "worker" if event.workers == 1 else f"first of {event.workers} workers"
            return (
                f"{who} ready after {event.start_s:.1f} s "
                f"({event.device}, {quantity(event.threads, 'thread')})"
            )
        case events.ShardRetry():
            return f"shard {event.shard_id}: attempt {event.attempt} failed: {event.reason}"
        case events.ShardFailed():
            return f"shard {event.shard_id} given up: {event.reason}"
        case events.WorkerLost():
            return f"worker {event.worker} lost: {event.reason}; starting it again"
        case events.BisectStarted():
            return f"shard {event.shard_id}: searching {quantity(event.rows, 'row')} for the cause"
        case events.RowGuilty():
            return f"shard {event.shard_id}: row {event.row_id!r} quarantined: {event.reason}"
        case events.Draining():
            return f"{event.reason}: finishing {quantity(event.in_flight, 'shard')} in flight"
        case events.JobFinished():
            return event.message
    return None


class PlainLines:
    """News as lines, totals every few seconds."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._tally = Tally(clock)
        self._last = clock()
        self._done_s = 0.0

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        line = news(event)
        if line is not None:
            self._print(line)
        elif self._tally.working and self._clock() - self._last >= self._pause_s():
            self._done_s = self._tally.done_s
            self._print(totals(self._tally))

    def close(self) -> None:
        """Nothing is held open."""

    def _pause_s(self) -> float:
        return LINE_EVERY_S if self._tally.done_s > self._done_s else SAME_LINE_EVERY_S

    def _print(self, line: str) -> None:
        self._last = self._clock()
        print(line, file=self._stream, flush=True)


class JsonLines:
    """Every event as one JSON object a line; the totals take the place of `in_flight`."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._tally = stream, Tally(clock)

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        is_totals = isinstance(event, events.InFlight)
        record = self._tally.to_dict() if is_totals else event.to_dict()
        print(json.dumps(record), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held open."""


class Bar:
    """A live bar at the bottom of a terminal, news above it."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._tally = Tally()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[totals]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        if isinstance(event, events.JobFinished):
            self._bar.stop()
        line = news(event)
        if line is not None:
            style = "yellow" if isinstance(event, _WARNINGS) else None
            self._bar.console.print(line, style=style, markup=False, highlight=False)
        if isinstance(event, events.JobStarted):
            self._task = self._bar.add_task("starting", total=event.seconds_total, totals="")
            self._bar.start()
        if self._task is not None:
            description = "" if self._tally.times_real_time is not None else "starting workers"
            self._bar.update(
                self._task,
                completed=self._tally.done_s,
                description=description,
                totals=totals(self._tally),
            )

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()


_WARNINGS = (events.ShardRetry, events.ShardFailed, events.WorkerLost, events.RowGuilty)


def make_reporter(*, as_json: bool, stream: IO[str]) -> Reporter:
    """The reporter that fits the stream: JSON on request, a bar on a terminal, else plain lines."""
    if as_json:
        return JsonLines(stream)
    if stream.isatty():
        from rich.console import Console

        return Bar(Console(file=stream))
    return PlainLines(stream)
