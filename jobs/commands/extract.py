"""`earmill extract`: run a job to its end, or as far as it gets.

SIGINT and SIGTERM ask the run to finish what is in flight; a second one leaves at once. Either way
nothing is lost but work in flight, and `--resume` goes on from the commits.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.commands.options import AsJson, JobFile, Overrides, RayAddress

if TYPE_CHECKING:
    from pipeline.events import JobFinished
    from pipeline.spec import JobSpec
    from pipeline.stop import StopRequest


def extract(
    job: JobFile,
    set_: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an output that holds commits of this job.")
    ] = False,
    as_json: AsJson = False,
    ray_address: RayAddress = None,
) -> None:
    """Extract the features of a corpus.

    Exit codes: 0 done, 1 failed or stopped, 2 bad usage or spec, 3 too many rows quarantined.
    """
    from pipeline.spec import JobSpec

    # A wrong spec is told at once, before Ray and the rest are imported.
    spec = JobSpec.load(job, overrides=set_ or ())
    end = run_and_report(spec, resume=resume, as_json=as_json, ray_address=ray_address)
    raise typer.Exit(end.exit_code)


def run_and_report(
    spec: JobSpec, *, resume: bool = False, as_json: bool = False, ray_address: str | None = None
) -> JobFinished:
    """Run a job with its progress on standard output, stopped by SIGINT and SIGTERM."""
    from jobs.progress import make_reporter
    from pipeline.run import run_job
    from pipeline.stop import StopRequest

    stop = StopRequest()
    reporter = make_reporter(as_json=as_json, stream=sys.stdout)
    try:
        with signals_to(stop):
            return run_job(spec, resume=resume, sink=reporter, ray_address=ray_address, stop=stop)
    finally:
        reporter.close()


@contextmanager
def signals_to(stop: StopRequest) -> Iterator[None]:
    """Send SIGINT and SIGTERM to `stop`; where nobody polls it, they end the command at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.watched:
            raise KeyboardInterrupt
        stop(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
