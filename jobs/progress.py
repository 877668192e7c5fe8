"""Run events for people and machines: a bar on a terminal, plain lines elsewhere, JSON on request.

All three are fed the same events and each keeps a `Tally`. What is still only planned is an
estimate and is called `about`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Protocol

from earmill.jobs.log_lines import LogLines
from earmill.jobs.terminal import console, say, say_json, tell_errors_as_log_lines
from earmill.pipeline.common.plain_text import visible
from earmill.pipeline.driver import events
from earmill.pipeline.driver.tally import Tally

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Plain lines end up in log files: totals at most this often, and unchanged ones far less.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
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
            if (more := cost(event)) is not None:
                self._print(more)
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
        if (more := cost(event)) is not None:
            self._bar.console.print(more, soft_wrap=True)
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


def make_reporter(*, as_json: bool, stream: IO[str], log_format: str = "text") -> Reporter:
    """The reporter that fits the stream: JSON or log lines on request, a bar on a terminal, else
    plain lines."""
    if as_json:
        return JsonLines(stream)
    if log_format == "json":
        tell_errors_as_log_lines()
        return LogLines(stream)
    if stream.isatty():
        return Bar(console(file=stream))
    return PlainLines(stream)
