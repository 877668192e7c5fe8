"""Report the progress of a run, and stop it on a signal.

SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the run to finish the shards in flight; a second signal ends
the process at once. Only work in flight is lost, and `--resume` continues from the commits.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from earmill.jobs.console import process

if TYPE_CHECKING:
    from earmill.pipeline.driver.events import Sink, StopRequest


@contextmanager
def reported_run(
    *, log_format: str, as_json: bool = False, quiet: bool = False
) -> Iterator[tuple[Sink, StopRequest]]:
    """Yield a sink that reports events, and a stop request that signals set.

    With `quiet`, the result alone is reported.
    """
    from earmill.jobs.console.progress import logged, make_reporter
    from earmill.pipeline.driver.events import StopRequest

    stop = StopRequest()
    reporter = make_reporter(as_json=as_json, log_format=log_format, quiet=quiet)
    try:
        with _signals_to(stop):
            yield logged(reporter), stop
    finally:
        reporter.close()


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
