"""One job from spec to finished dataset: check, lock, plan, schedule, finalise.

Mistakes of the user are found before the workers start. The plan is made once and stored; resume is
the stored plan minus the commits. The output is the only state: after any end of this process a run
with `resume` goes on where the commits end.

The exit code is 0 if every row of the plan is committed or quarantined. It is 3 if more rows are in
quarantine than the job allows, and 1 if shards are missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import CommitError, OutputError, RunStopped, StorageError
from earmill.pipeline.common.retries import patient
from earmill.pipeline.common.text import duration, figure
from earmill.pipeline.dataset.commit_record import commits_as
from earmill.pipeline.dataset.crew import BlockClaims, DriverMembership, start_of
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.driver_lock import UNFENCED, Heartbeat, overtaken
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.recompute import Chooser
from earmill.pipeline.dataset.revision import copy_equal
from earmill.pipeline.dataset.row_index import STATUS_BAD
from earmill.pipeline.dataset.snapshot import current_index, read_current
from earmill.pipeline.driver import events
from earmill.pipeline.driver.events import RESUME, JobFinished, StopRequest
from earmill.pipeline.driver.executors import Executor, executor_of
from earmill.pipeline.driver.placement import gpu_seats
from earmill.pipeline.driver.shard_ledger import Committed, Result
from earmill.pipeline.driver.sharing import (
    ShardClaims,
    SharingPolicy,
    close,
    opening,
    sharing_of,
)
from earmill.pipeline.driver.telemetry import observed
from earmill.pipeline.formats.registry import check_formats
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.operations.job_scheduler import RunnerFactory, scheduler_of
from earmill.pipeline.operations.open_job import (
    OpenJob,
    committed_of,
    open_job,
    source_changed,
    stored_dataset,
)
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan, skipped_text
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.planning.speeds import keep_job
from earmill.pipeline.sources import Source
from earmill.pipeline.sources.listing_cache import ListingCache
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch
from earmill.pipeline.worker.models import compiling

if TYPE_CHECKING:
    from amtcore.features.base import Extractor

EXIT_DONE, EXIT_FAILED, EXIT_TOO_MANY_BAD = 0, 1, 3


def summarise(
    result: Result,
    *,
    before: Sequence[Committed],
    shards: int,
    layout: Layout,
    max_bad_fraction: float,
    skipped: str = "",
    closed: bool = False,
) -> JobFinished:
    """Return the last event of a run.

    Args:
        result: The commits and failures of this run.
        before: Commits of earlier runs.
        shards: Number of shards of the plan.
        layout: The output; its index holds the reasons of quarantined rows.
        max_bad_fraction: Quarantined rows allowed, as a fraction of all rows.
        skipped: What the listing left out, in words.
        closed: The run made the current snapshot, perhaps of copied rows alone.
    """
    records = [*before, *result.done.values()]
    ok, bad = sum(r.rows_ok for r in records), sum(r.rows_bad for r in records)
    complete = len(records) == shards
    is_left = not complete and bool(result.left_to_others) and not _went_wrong(result)
    too_many = complete and bad > max_bad_fraction * (ok + bad)
    by_class = _bad_by_class(layout) if complete and bad else {}
    if complete:
        status = "done" if result.done or closed else "nothing_to_do"
        message = _complete_message(result, layout, ok, bad, by_class, closed)
        message += f"; {skipped}" if skipped else ""
        if too_many:
            message += (
                f"; {bad / (ok + bad):.1%} of the rows are in quarantine, more than "
                f"run.max_bad_fraction {max_bad_fraction:.1%} allows: see `earmill inspect` with "
                "--quarantine for why"
            )
    else:
        status = "failed" if result.fatal or result.failed else "stopped"
        status = "left" if is_left else status
        message = _incomplete_message(result, len(records), shards)
    if complete:
        exit_code = EXIT_TOO_MANY_BAD if too_many else EXIT_DONE
    else:
        exit_code = EXIT_DONE if is_left else EXIT_FAILED
    return JobFinished(
        status=status,
        exit_code=exit_code,
        message=message,
        output=layout.url(),
        shards=len(records),
        shards_failed=len(result.failed),
        rows_ok=ok,
        rows_bad=bad,
        seconds=round(result.seconds, 3),
        wall_s=round(result.worked_s, 3),
        times_real_time=round(result.seconds / result.worked_s, 2) if result.worked_s else 0.0,
        bad_by_class=by_class,
        cpu_s=dict(result.cpu_s),
    )


def _went_wrong(result: Result) -> bool:
    return bool(result.fatal or result.failed or result.stopped)


def _complete_message(
    result: Result, layout: Layout, ok: int, bad: int, by_class: dict[str, int], closed: bool
) -> str:
    reasons = ", ".join(f"{name} {count}" for name, count in by_class.items())
    rows = f"{ok:,} rows ok, {bad:,} quarantined" + (f" ({reasons})" if reasons else "")
    if not result.done and closed:
        return f"done: {rows}, no audio had to be computed -> {layout.url()}"
    if not result.done:
        return f"nothing to do, all shards are committed: {rows} -> {layout.url()}"
    # Speed is audio that went through the models; a run with bad rows alone has none.
    speed = result.seconds / result.worked_s if result.worked_s else 0.0
    took = f" in {duration(result.worked_s)} ({figure(speed)} x real time)" if speed else ""
    return f"done: {rows}, {result.seconds:,.0f} s audio{took} -> {layout.url()}"


def _incomplete_message(result: Result, committed: int, shards: int) -> str:
    if result.fatal:
        why = f"failed: {result.fatal}"
    elif result.failed:
        shard_id, reason = next(iter(result.failed.items()))
        more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
        why = f"failed: shard {shard_id}: {reason}{more}"
    elif result.left_to_others and not result.stopped:
        return (
            f"nothing left to do here: {committed:,} of {shards:,} shards are committed, other "
            "drivers have the rest; the last one writes the index, or `earmill extract` with "
            "--finish"
        )
    else:
        why = "stopped"
    return f"{why}; {committed:,} of {shards:,} shards are committed: {RESUME}"


def _bad_by_class(layout: Layout) -> dict[str, int]:
    """Return quarantined rows by reason, most frequent first, from the current index."""
    name = current_index(layout)
    if name is None:
        return {}
    table = read_table(layout, name, ["status", "error_class"])
    rows = zip(table["status"].to_pylist(), table["error_class"].to_pylist(), strict=True)
    return dict(Counter(reason for status, reason in rows if status == STATUS_BAD).most_common())


def run_job(
    spec: JobSpec,
    *,
    resume: bool = False,
    again: Chooser | None = None,
    plan: Plan | None = None,
    sink: events.Sink = events.ignore,
    stop: StopRequest | None = None,
    join: bool = False,
    finish: bool = False,
    make_runner: RunnerFactory = lambda job: job,
) -> events.JobFinished:
    """Run a job to its end, or as far as it gets, and return the last event.

    Args:
        spec: The job.
        resume: Go on with an output that holds commits of this job.
        again: Chooses committed shards to process once more; see `dataset.recompute`.
        plan: The plan of a new output; None lists the source.
        sink: Takes all events, the last one included.
        stop: Asked to stop by a signal handler or another thread.
        join: Work beside other drivers on this output, and take over shards that they leave.
        finish: Compute nothing; write the index if every shard is committed.
        make_runner: Builds the workers' runners; a caller may extend the row pipeline.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work.
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
            stop or StopRequest(),
            make_runner,
        )
        return _run_job(request, sharing_of(spec.run, join=join, finish=finish))


@dataclass(frozen=True)
class _Request:
    """Arguments of `run_job`."""

    spec: JobSpec
    resume: bool
    again: Chooser | None
    plan: Plan | None
    sink: events.Sink
    observe: events.Sink
    stop: StopRequest
    make_runner: RunnerFactory

    def tell(self, text: str) -> None:
        """Emit that a step begins."""
        self.sink(events.Step(text))


@contextmanager
def _resumable() -> Iterator[None]:
    """Turn a failure of the output into the end of the run, with a line on how to go on."""
    try:
        yield
    except StorageError as error:
        raise RunStopped(f"{error}; {RESUME}") from error
    except OutputError as error:
        # The store answered "not now", so the job holds no mistake.
        if isinstance(error.__cause__, StorageError) and error.__cause__.is_not_now:
            raise RunStopped(f"{error}; {RESUME}") from error
        raise


def _run_job(request: _Request, sharing: SharingPolicy) -> events.JobFinished:
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
        # The dataset is finished before the workers stop, so a slow stop does not delay it.
        if job.pending and sharing.works:
            result = _work(stack, request, sharing, checked, job, lease, began_s)
        return _finish(job, result, sharing, request.sink)


@dataclass(frozen=True)
class _Checked:
    """A job in which no mistake was found.

    Args:
        executor: Runs its workers.
        layout: The output.
        source: The source.
        stored: The output's description; None if it has none yet.
        extractors: The models.
        plan: The plan; None if it is read or made once the output is open.
    """

    executor: Executor
    layout: Layout
    source: Source
    stored: DatasetFile | None
    extractors: Sequence[Extractor]
    plan: Plan | None


def _check(request: _Request, sharing: SharingPolicy) -> _Checked:
    """Check everything that a user can get wrong; nothing is written."""
    spec, sink = request.spec, request.sink
    # The cheap checks come first: the models take seconds to import.
    sink(events.Step("checking source, output and models"))
    executor = executor_of(spec.run)
    executor.check(spec.run)
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    check_formats(spec.output.formats)
    source = planned_source(spec)
    stored = stored_dataset(spec, layout)
    extractors = validate_models(spec)
    check_stream_names(stream for extractor in extractors for stream in extractor.streams)
    # A driver alone makes its plan before it takes the lock, so a mistake leaves the output empty.
    plan = request.plan if stored is None else None
    if plan is None and not sharing.joins:
        plan = _plan(spec, layout, source, stored, sink)
    layout.check_writable()
    return _Checked(executor, layout, source, stored, extractors, plan)


def _open(
    stack: ExitStack, request: _Request, sharing: SharingPolicy, checked: _Checked
) -> tuple[OpenJob, Heartbeat | None]:
    """Take the lock and open the job; a driver that joins holds the lock only meanwhile.

    A driver that joins registers as a member before it reads the plan and the commits. From then on
    its fence notices if another command takes the output over.
    """
    spec, layout = request.spec, checked.layout
    member = None
    if sharing.joins and sharing.works:
        member = stack.enter_context(DriverMembership(layout))
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
            ListingCache(layout).forget()
    return job, lease


def _opened_plan(request: _Request, checked: _Checked, stored: DatasetFile | None) -> Plan:
    """Return the plan of an output that was opened.

    Another command may have begun or changed the dataset since the job was checked, so a plan of
    that time counts only if the description is the same.
    """
    known = checked.plan
    if known is not None and (stored is None or stored == checked.stored):
        return known
    return _plan(request.spec, checked.layout, checked.source, stored, request.sink)


def _work(
    stack: ExitStack,
    request: _Request,
    sharing: SharingPolicy,
    checked: _Checked,
    job: OpenJob,
    lease: Heartbeat | None,
    began_s: float,
) -> Result:
    """Process the pending shards with workers; the stack stops the workers."""
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
    if session.is_here and not gpu_seats(session.nodes(), spec.run):
        start_s = time.monotonic() - began_s - result.worked_s
        # After the index is written, which need not wait for a hash of the models' sources.
        stack.callback(keep_job, spec, result.seconds, result.cpu_s, start_s)
    return result


def _clear(job: OpenJob) -> None:
    """Remove temporary files of this run's workers; the next run removes the rest."""
    with suppress(OSError):
        clear_scratch(job.layout, job.scratch)


def _plan(
    spec: JobSpec, layout: Layout, source: Source, stored: DatasetFile | None, sink: events.Sink
) -> Plan:
    """Return the stored plan, or make one."""
    if stored is not None:
        return Plan.read(layout, stored.plan_id)
    sink(events.Step("listing the source"))

    def progress(rows: int) -> None:
        sink(events.Step(f"listing the source: {rows:,} rows so far"))

    plan = make_plan(source, spec, progress, ListingCache(layout))
    for note in plan.notes:
        sink(events.Note(note))
    return plan


def _supply(
    stack: ExitStack, job: OpenJob, sharing: SharingPolicy, lease: Heartbeat | None, *, shares: bool
) -> Callable[[int], ShardClaims | None]:
    """Return a function that begins to claim shards.

    A run that replaces commits shares no shards: its function returns None.
    """
    if not shares:
        return lambda ahead: None
    member = (
        lease
        if isinstance(lease, DriverMembership)
        else stack.enter_context(DriverMembership(job.layout))
    )
    run_id = member.holder.run_id
    claims = BlockClaims(
        job.layout,
        job.plan.plan_id,
        [shard.shard_id for shard in job.plan.computed],
        set(job.before),
        run_id=run_id,
        start=start_of(run_id) if sharing.start is None else sharing.start,
        fence=job.fence,
    )
    shards = {shard.shard_id: shard for shard in job.pending}

    def begin(ahead: int) -> ShardClaims:
        return stack.enter_context(ShardClaims(claims, shards, ahead=ahead, stays=sharing.stays))

    return begin


def _finish(
    job: OpenJob, result: Result, sharing: SharingPolicy, sink: events.Sink
) -> events.JobFinished:
    """Close a complete dataset, and return the last event."""
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
        # Replaced commits count at once; the other shards keep their earlier commits.
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
    """Return the commits of other drivers since this driver read the commits."""
    known = job.before.keys() | result.done.keys()
    if job.again or len(known) == len(job.plan.shards):
        return {}
    planned = {shard.shard_id for shard in job.plan.shards}
    found = commits_as(job.layout, committed_of, without=known)
    return {shard: record for shard, record in found.items() if shard in planned}
