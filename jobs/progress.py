"""Run events for people and machines: a bar on a terminal, plain lines elsewhere, JSON on request.

All three are fed the same events and share one `Tally`. Progress and time left are counted in the
plan's audio seconds, never in rows or shards: rows differ in length, and audio is what costs.
Hours and speed are those of audio that was decoded and went through the models; what is still only
planned is an estimate and is called `about`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Protocol

from earmill.jobs.terminal import console, say, say_json
from earmill.pipeline.common.plain_text import visible
from earmill.pipeline.driver import events

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Plain lines end up in log files: totals at most this often, and unchanged ones far less.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
# Below this much work the rate says nothing.
RATE_AFTER_S = 0.5
# Of a second of audio; what costs less is not told.
LEAST_MS = 0.005
# Columns of the bar, and of the spinner and the gaps beside it.
BAR_WIDTH = 20
BAR_MARGIN = 4
# Narrower terminals get half a bar.
NARROW = 60


class Reporter(Protocol):
    """Takes every event of a run; closed once at the end, whatever happened."""

    def __call__(self, event: events.Event) -> None: ...

    def close(self) -> None: ...


class Tally:
    """Running totals of one run.

    Args:
        clock: Monotonic seconds.
    Attributes:
        audio_s: Audio of good rows, as decoded; committed shards of earlier runs included.
        planned_s: Estimated audio of all shards, `done_s` of those that are through.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work_began: float | None = None
        self._planned_before_s = self._audio_before_s = 0.0
        self._planned_done_s = self._audio_done_s = 0.0
        self._in_flight_s = 0.0
        self.job = ""
        self.planned_s = 0.0
        self.rows_ok = self.rows_bad = self.rows_total = 0

    def take(self, event: events.Event) -> None:
        """Update the totals."""
        if isinstance(event, events.JobStarted):
            self.job, self.planned_s = event.job, event.seconds_total
            self._planned_before_s = self._planned_done_s = event.seconds_done
            self._audio_before_s = self._audio_done_s = event.audio_s_done
            self.rows_ok, self.rows_bad = event.rows_ok, event.rows_bad
            self.rows_total = event.rows_total
        elif isinstance(event, events.WorkersReady):
            self._work_began = self._clock()
        elif isinstance(event, events.InFlight):
            self._in_flight_s = event.seconds
        elif isinstance(event, events.ShardDone):
            self._planned_done_s += event.seconds
            self._audio_done_s += event.audio_s
            self._in_flight_s = max(0.0, self._in_flight_s - event.seconds)
            self.rows_ok += event.rows_ok
            self.rows_bad += event.rows_bad

    @property
    def working(self) -> bool:
        """The workers are ready."""
        return self._work_began is not None

    @property
    def done_s(self) -> float:
        """Planned audio that is through."""
        return min(self._planned_done_s + self._in_flight_s, self.planned_s)

    @property
    def audio_s(self) -> float:
        return self._audio_done_s + self._in_flight_s

    @property
    def left_audio_s(self) -> float:
        """Audio that is left, as planned: an estimate."""
        return self.planned_s - self.done_s

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return self.done_s / self.planned_s if self.planned_s else 1.0

    @property
    def times_real_time(self) -> float | None:
        """Decoded audio seconds per second since the workers were ready; None while unknown."""
        return self._rate(self.audio_s - self._audio_before_s)

    @property
    def left_s(self) -> float | None:
        """Seconds of waiting that are left at this rate; None while unknown."""
        rate = self._rate(self.done_s - self._planned_before_s)
        return None if rate is None else self.left_audio_s / rate

    def _rate(self, gained_s: float) -> float | None:
        worked_s = 0.0 if self._work_began is None else self._clock() - self._work_began
        return gained_s / worked_s if worked_s >= RATE_AFTER_S and gained_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The totals as a JSON progress record; `audio_s_left` and `audio_s_total` are estimates
        while shards are left."""
        rate, left_s = self.times_real_time, self.left_s
        return {
            "event": "progress",
            "share_done": round(self.share, 4),
            "audio_s_done": round(self.audio_s, 3),
            "audio_s_total": round(self.audio_s + self.left_audio_s, 3),
            "audio_s_left": round(self.left_audio_s, 3),
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
    done_audio = audio(tally.audio_s)
    if tally.left_audio_s > 0:
        done_audio += f" of about {audio(tally.audio_s + tally.left_audio_s)}"
    parts = [f"{done_audio} audio ({100 * tally.share:.0f} %)"]
    rate, left_s = tally.times_real_time, tally.left_s
    if rate is not None:
        parts.append(f"{rate:.1f} x real time")
    parts.append(f"{tally.rows_ok:,} rows ok, {tally.rows_bad:,} quarantined")
    if left_s is not None and left_s > 0:
        parts.append(f"about {audio(tally.left_audio_s)} audio left, about {audio(left_s)}")
    return ", ".join(parts)


def short_totals(tally: Tally, width: int) -> str:
    """As much of the totals as fits beside a bar, the share done and the time left first."""
    rate, left_s = tally.times_real_time, tally.left_s
    by_importance = [f"{100 * tally.share:.0f} %"]
    if left_s is not None and left_s > 0:
        by_importance.append(f"about {audio(left_s)} left")
    if tally.rows_bad:
        by_importance.append(f"{tally.rows_bad:,} quarantined")
    if rate is not None:
        by_importance.append(f"{rate:.0f} x real time")
    by_importance += [f"{tally.rows_ok:,} rows ok", f"{audio(tally.audio_s)} audio"]
    line = by_importance[0]
    for part in by_importance[1:]:
        if len(line) + len(part) + 2 > width:
            break
        line += f", {part}"
    return line


def news(event: events.Event) -> str | None:
    """One line for an event worth telling by itself; None for the rest."""
    match event:
        case events.Step():
            return f"{event.text} ..."
        case events.Note() | events.SourceChanged():
            return event.text
        case events.JobStarted():
            done = f", {event.shards_done:,} already committed" if event.shards_done else ""
            rows, shards = quantity(event.rows_total, "row"), quantity(event.shards_total, "shard")
            about = f"about {audio(event.seconds_total)} audio"
            return f"{event.job}: {rows}, {about} in {shards}{done} -> {event.output}"
        case events.WorkersReady():
            who = "worker" if event.workers == 1 else f"first of {event.workers} workers"
            return (
                f"{who} ready after {event.start_s:.1f} s "
                f"({event.device}, {quantity(event.threads, 'thread')})"
            )
        case events.ShardRetry():
            return f"shard {event.shard_id}: attempt {event.attempt} failed: {event.reason}"
        case events.ShardWaits():
            return (
                f"shard {event.shard_id} waits: {event.reason}; next try in {event.pause_s:.0f} s"
            )
        case events.ShardFailed():
            return f"shard {event.shard_id} given up: {event.reason}"
        case events.WorkerLost():
            return f"worker {event.worker} lost: {event.reason}; starting it again"
        case events.BisectStarted():
            return f"shard {event.shard_id}: searching {quantity(event.rows, 'row')} for the cause"
        case events.CulpritFound():
            return f"shard {event.shard_id}: row {event.row_id!r} quarantined: {event.reason}"
        case events.Draining():
            return f"{event.reason}: finishing {quantity(event.in_flight, 'shard')} in flight"
        case events.JobFinished():
            return event.message
    return None


def cost(event: events.Event) -> str | None:
    """What the audio of a run has cost, the dearest first; None while it is not over."""
    if not isinstance(event, events.JobFinished) or not (event.cpu_s and event.seconds):
        return None
    by_ms = sorted(((1000 * s / event.seconds, part) for part, s in event.cpu_s.items()))[::-1]
    parts = ", ".join(f"{part} {ms:.2f}" for ms, part in by_ms if ms >= LEAST_MS)
    return f"CPU milliseconds per second of audio: {parts}"


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
            if spent := cost(event):
                self._print(spent)
        elif self._tally.working and self._clock() - self._last >= self._pause_s():
            self._done_s = self._tally.done_s
            self._print(totals(self._tally))

    def close(self) -> None:
        """Nothing is held open."""

    def _pause_s(self) -> float:
        return LINE_EVERY_S if self._tally.done_s > self._done_s else SAME_LINE_EVERY_S

    def _print(self, line: str) -> None:
        self._last = self._clock()
        say(line, self._stream)


class JsonLines:
    """Every event as one JSON object a line; the totals take the place of `in_flight`."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._tally = stream, Tally(clock)

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        is_totals = isinstance(event, events.InFlight)
        record = self._tally.to_dict() if is_totals else event.to_dict()
        say_json(record, self._stream)

    def close(self) -> None:
        """Nothing is held open."""


class Bar:
    """A live bar at the bottom of a terminal, news above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._tally = Tally(clock)
        self._bar_width = BAR_WIDTH if console.width >= NARROW else BAR_WIDTH // 2
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            # Ray's session exchanges the standard streams as well; of two that do, the second
            # would put back what the first had set, and the exit codes of colours turn into text.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        if isinstance(event, events.JobFinished):
            self._bar.stop()
        line = news(event)
        if line is not None:
            style = "yellow" if isinstance(event, _WARNINGS) else None
            self._bar.console.print(visible(line), style=style, soft_wrap=True)
        if spent := cost(event):
            self._bar.console.print(spent, soft_wrap=True)
        if isinstance(event, events.JobStarted):
            self._task = self._bar.add_task("", total=event.seconds_total)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=self._tally.done_s, description=self._words())

    def refresh(self) -> None:
        """Draw now instead of a tenth of a second later."""
        self._bar.refresh()

    def _words(self) -> str:
        if not self._tally.working:
            return "starting workers"
        return short_totals(self._tally, self._bar.console.width - self._bar_width - BAR_MARGIN)

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()


_WARNINGS = (
    events.ShardRetry,
    events.ShardWaits,
    events.ShardFailed,
    events.WorkerLost,
    events.CulpritFound,
    events.SourceChanged,
)


def make_reporter(*, as_json: bool, stream: IO[str]) -> Reporter:
    """The reporter that fits the stream: JSON on request, a bar on a terminal, else plain lines."""
    if as_json:
        return JsonLines(stream)
    if stream.isatty():
        return Bar(console(file=stream))
    return PlainLines(stream)
