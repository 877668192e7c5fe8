"""Reporters of a run: a bar on a terminal, plain lines elsewhere, JSON or log lines on request.

Progress goes to standard error as text, and the result to standard output. Each reporter gets the
same events and keeps a `RunTotals`. Planned figures are estimates and begin with `about`.

`logged` sends the messages of a job to Python's `logging`, under the logger `earmill`. Nothing
is printed unless the script sets a handler.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

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
from earmill.pipeline.driver.run_totals import RunTotals

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from earmill.pipeline.driver.events import Event, Sink

# Seconds between totals as plain lines, which end up in log files; and if nothing changed.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
# Columns of the bar; columns of the spinner and the gaps beside the bar.
BAR_WIDTH = 20
BAR_MARGIN = 4
# Terminals with fewer columns get half a bar.
NARROW = 60
# Fields of events that have another name in log lines.
_CALLED = {"shard_id": "shard", "text": "message"}
# Seconds between totals in a log.
PROGRESS_EVERY_S = 10.0


class Reporter:
    """Takes every event of a run; `close` is called once at the end, also after an error."""

    def __call__(self, event: events.Event) -> None:
        """Report an event."""

    def close(self) -> None:
        """Release what the reporter holds."""


class PlainLines(Reporter):
    """Events as lines, totals every few seconds, and the result as a line of its own.

    Args:
        news: Stream for events and totals.
        result: Stream for the result.
        clock: Monotonic seconds.
    """

    def __init__(
        self, news: IO[str], result: IO[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._news, self._result, self._clock = news, result, clock
        self._tally = RunTotals(clock)
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

    def _pause_s(self) -> float:
        return LINE_EVERY_S if self._tally.done_s > self._done_s else SAME_LINE_EVERY_S

    def _print(self, line: str) -> None:
        self._last = self._clock()
        say(line, self._news)


class JsonLines(Reporter):
    """One JSON object a line for every event; totals replace `in_flight`."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._tally = stream, RunTotals(clock)

    def __call__(self, event: events.Event) -> None:
        self._tally.take(event)
        is_totals = isinstance(event, events.InFlight)
        record = self._tally.to_dict() if is_totals else event.to_dict()
        say_json(record, self._stream)


class LogLines(Reporter):
    """One log line for every event, and totals every few seconds.

    Args:
        stream: Output stream.
        clock: Monotonic seconds.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._tally = RunTotals(clock)
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

    def _progress(self) -> None:
        now = self._clock()
        if not self._tally.working or now - self._told_at < PROGRESS_EVERY_S:
            return
        self._told_at = now
        fields = self._tally.to_dict()
        self._write(log_line(fields.pop("event"), INFO, totals(self._tally), **self._job, **fields))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Bar(Reporter):
    """A live bar at the bottom of a terminal or of a notebook's output, with events above it.

    Args:
        console: Console for the bar and the events.
        result: Stream for the result; None for the console.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        result: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._tally, self._result = RunTotals(clock), result
        self._bar_width = BAR_WIDTH if console.width >= NARROW else BAR_WIDTH // 2
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            # Ray replaces the standard streams too. If both did, one would restore streams that
            # the other had set, and escape codes of colours would be printed as text.
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
        """Stop the bar."""
        self._bar.stop()


class Unfailing(Reporter):
    """A reporter whose run goes on when its output cannot be written any more.

    `earmill watch` and `inspect` show the same facts later. So a pipe without a reader, a full disk
    or a closed stream does not end the run. The loss is printed once on standard error; the exit
    code does not change.

    Args:
        reporter: Writes the output.
        quiet: Report the end of the run alone.
    """

    def __init__(self, reporter: Reporter, *, quiet: bool = False) -> None:
        self._reporter, self._quiet, self._is_lost = reporter, quiet, False

    def __call__(self, event: events.Event) -> None:
        if not self._is_lost and (not self._quiet or isinstance(event, events.JobFinished)):
            self._try(lambda: self._reporter(event))

    def close(self) -> None:
        self._try(self._reporter.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
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

    JSON, log lines and the result go to standard output; events as text and the bar go to standard
    error.

    Args:
        as_json: JSON lines.
        log_format: `json` for log lines.
        quiet: Report the end of the run alone.
        output: Stream in place of standard output.
        errors: Stream in place of standard error.
    """
    output, errors = output or sys.stdout, errors or sys.stderr
    reporter: Reporter
    if as_json:
        reporter = JsonLines(output)
    elif log_format == "json":
        tell_errors_as_log_lines()
        reporter = LogLines(output)
    elif not quiet and errors.isatty():
        reporter = Bar(console(file=errors), output)
    else:
        reporter = PlainLines(errors, output)
    return Unfailing(reporter, quiet=quiet)


def notebook_reporter() -> Reporter | None:
    """Return the reporter of a run in a notebook; None if this process is no notebook kernel.

    It is a bar if ipywidgets are installed (the extra `notebook`), because rich needs them.
    """
    shown = console()
    if not shown.is_jupyter:
        return None
    has_widgets = find_spec("ipywidgets") is not None
    return Unfailing(Bar(shown) if has_widgets else PlainLines(sys.stdout, sys.stdout))


LOGGER = logging.getLogger("earmill")
# Without a handler of its own a warning would be printed.
LOGGER.addHandler(logging.NullHandler())


def logged(sink: Sink) -> Sink:
    """Return a sink that logs every event with a text, and passes all events on.

    A log record has the event as its attribute `event`.
    """

    def take(event: Event) -> None:
        level = getattr(logging, level_of(event).upper())
        if LOGGER.isEnabledFor(level) and (text := text_of(event)):
            LOGGER.log(level, "%s", one_line(text), extra={"event": event})
        sink(event)

    return take


def logged_text(tell: Callable[[str], None] = lambda text: None) -> Callable[[str], None]:
    """Return a listener that logs each text and passes it on."""

    def take(text: str) -> None:
        LOGGER.info("%s", one_line(text))
        tell(text)

    return take
