"""One job from spec to finished dataset: check, lock, plan, schedule, finalise.

Everything a user can get wrong is raised before Ray starts. The plan is made once and stored;
resume is the stored plan minus the commits. The output is the only state: whatever kills this
process, running it again with `resume` goes on where the commits end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from earmill.pipeline.common.errors import CommitError, OutputError, RunStopped, StorageError
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.lease import DriverLock
from earmill.pipeline.dataset.recompute import Chooser
from earmill.pipeline.dataset.snapshot import is_closed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.executor import executor_of
from earmill.pipeline.driver.open_job import OpenJob, open_job, stored_dataset
from earmill.pipeline.driver.placement import has_seats
from earmill.pipeline.driver.shard_tracker import Result
from earmill.pipeline.driver.source_changes import source_changed
from earmill.pipeline.driver.staffing import RunnerFactory, committed_of, scheduler_of
from earmill.pipeline.driver.stop_request import StopRequest
from earmill.pipeline.driver.summary import RESUME, summarise
from earmill.pipeline.formats.registry import check_formats
from earmill.pipeline.planning.plan import Plan, make_plan, skipped_text
from earmill.pipeline.planning.speeds import keep_job
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.store_calls import patient
from earmill.pipeline.worker.kernels import compiling


def run_job(
    spec: JobSpec,
    *,
    resume: bool = False,
    again: Chooser | None = None,
    sink: events.Sink = events.ignore,
    ray_address: str | None = None,
    stop: StopRequest | None = None,
    make_runner: RunnerFactory = lambda job: job,
) -> events.JobFinished:
    """Run a job to its end, or as far as it gets; the last event, which the sink has seen too.

    Args:
        resume: Go on with an output that holds commits of this job.
        again: Chooses committed shards to process once more; see `dataset.recompute`.
        ray_address: Cluster to join; None takes RAY_ADDRESS, else a private Ray is started.
        stop: Ask it to stop from a signal handler or another thread.
        make_runner: What workers run; a caller may extend the row pipeline.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work, one clear line.
        SourceOutage, RunStopped: Source or output are away; the same command may work later.
    """
    with _resumable(), patient():
        return _run_job(spec, resume, again, sink, ray_address, stop or StopRequest(), make_runner)


@contextmanager
def _resumable() -> Iterator[None]:
    """An output that fails ends the run, and nothing else: its line says how to go on."""
    try:
        yield
    except StorageError as error:
        raise RunStopped(f"{error}; {RESUME}") from error
    except OutputError as error:
        # A store that answers "not now" is there: no mistake in the job.
        if isinstance(error.__cause__, StorageError) and error.__cause__.is_not_now:
            raise RunStopped(f"{error}; {RESUME}") from error
        raise


def _run_job(
    spec: JobSpec,
    resume: bool,
    again: Chooser | None,
    sink: events.Sink,
    ray_address: str | None,
    stop: StopRequest,
    make_runner: RunnerFactory,
) -> events.JobFinished:
    began_s = time.monotonic()
    # The cheap checks come first: the models take seconds to import.
    sink(events.Step("checking source, output and models"))
    executor = executor_of(spec.run, ray_address)
    executor.check(spec.run)
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    check_formats(spec.output.formats)
    source = open_source(spec.source)
    stored = stored_dataset(spec, layout)
    extractors = validate_models(spec)
    if stored is None:
        sink(events.Step("listing the source"))
    plan = (
        make_plan(source, spec, lambda rows: sink(events.Step(f"listing: {rows:,} rows so far")))
        if stored is None
        else Plan.read(layout, stored.plan_id)
    )
    for note in plan.notes if stored is None else ():
        sink(events.Note(note))
    layout.check_writable()
    with DriverLock(layout) as lock:
        if again is not None:
            sink(events.Step("looking for shards to process again"))
        job = open_job(spec, layout, plan, extractors, source, resume=resume, again=again)
        if job.before and (changed := source_changed(source, plan)) is not None:
            sink(changed)
        sink(job.started())
        result = Result()
        # The output is finished before Ray stops: whatever keeps Ray does not keep the dataset.
        with ExitStack() as stack:
            if job.pending:
                sink(events.Step("starting the workers"))
                if executor.is_private and spec.run.device != "cuda":
                    stack.enter_context(compiling(extractors))
                session = stack.enter_context(
                    executor.session(spec.run, lambda text: sink(events.Step(text)))
                )
                result = scheduler_of(job, session, sink, stop, lock, make_runner).run()
                if session.is_here and not has_seats(session.nodes(), spec.run):
                    start_s = time.monotonic() - began_s - result.worked_s
                    keep_job(spec, result.seconds, result.cpu_s, start_s)
            return _finish(job, result, sink)


def _finish(job: OpenJob, result: Result, sink: events.Sink) -> events.JobFinished:
    """Finalise what is complete, and sum up."""
    complete = len(job.before) + len(result.done) == len(job.plan.shards)
    if complete and (result.done or not is_closed(job.layout, job.before)):
        sink(events.Step("writing the index"))
        finalise(job.layout)
    elif job.again and result.done:
        # What was done again counts, also where the rest of it keeps the commits of before.
        with suppress(CommitError):
            finalise(job.layout)
    before = [committed_of(record) for record in job.before.values()]
    end = summarise(
        result,
        before=before,
        shards=len(job.plan.shards),
        layout=job.layout,
        max_bad_fraction=job.spec.run.max_bad_fraction,
        skipped=skipped_text(job.plan.skipped),
    )
    sink(end)
    return end
