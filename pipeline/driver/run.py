"""One job from spec to finished dataset: check, lock, plan, schedule, finalise.

Everything a user can get wrong is raised before Ray starts. The plan is made once and stored;
resume is the stored plan minus the commits. The output is the only state: whatever kills this
process, running it again with `resume` goes on where the commits end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import CommitError, OutputError, RunStopped, StorageError
from earmill.pipeline.common.retries import patient
from earmill.pipeline.dataset.carry import copy_equal
from earmill.pipeline.dataset.commit_record import commits_as
from earmill.pipeline.dataset.crew import CrewMember
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.lease import UNFENCED, Heartbeat, overtaken
from earmill.pipeline.dataset.recompute import Chooser
from earmill.pipeline.dataset.snapshot import read_current
from earmill.pipeline.driver import events
from earmill.pipeline.driver.executors import executor_of
from earmill.pipeline.driver.executors.base import Executor
from earmill.pipeline.driver.open_job import OpenJob, committed_of, open_job, stored_dataset
from earmill.pipeline.driver.placement import has_seats
from earmill.pipeline.driver.shard_tracker import Committed, Result
from earmill.pipeline.driver.sharing import Sharing, Supply, claims_of, close, opening, sharing_of
from earmill.pipeline.driver.source_changes import source_changed
from earmill.pipeline.driver.staffing import RunnerFactory, scheduler_of
from earmill.pipeline.driver.stop_request import StopRequest
from earmill.pipeline.driver.summary import RESUME, summarise
from earmill.pipeline.driver.telemetry.observers import observed
from earmill.pipeline.formats.registry import check_formats
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan, skipped_text
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.planning.speeds import keep_job
from earmill.pipeline.sources import Source
from earmill.pipeline.sources.listing_cache import KeptListing
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch
from earmill.pipeline.worker.kernels import compiling

if TYPE_CHECKING:
    from amtcore.features.base import Extractor


def run_job(
    spec: JobSpec,
    *,
    resume: bool = False,
    again: Chooser | None = None,
    plan: Plan | None = None,
    sink: events.Sink = events.ignore,
    ray_address: str | None = None,
    stop: StopRequest | None = None,
    join: bool = False,
    finish: bool = False,
    make_runner: RunnerFactory = lambda job: job,
) -> events.JobFinished:
    """Run a job to its end, or as far as it gets; the last event, which the sink has seen too.

    Args:
        resume: Go on with an output that holds commits of this job.
        again: Chooses committed shards to process once more; see `dataset.recompute`.
        plan: Taken for a new output instead of listing the source.
        ray_address: Cluster to join; None takes RAY_ADDRESS, else a private Ray is started.
        stop: Ask it to stop from a signal handler or another thread.
        join: Work beside other drivers on this output, and go on with what they leave.
        finish: Compute nothing; write the index if every shard is committed.
        make_runner: What workers run; a caller may extend the row pipeline.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work, one clear line.
        SourceOutage, RunStopped: Source or output are away; the same command may work later.
        OvertakenError: Another command took the output over while this one gave no sign of life.
    """
    with _resumable(), patient(spec.run.retry_s), observed(spec.run, sink) as (seen, observe):
        request = _Request(
            spec,
            resume,
            again,
            plan,
            seen,
            observe,
            ray_address,
            stop or StopRequest(),
            make_runner,
        )
        return _run_job(request, sharing_of(spec.run, join=join, finish=finish))


@dataclass(frozen=True)
class _Request:
    """What `run_job` was called with."""

    spec: JobSpec
    resume: bool
    again: Chooser | None
    plan: Plan | None
    sink: events.Sink
    observe: events.Sink
    ray_address: str | None
    stop: StopRequest
    make_runner: RunnerFactory

    def tell(self, text: str) -> None:
        """Say what begins."""
        self.sink(events.Step(text))


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


def _run_job(request: _Request, sharing: Sharing) -> events.JobFinished:
    began_s = time.monotonic()
    checked = _check(request, sharing)
    with ExitStack() as stack:
        job, lease = _open(stack, request, sharing, checked)
        stack.enter_context(job.fence.says_why(job.layout))
        told = job.before and not sharing.joins
        if told and (changed := source_changed(checked.source, job.plan)) is not None:
            request.sink(changed)
        request.sink(job.started())
        result = Result()
        # The output is finished before Ray stops: whatever keeps Ray does not keep the dataset.
        if job.pending and sharing.works:
            result = _work(stack, request, sharing, checked, job, lease, began_s)
        return _finish(job, result, sharing, request.sink)


@dataclass(frozen=True)
class _Checked:
    """A job in which no mistake was found.

    Args:
        stored: Its description, where the output has it already.
        plan: None where that of the output is to be taken or made, once it is open.
    """

    executor: Executor
    layout: Layout
    source: Source
    stored: DatasetFile | None
    extractors: Sequence[Extractor]
    plan: Plan | None


def _check(request: _Request, sharing: Sharing) -> _Checked:
    """All that a user can get wrong; nothing is written."""
    spec, sink = request.spec, request.sink
    # The cheap checks come first: the models take seconds to import.
    sink(events.Step("checking source, output and models"))
    executor = executor_of(spec.run, request.ray_address)
    executor.check(spec.run)
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    check_formats(spec.output.formats)
    source = planned_source(spec)
    stored = stored_dataset(spec, layout)
    extractors = validate_models(spec)
    check_stream_names(stream for extractor in extractors for stream in extractor.streams)
    # A driver alone makes its plan before it takes the lock: a mistake in it leaves no trace.
    plan = request.plan if stored is None else None
    if plan is None and not sharing.joins:
        plan = _plan(spec, layout, source, stored, sink)
    layout.check_writable()
    return _Checked(executor, layout, source, stored, extractors, plan)


def _open(
    stack: ExitStack, request: _Request, sharing: Sharing, checked: _Checked
) -> tuple[OpenJob, Heartbeat | None]:
    """Take the lock and open the job; beside others the lock is held while the job is opened.

    A driver that joins becomes a member of the crew before it reads the plan and the commits. From
    then on its fence finds out when another command takes the output.
    """
    spec, layout = request.spec, checked.layout
    member = None
    if sharing.joins and sharing.works:
        member = stack.enter_context(CrewMember(layout))
    with ExitStack() as until_open:
        held = until_open if sharing.joins else stack
        lock = held.enter_context(opening(layout, sharing, shares=request.again is None))
        if request.again is not None:
            request.tell("looking for shards to process again")
        opens = UNFENCED if lock is None else lock.fence
        lease = member if sharing.joins else lock
        fence = UNFENCED if lease is None else lease.fence
        until_open.enter_context(opens.says_why(layout))
        until_open.enter_context(fence.says_why(layout))
        stored = stored_dataset(spec, layout)
        if stored is None and (lock is None or checked.stored is not None):
            raise overtaken(layout)
        plan = _opened_plan(request, checked, stored)
        job = open_job(
            spec,
            layout,
            plan,
            checked.extractors,
            checked.source,
            resume=request.resume,
            again=request.again,
            beside=lock is None,
            stored=stored,
            fences=(opens, fence),
            on_step=request.tell,
        )
        if checked.stored is None and lock is not None:
            opens.check(layout)
            KeptListing(layout).forget()
    return job, lease


def _opened_plan(request: _Request, checked: _Checked, stored: DatasetFile | None) -> Plan:
    """The plan of an output whose description was read with the right to write there.

    Another command may have begun or changed the dataset since the job was checked.
    """
    known = checked.plan
    if known is not None and (stored is None or stored == checked.stored):
        return known
    return _plan(request.spec, checked.layout, checked.source, stored, request.sink)


def _work(
    stack: ExitStack,
    request: _Request,
    sharing: Sharing,
    checked: _Checked,
    job: OpenJob,
    lease: Heartbeat | None,
    began_s: float,
) -> Result:
    """Have workers do what is pending; they go with the stack."""
    spec, executor = request.spec, checked.executor
    request.tell("starting the workers")
    supply = _supply(stack, job, sharing, lease, shares=request.again is None)
    if executor.is_private and spec.run.device != "cuda":
        stack.enter_context(compiling(checked.extractors))
    stack.callback(_clear, job)
    session = stack.enter_context(executor.session(spec.run, request.tell))
    scheduler = scheduler_of(
        job,
        session,
        request.sink,
        request.observe,
        request.stop,
        lease,
        request.make_runner,
        supply,
    )
    result = scheduler.run()
    if session.is_here and not has_seats(session.nodes(), spec.run):
        start_s = time.monotonic() - began_s - result.worked_s
        # Once the index is written: nothing there waits for the models' sources to be hashed.
        stack.callback(keep_job, spec, result.seconds, result.cpu_s, start_s)
    return result


def _clear(job: OpenJob) -> None:
    """Remove what the workers of this run left; what cannot be removed now is by the next run."""
    with suppress(OSError):
        clear_scratch(job.layout, job.scratch)


def _plan(
    spec: JobSpec, layout: Layout, source: Source, stored: DatasetFile | None, sink: events.Sink
) -> Plan:
    """The plan that is stored, or a new one."""
    if stored is not None:
        return Plan.read(layout, stored.plan_id)
    sink(events.Step("listing the source"))

    def progress(rows: int) -> None:
        sink(events.Step(f"listing the source: {rows:,} rows so far"))

    plan = make_plan(source, spec, progress, KeptListing(layout))
    for note in plan.notes:
        sink(events.Note(note))
    return plan


def _supply(
    stack: ExitStack, job: OpenJob, sharing: Sharing, lease: Heartbeat | None, *, shares: bool
) -> Callable[[int], Supply | None]:
    """What begins to claim shards; nothing is shared of a run that may do shards again."""
    if not shares:
        return lambda ahead: None
    member = lease if isinstance(lease, CrewMember) else stack.enter_context(CrewMember(job.layout))
    claims = claims_of(
        job.layout,
        job.plan.plan_id,
        [shard.shard_id for shard in job.plan.computed],
        set(job.before),
        run_id=member.holder.run_id,
        sharing=sharing,
        fence=job.fence,
    )
    shards = {shard.shard_id: shard for shard in job.pending}

    def begin(ahead: int) -> Supply:
        return stack.enter_context(Supply(claims, shards, ahead=ahead, stays=sharing.stays))

    return begin


def _finish(
    job: OpenJob, result: Result, sharing: Sharing, sink: events.Sink
) -> events.JobFinished:
    """Finalise what is complete, and sum up."""
    job.fence.check(job.layout)
    before = job.before | _by_others(job, result)
    missing = len(job.plan.shards) - len(before) - len(result.done)
    left = [shard for shard in job.copies if shard.shard_id not in before]
    if left and missing == len(left):
        copy_equal(job.layout, job.dataset, left, lambda text: sink(events.Step(text)), job.fence)
        found = commits_as(job.layout, committed_of, without=before.keys() | result.done.keys())
        result.done |= {shard.shard_id: found[shard.shard_id] for shard in left}
        missing = 0
    counted = _snapshot_path(job.layout)
    if not missing:
        sink(events.Step("writing the index"))
        close(
            job.layout,
            sharing,
            before | result.done,
            anew=bool(result.done) or before != job.before,
            licenses=job.spec.licenses.to_dict(),
            dataset=job.dataset,
            fence=job.fence,
        )
    elif job.again and result.done:
        # What was done again counts, also where the rest of it keeps the commits of before.
        with suppress(CommitError):
            finalise(job.layout, fence=job.fence)
    if sharing.joins and sharing.works and not sharing.stays:
        result.left_to_others = missing - len(result.failed)
    end = summarise(
        result,
        before=list(before.values()),
        shards=len(job.plan.shards),
        layout=job.layout,
        max_bad_fraction=job.spec.run.max_bad_fraction,
        skipped=skipped_text(job.plan.skipped),
        closed=counted is not None and _snapshot_path(job.layout) != counted,
    )
    sink(end)
    return end


def _snapshot_path(layout: Layout) -> str | None:
    """Return the path of the snapshot that counts, empty where there is none, or None where
    `current.json` is damaged."""
    with suppress(CommitError):
        current = read_current(layout)
        return "" if current is None else current.snapshot.path
    return None


def _by_others(job: OpenJob, result: Result) -> dict[str, Committed]:
    """What other drivers have committed since this one looked."""
    known = job.before.keys() | result.done.keys()
    if job.again or len(known) == len(job.plan.shards):
        return {}
    planned = {shard.shard_id for shard in job.plan.shards}
    found = commits_as(job.layout, committed_of, without=known)
    return {shard: record for shard, record in found.items() if shard in planned}
