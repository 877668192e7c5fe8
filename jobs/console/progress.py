"""Report the progress of a run, and stop the run on a signal.

A bar on a terminal, plain lines elsewhere, JSON or log lines on request. Text goes to standard
error, the result to standard output. SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the run to finish the
shards in flight; a second signal ends the process at once.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from types import FrameType, MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from earmill.jobs.console import process
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
from earmill.pipeline.driver.events import Event, Sink, StopRequest
from earmill.pipeline.driver.run_totals import RunTotals

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Seconds between totals as plain lines, which end up in log files; and if nothing changed.
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
# Columns of the bar; columns of the spinner and the gaps beside the bar.
BAR_WIDTH = 20
BAR_MARGIN = 4
NARROW = 60  # Terminals with fewer columns get half a bar.
# Fields of events that have another name in log lines.
_CALLED = {"shard_id": "shard", "text": "message"}
PROGRESS_EVERY_S = 10.0  # Seconds between totals in a log.


class Reporter:
    """Takes every event of a run; `close` is called once at the end, also after an error. The
    result goes to the stream `result`. If the output is lost, the run goes on, its exit code stays,
    and standard error says so once."""

    quiet = False  # Report the end of the run alone.

    def __init__(self, result: IO[str] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._result, self._is_lost = result, False
        self._clock, self._tally, self._told_at = clock, RunTotals(clock), clock()

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        if not self._is_lost and (not self.quiet or isinstance(event, events.JobFinished)):
            with self._losing_output():
                self._report(event)

    def close(self) -> None:
        """Give the terminal back."""

    def _report(self, event: Event) -> None:
        raise NotImplementedError

    def _is_due(self, pause_s: float) -> bool:
        """Return True if there is work, and nothing was told for `pause_s`."""
        return self._tally.working and self._clock() - self._told_at >= pause_s

    @contextmanager
    def _losing_output(self) -> Iterator[None]:
        try:
            yield
        except (OutputLost, OSError, ValueError) as error:
            self._is_lost = True
            with suppress(OutputLost, OSError, ValueError):
                say(f"earmill: {error}; the run goes on without it", sys.stderr)


class PlainLines(Reporter):
    """Events and totals as lines on the stream `news`."""

    def __init__(
        self, news: IO[str], result: IO[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(result, clock)
        self._news, self._done_s = news, 0.0

    def _report(self, event: Event) -> None:
        line = news(event)
        if isinstance(event, events.JobFinished):
            say(event.message, self._result)
            line = None if self.quiet else cost(event)
        elif line is None:
            moves = self._tally.done_s > self._done_s
            if self._is_due(LINE_EVERY_S if moves else SAME_LINE_EVERY_S):
                self._done_s, line = self._tally.done_s, totals(self._tally)
        if line is not None:
            self._told_at = self._clock()
            say(line, self._news)


class JsonLines(Reporter):
    """One JSON object a line for every event; totals replace `in_flight`."""

    def _report(self, event: Event) -> None:
        is_totals = isinstance(event, events.InFlight)
        say_json(self._tally.to_dict() if is_totals else event.to_dict(), self._result)


class LogLines(Reporter):
    """One log line for every event, and totals every few seconds."""

    _job: Mapping[str, Any] = MappingProxyType({})  # Fields about the job in every later line.

    def _report(self, event: Event) -> None:
        fields, level, text = event.to_dict(), level_of(event), text_of(event)
        if isinstance(event, events.InFlight):
            if not self._is_due(PROGRESS_EVERY_S):
                return
            self._told_at = self._clock()
            fields, level, text = self._tally.to_dict(), INFO, totals(self._tally)
        elif isinstance(event, events.JobStarted):
            self._job = {"job": fields.pop("job"), "plan_id": fields.pop("plan_id")}
        kind = fields.pop("event")
        fields = {_CALLED.get(name, name): value for name, value in fields.items()}
        fields.pop("message", None)
        print(log_line(kind, level, text, **self._job, **fields), file=self._result, flush=True)


class Bar(Reporter):
    """A live bar at the bottom of a terminal or of a notebook's output, with events above it. The
    result goes to the console if `result` is None."""

    def __init__(
        self,
        console: Console,
        result: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__(result, clock)
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

    def _report(self, event: Event) -> None:
        line = news(event)
        if isinstance(event, events.JobFinished):
            self._bar.stop()
            if self._result is not None:
                say(event.message, self._result)
                line = None
        if line is not None:
            style = None if level_of(event) == INFO else "yellow"
            self._bar.console.print(visible(line), style=style, soft_wrap=True)
        if (more := cost(event)) is not None:
            self._bar.console.print(more, soft_wrap=True)
        if isinstance(event, events.JobStarted):
            self._task = self._bar.add_task("", total=event.seconds_total)
            self._bar.start()
        if self._task is not None:
            words = "starting workers"
            if self._tally.working:
                width = self._bar.console.width - self._bar_width - BAR_MARGIN
                words = short_totals(self._tally, width)
            self._bar.update(self._task, completed=self._tally.done_s, description=words)

    def refresh(self) -> None:
        """Draw now instead of a tenth of a second later."""
        self._bar.refresh()

    def close(self) -> None:
        with self._losing_output():
            self._bar.stop()


def make_reporter(
    *,
    as_json: bool = False,
    log_format: str = "text",
    quiet: bool = False,
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
) -> Reporter:
    output, errors = output or sys.stdout, errors or sys.stderr
    reporter: Reporter = PlainLines(errors, output)
    if as_json:
        reporter = JsonLines(output)
    elif log_format == "json":
        tell_errors_as_log_lines()
        reporter = LogLines(output)
    elif not quiet and errors.isatty():
        reporter = Bar(console(file=errors), output)
    reporter.quiet = quiet
    return reporter


def notebook_reporter() -> Reporter | None:
    """Return the reporter of a run in a notebook; None if this process is no notebook kernel. It is
    a bar if ipywidgets are installed (the extra `notebook`), because rich needs them."""
    shown = console()
    if not shown.is_jupyter:
        return None
    return Bar(shown) if find_spec("ipywidgets") else PlainLines(sys.stdout, sys.stdout)


@contextmanager
def reported_run(
    *, as_json: bool = False, log_format: str, quiet: bool
) -> Iterator[tuple[Sink, StopRequest]]:
    """Yield a sink that reports events, and a stop request that signals set."""
    stop = StopRequest()
    reporter = make_reporter(as_json=as_json, log_format=log_format, quiet=quiet)
    with closing(reporter), _signals_to(stop):
        yield logged(reporter), stop


@contextmanager
def _signals_to(stop: StopRequest) -> Iterator[None]:
    """Pass signals to `stop`. While the run does not poll `stop`, a signal ends the command."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.watched:
            process.end(number, frame)
        stop(signal.Signals(number).name)

    # Slurm sends SIGUSR1 before a time limit, if the batch script asks for it.
    numbers = (*process.ENDING, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # `nohup` asks for that
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


LOGGER = logging.getLogger("earmill")
# Without a handler of its own a warning would be printed.
LOGGER.addHandler(logging.NullHandler())


def logged(sink: Sink) -> Sink:
    """Return a sink that logs an event with a text, as `event` of the record, and passes it on."""

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
