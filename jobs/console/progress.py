"""Run events for people and machines: a bar on a terminal, plain lines elsewhere, JSON or log lines
on request.

Text tells what happens meanwhile on standard error, and the result on standard output.

All are fed the same events and each keeps a `Tally`. What is still only planned is an
estimate and is called `about`.

`logged` sends the messages of a job to Python's `logging`, under the logger `earmill`.

A script that runs a job from Python hears of it as of any other library: nothing is printed unless
the script sets a handler.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Protocol

from earmill.jobs.console.job_texts import cost, level_of, news, short_totals, text_of, totals
from earmill.jobs.console.process import OutputLost
from earmill.jobs.console.terminal import (
    INFO,
    console,
    log_line,
    say,
    say_json,
    tell_errors_as_log_lines,
)
from earmill.pipeline.common.text import one_line, visible
from earmill.pipeline.driver import events
from earmill.pipeline.driver.tally import Tally

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from earmill.pipeline.driver.events import Event, Sink

# Plain lines end up in log files: totals at most this often, and unchanged ones far less.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
# Columns of the bar, and of the spinner and the gaps beside it.
BAR_WIDTH = 20
BAR_MARGIN = 4
# Narrower terminals get half a bar.
NARROW = 60
# Fields of events that are called otherwise in a log, where lines of all kinds stand together.
_CALLED = {"shard_id": "shard", "text": "message"}
# A log has the totals every so many seconds.
PROGRESS_EVERY_S = 10.0


class Reporter(Protocol):
    """Takes every event of a run; closed once at the end, whatever happened."""

    def __call__(self, event: events.Event) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """News as lines, totals every few seconds; the result is a line of its own.

    Args:
        news: Stream for what happens meanwhile.
        result: Stream for how the run ended.
        clock: Monotonic seconds.
    """

    def __init__(
        self, news: IO[str], result: IO[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._news, self._result, self._clock = news, result, clock
        self._tally = Tally(clock)
        self._last = clock()
        self._done_s = 0.0

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        line = news(event)
        if isinstance(event, events.JobFinished):
            say(event.message, self._result)
            if (more := cost(event)) is not None:
                self._print(more)
        elif line is not None:
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
        say(line, self._news)


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


class LogLines:
    """Every event as a line; the totals every few seconds.

    Args:
        stream: Where to.
        clock: Monotonic seconds.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._tally = Tally(clock)
        self._told_at = clock()
        self._job: dict[str, Any] = {}

    def __call__(self, event: events.Event) -> None:
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
        self._told_at = now
        fields = self._tally.to_dict()
        self._write(log_line(fields.pop("event"), INFO, totals(self._tally), **self._job, **fields))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Bar:
    """A live bar at the bottom of a terminal or in the output of a notebook, news above it.

    Args:
        console: Where the bar and the news go.
        result: Stream for how the run ended; None for the console.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        result: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._tally, self._result = Tally(clock), result
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
            self._finished(event)
        elif (line := news(event)) is not None:
            style = "yellow" if isinstance(event, _WARNINGS) else None
            self._bar.console.print(visible(line), style=style, soft_wrap=True)
        if isinstance(event, events.JobStarted):
            self._task = self._bar.add_task("", total=event.seconds_total)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=self._tally.done_s, description=self._words())

    def refresh(self) -> None:
        """Draw now instead of a tenth of a second later."""
        self._bar.refresh()

    def _finished(self, event: events.JobFinished) -> None:
        self._bar.stop()
        if self._result is None:
            self._bar.console.print(visible(event.message), soft_wrap=True)
        else:
            say(event.message, self._result)
        if (more := cost(event)) is not None:
            self._bar.console.print(more, soft_wrap=True)

    def _words(self) -> str:
        if not self._tally.working:
            return "starting workers"
        return short_totals(self._tally, self._bar.console.width - self._bar_width - BAR_MARGIN)

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()


class OnlyTheResult:
    """A reporter that tells the end of a run and nothing else."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.JobFinished):
            self._reporter(event)

    def close(self) -> None:
        """Close the reporter."""
        self._reporter.close()


class Unfailing:
    """A reporter of a run that goes on where its output cannot be written any more.

    A run is for its rows; `earmill watch` and `inspect` show again what it prints. A pipe whose
    reader is gone, a full disk or a closed stream therefore ends no run. The loss is told once on
    standard error, and the exit code stays that of the run.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._is_lost = reporter, False

    def __call__(self, event: events.Event) -> None:
        if not self._is_lost:
            self._try(lambda: self._reporter(event))

    def close(self) -> None:
        """Close the reporter."""
        self._try(self._reporter.close)

    def _try(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except (OutputLost, OSError, ValueError) as error:
            self._is_lost = True
            with suppress(OutputLost, OSError, ValueError):
                say(f"earmill: {error}; the run goes on without it", sys.stderr)


_WARNINGS = (
    events.ShardRetry,
    events.ShardWaits,
    events.ShardFailed,
    events.WorkerLost,
    events.CulpritFound,
    events.SourceChanged,
)


def make_reporter(
    *,
    as_json: bool = False,
    log_format: str = "text",
    quiet: bool = False,
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
) -> Reporter:
    """Return the reporter of a run.

    JSON, log lines and the result go to standard output; news as text and the bar go to standard
    error.

    Args:
        as_json: JSON lines.
        log_format: `json` for log lines.
        quiet: Tell the end of the run only.
        output: In place of standard output.
        errors: In place of standard error.
    """
    output, errors = output or sys.stdout, errors or sys.stderr
    found: Reporter
    if as_json:
        found = JsonLines(output)
    elif log_format == "json":
        tell_errors_as_log_lines()
        found = LogLines(output)
    elif not quiet and errors.isatty():
        found = Bar(console(file=errors), output)
    else:
        found = PlainLines(errors, output)
    return Unfailing(OnlyTheResult(found) if quiet else found)


def notebook_reporter() -> Reporter | None:
    """Return what tells of a run in a notebook; None where this process is no kernel of one.

    It is a bar where ipywidgets are installed, which rich draws it with (the extra `notebook`).
    """
    shown = console()
    if not shown.is_jupyter:
        return None
    if find_spec("ipywidgets") is not None:
        return Unfailing(Bar(shown))
    return Unfailing(PlainLines(sys.stdout, sys.stdout))


LOGGER = logging.getLogger("earmill")
# Without a handler of its own a warning would be printed.
LOGGER.addHandler(logging.NullHandler())


def logged(sink: Sink) -> Sink:
    """Return a sink that logs every event that has a text, and hands all on.

    A record has the event as its attribute `event`.
    """

    def take(event: Event) -> None:
        level = getattr(logging, level_of(event).upper())
        if LOGGER.isEnabledFor(level) and (text := text_of(event)):
            LOGGER.log(level, "%s", one_line(text), extra={"event": event})
        sink(event)

    return take


def logged_text(tell: Callable[[str], None] = lambda text: None) -> Callable[[str], None]:
    """Return a listener that logs each text and hands it on."""

    def take(text: str) -> None:
        LOGGER.info("%s", one_line(text))
        tell(text)

    return take
