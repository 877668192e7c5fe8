"""One job from spec to finished dataset: check, lock, plan, schedule, finalise. The output is the
only state: after any end of the process, a run with `resume` goes on where the commits end. The
exit code is 0 if every row of the plan is committed or quarantined, 3 if more rows are in
quarantine than the job allows, and 1 if shards are missing."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from earmill.pipeline.common.errors import (
    CommitError,
    EarmillError,
    LockedError,
    OutputError,
    RunStopped,
    StorageError,
)
from earmill.pipeline.common.retries import patient
from earmill.pipeline.common.text import duration, figure
from earmill.pipeline.dataset.commit_record import Committed, Recommit, commits_as, read_commit
from earmill.pipeline.dataset.copied_rows import carry_over, copy_equal
from earmill.pipeline.dataset.description import (
    DatasetFile,
    check_dataset,
    check_same,
    open_dataset,
)
from earmill.pipeline.dataset.driver_lock import (
    UNFENCED,
    BlockClaims,
    DriverLock,
    DriverMembership,
    Fence,
    clear_claims,
    overtaken,
)
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.revision import look_again, restate_licenses
from earmill.pipeline.dataset.snapshot import is_closed, outdated_text, read_current, read_snapshot
from earmill.pipeline.driver import events
from earmill.pipeline.driver.events import RESUME, JobFinished, StopRequest
from earmill.pipeline.driver.executors import Session, WorkerRequest, executor_of
from earmill.pipeline.driver.placement import cpu_note, place_workers
from earmill.pipeline.driver.scheduler import Deadlines, Scheduler
from earmill.pipeline.driver.shard_ledger import Result, ShardLedger
from earmill.pipeline.driver.sharing import TURN_S, SharingPolicy, claim_ahead, opening, sharing_of
from earmill.pipeline.driver.telemetry import observed
from earmill.pipeline.driver.worker_pool import DEAD, WorkerPlacements, WorkerPool
from earmill.pipeline.formats.format import check_formats
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.operations.open_job import (
    OpenJob,
    compare,
    describe,
    source_changed,
    stored_dataset,
)
from earmill.pipeline.operations.retry import Chooser, open_again
from earmill.pipeline.planning.make_plan import facts_of_job, make_plan
from earmill.pipeline.planning.plan import Plan, skipped_text
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.sources.base import listing
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import built_models, check_references_used
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch, sweep
from earmill.pipeline.worker.launches import shards_in_flight
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

EXIT_DONE, EXIT_FAILED, EXIT_TOO_MANY_BAD = 0, 1, 3
# Returns, for a worker's job, the function that builds its runner inside the worker's process.
RunnerFactory = Callable[[WorkerJob], Callable[[], ShardRunner]]


def close(
    job: OpenJob, sharing: SharingPolicy, commits: Mapping[str, Committed], *, anew: bool
) -> None:
    """Write index and cards of a complete dataset, unless another driver does. The `commits` are of
    all shards; `anew` if a shard was committed since the index was read."""
    layout, licenses = job.layout, job.spec.licenses.to_dict()
    if not sharing.joins:
        if anew or not is_closed(layout, commits):
            finalise(layout, fence=job.fence)
        restate_licenses(layout, licenses, job.fence)
    while sharing.joins and not is_closed(layout, commits):
        # Commits of another revision will never be closed by waiting.
        job.fence.check(layout)
        check_same(layout, job.dataset)
        try:
            lock = DriverLock(layout, shares=True, alone=False)
        except LockedError:
            if not sharing.stays:
                return
            time.sleep(TURN_S)
            continue
        # Another driver may have closed the dataset in the meantime.
        with lock, suppress(LockedError):
            check_same(layout, job.dataset)
            if not is_closed(layout, commits):
                finalise(layout, fence=lock.fence)
                restate_licenses(layout, licenses, lock.fence)
            break
    job.fence.check(layout)
    # Another driver that closed the dataset may have been killed before it cleared the claims.
    clear_claims(layout)


def summarise(
    job: OpenJob, result: Result, before: Sequence[Committed], *, closed: bool = False
) -> JobFinished:
    """Return the last event of a run. Commits of earlier runs are in `before`. `closed`: the run
    made the current snapshot, perhaps of copies alone."""
    url, shards = job.layout.url(), len(job.plan.shards)
    most_bad = job.spec.run.max_bad_fraction
    records = [*before, *result.done.values()]
    ok, bad = sum(r.rows_ok for r in records), sum(r.rows_bad for r in records)
    # Speed is audio that went through the models; a run with bad rows alone has none.
    speed = result.seconds / result.worked_s if result.worked_s else 0.0
    by_class: dict[str, int] = {}
    if len(records) == shards:
        counted = sum((Counter(record.bad_by_class) for record in records), Counter[str]())
        by_class = dict(counted.most_common())
        reasons = ", ".join(f"{name} {count}" for name, count in by_class.items())
        rows = f"{ok:,} rows ok, {bad:,} quarantined" + (f" ({reasons})" if reasons else "")
        status, exit_code = "done", EXIT_DONE
        if result.done:
            took = f" in {duration(result.worked_s)} ({figure(speed)} x real time)" if speed else ""
            message = f"done: {rows}, {result.seconds:,.0f} s audio{took} -> {url}"
        elif closed:
            message = f"done: {rows}, no audio had to be computed -> {url}"
        else:
            status = "nothing_to_do"
            message = f"nothing to do, all shards are committed: {rows} -> {url}"
        if skipped := skipped_text(job.plan.skipped):
            message += f"; {skipped}"
        if bad > most_bad * (ok + bad):
            exit_code = EXIT_TOO_MANY_BAD
            message += (
                f"; {bad / (ok + bad):.1%} of the rows are in quarantine, more than "
                f"run.max_bad_fraction {most_bad:.1%} allows, so the exit code is "
                f"{EXIT_TOO_MANY_BAD}; all other rows are written; for the reasons run: earmill "
                f"inspect {url} --quarantine"
            )
    else:
        status, exit_code = "failed", EXIT_FAILED
        committed = f"{len(records):,} of {shards:,} shards are committed"
        if result.fatal:
            why = f"failed: {result.fatal}"
        elif result.failed:
            shard_id, reason = next(iter(result.failed.items()))
            more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
            why = f"failed: shard {shard_id}: {reason}{more}"
        else:
            status = why = "stopped"
        message = f"{why}; {committed}: {RESUME}"
        if status == "stopped" and result.left_to_others and not result.stopped:
            status, exit_code = "left", EXIT_DONE
            message = (
                f"nothing left to do here: {committed}, other drivers have the rest; the last one "
                "writes the index, or `earmill extract` with --finish"
            )
    return JobFinished(
        status=status,
        exit_code=exit_code,
        message=message,
        output=url,
        shards=len(records),
        shards_failed=len(result.failed),
        rows_ok=ok,
        rows_bad=bad,
        seconds=round(result.seconds, 3),
        wall_s=round(result.worked_s, 3),
        times_real_time=round(speed, 2),
        bad_by_class=by_class,
        cpu_s=dict(result.cpu_s),
    )


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
        resume: Go on with an output that holds commits of this job.
        again: Chooses committed shards to process once more; see `operations.retry`.
        plan: The plan of a new output; None lists the source.
        join: Work beside other drivers on this output, and take over shards that they leave.
        finish: Compute nothing; write the index if every shard is committed.
        make_runner: Builds the workers' runners; a caller may extend the row pipeline.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work.
        SourceOutage, RunStopped: Source or output are away; the same command may work later.
        OvertakenError: Another command took the output over meanwhile.
    """
    with _resumable(), patient(spec.run.retry_s), observed(spec.run, sink) as (seen, observe):
        sharing = sharing_of(spec.run, join=join, finish=finish)
        run = Run(spec, sharing, resume, again, seen, observe, stop or StopRequest(), make_runner)
        run.check(plan)
        with ExitStack() as stack:
            return run.process(stack)


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


@dataclass
class Run:
    spec: JobSpec
    sharing: SharingPolicy
    resume: bool
    again: Chooser | None
    sink: events.Sink
    observe: events.Sink
    stop: StopRequest
    make_runner: RunnerFactory

    def tell(self, text: str) -> None:
        self.sink(events.Step(text))

    def check(self, plan: Plan | None) -> None:
        """Check everything that a user can get wrong; nothing is written."""
        spec = self.spec
        # The cheap checks come first: the models take seconds to build.
        self.tell("checking source, output and models")
        self.executor = executor_of(spec.run)
        self.executor.check(spec.run)
        self.layout = Layout.open(spec.output.uri, spec.output.storage_options)
        check_formats(spec.output.formats)
        self.source = planned_source(spec)
        self.stored = stored_dataset(spec, self.layout)
        self.models = built_models(spec)
        if plan is None:  # Features that are added to pairs may be of a model of one recording.
            check_references_used(spec, [model.description for model in self.models])
        streams = [stream for model in self.models for stream in model.description.streams]
        check_stream_names(streams, facts_of_job(spec))
        # A driver alone makes its plan before it takes the lock: a mistake leaves no output.
        self.plan = plan if self.stored is None else None
        if self.plan is None and not self.sharing.joins:
            self.plan = self._make_plan(self.stored)
        self.layout.check_writable()

    def process(self, stack: ExitStack) -> events.JobFinished:
        """Process the pending shards and close the dataset; the stack gives everything back."""
        job = self._open(stack)
        stack.enter_context(job.fence.says_why(job.layout))
        if job.before and not self.sharing.joins:
            if (changed := source_changed(self.source, job.plan)) is not None:
                self.sink(changed)
        self.sink(job.started())
        result = Result()
        # The dataset is finished before the workers stop, so a slow stop does not delay it.
        if job.pending and self.sharing.works:
            result = self._work(stack, job)
        return self._finish(job, result)

    def _open(self, stack: ExitStack) -> OpenJob:
        """Take the lock and open the job. A driver that joins holds the lock only meanwhile. It
        registers as a member before it reads plan and commits, so that its fence notices if another
        command takes the output over."""
        layout, sharing = self.layout, self.sharing
        member = None
        if sharing.joins and sharing.works:
            member = stack.enter_context(DriverMembership(layout))
        with ExitStack() as until_open:
            lock = opening(layout, sharing, shares=self.again is None)
            if lock is not None:
                (until_open if sharing.joins else stack).enter_context(lock)
            if self.again is not None:
                self.tell("looking for shards to process again")
            # A driver that needs the output alone takes the lock before it evicts members.
            holder = lock or member
            opens = UNFENCED if holder is None else holder.fence
            until_open.enter_context(opens.says_why(layout))
            stored = stored_dataset(self.spec, layout)
            if stored is None and (lock is None or self.stored is not None):
                raise overtaken(layout)
            # An earlier plan counts only if no other command has changed the dataset since.
            plan = self.plan
            if plan is None or (stored is not None and stored != self.stored):
                plan = self._make_plan(stored)
            job = self._open_output(plan, stored, opens, beside=lock is None)
            if self.stored is None and lock is not None:
                opens.check(layout)
        return replace(job, lease=member if sharing.joins else lock)

    def _open_output(
        self, plan: Plan, stored: DatasetFile | None, opens: Fence, *, beside: bool
    ) -> OpenJob:
        """Write or check plan and dataset.json; refuse to go on with an output unless `resume` is
        set. A driver `beside` others holds no lock. The fence `opens` is for the opening of the
        job."""
        layout = self.layout
        wanted = describe(self.spec, plan, self.models)
        if stored is None:
            opens.check(layout)
            plan.write(layout)
            dataset = open_dataset(layout, wanted, opens.check)
            look_again(layout, dataset, opens)
        else:
            check_dataset(stored, wanted)
            dataset = stored
        chosen = self.again(layout) if self.again is not None else {}
        before = commits_as(layout, Committed.of, without=chosen)
        if before and not (self.resume or beside):
            hint = ""
            with suppress(EarmillError):
                if changes := compare(plan.items(), listing(self.source)):
                    hint = f", --update to take in what has changed in the source ({changes})"
            raise OutputError(
                f"{layout.url()} already holds {len(before)} of {len(plan.shards)} shards of this "
                f"job; add --resume to go on with it{hint}, or use another output.uri"
            )
        opens.check(layout)
        if not beside:
            clear_scratch(layout)
        sweep()  # temporary files of drivers and workers that were killed
        if not beside and carry_over(layout, dataset, plan, self.tell, opens):
            before = commits_as(layout, Committed.of, without=chosen)
        left = [shard for shard in plan.shards if shard.shard_id not in before]
        waiting = {shard.shard_id for shard in plan.copies} - chosen.keys()
        copies = tuple(shard for shard in left if shard.shard_id in waiting)
        pending = tuple(shard for shard in left if shard.shard_id not in waiting)
        opens.check(layout)
        again = open_again(layout, chosen)
        return OpenJob(self.spec, layout, plan, dataset, before, pending, again, copies)

    def _make_plan(self, stored: DatasetFile | None) -> Plan:
        if stored is not None:
            return Plan.read(self.layout, stored.plan_id)
        self.tell("listing the source")

        def progress(rows: int) -> None:
            self.tell(f"listing the source: {rows:,} rows so far")

        plan = make_plan(self.source, self.spec, progress)
        for note in plan.notes:
            self.sink(events.Note(note))
        return plan

    def _work(self, stack: ExitStack, job: OpenJob) -> Result:
        """Process the pending shards with workers; the stack stops the workers."""
        self.tell("starting the workers")
        # A run that replaces commits shares no shards.
        shared = None if self.again is not None else self._shared(stack, job)
        stack.callback(_clear, job)
        session = stack.enter_context(self.executor.session(self.spec.run, self.tell))
        return self.scheduler(job, session, shared).run()

    def scheduler(self, job: OpenJob, session: Session, shared: BlockClaims | None) -> Scheduler:
        """Return the scheduler of the pending shards, with a worker for each place."""
        run, nodes = self.spec.run, session.nodes
        placements = place_workers(nodes, run, at_most=len(job.pending))
        places = WorkerPlacements(placements, run, self.sink)
        if note := cpu_note(nodes, run):
            self.sink(events.Note(note))
        planned = len(job.plan.shards)
        planned_s = sum(shard.seconds for shard in job.plan.shards)
        on_a_gpu = shards_in_flight(job.plan.rows / planned, planned_s / planned)

        def request_of(index: int) -> WorkerRequest:
            place = places.places[index]
            shards = on_a_gpu if place.num_gpus else CONCURRENT_SHARDS
            work = WorkerJob(
                spec=job.spec,
                dataset=job.dataset,
                threads=place.threads,
                folder=os.getcwd(),
                device=place.device,
                shards=shards,
                again=job.again,
                scratch=job.scratch,
                fence=job.fence,
            )
            return WorkerRequest(self.make_runner(work), place, shards)

        def committed(shard_id: str) -> Committed | None:
            known = job.again.get(shard_id, Recommit())
            record = read_commit(job.layout, shard_id, known.generation)
            return None if record is None else Committed.of(record)

        def on_tick() -> None:
            if job.lease is not None:
                job.lease.check()
            places.follow(pool, ledger, session.seen())
            if shared is not None:
                ahead = sum(slot.takes for slot in pool.slots if slot.state != DEAD)
                claim_ahead(shared, shards, ledger, ahead=ahead, stays=self.sharing.stays)

        pool = WorkerPool(session.workers(request_of), len(placements))
        shards = {shard.shard_id: shard for shard in job.pending}
        ledger = ShardLedger(
            job.pending if shared is None else (),
            committed,
            max_attempts=run.max_attempts,
            sink=self.sink,
            witnesses=job.witnesses(),
        )
        ledger.more_to_come = shared is not None
        return Scheduler(
            ledger,
            pool,
            deadlines=Deadlines(run.shard_deadline_s, run.row_deadline_s),
            sink=self.sink,
            observe=self.observe,
            stop=self.stop,
            on_tick=on_tick,
            drain_s=run.grace_s,
        )

    def _shared(self, stack: ExitStack, job: OpenJob) -> BlockClaims:
        """Return the shards that this driver may claim, as a member of the output's drivers."""
        member = job.lease
        if not isinstance(member, DriverMembership):
            member = stack.enter_context(DriverMembership(job.layout))
        return BlockClaims(
            job.layout,
            job.plan.plan_id,
            [shard.shard_id for shard in job.plan.computed],
            set(job.before),
            run_id=member.holder.run_id,
            start=self.sharing.start,
            fence=job.fence,
        )

    def _finish(self, job: OpenJob, result: Result) -> events.JobFinished:
        sharing = self.sharing
        job.fence.check(job.layout)
        before, known = job.before, job.before.keys() | result.done.keys()
        if not job.again and len(known) < len(job.plan.shards):
            # Other drivers have committed shards since this driver read the commits.
            planned = {shard.shard_id for shard in job.plan.shards}
            others = commits_as(job.layout, Committed.of, without=known)
            before = before | {name: one for name, one in others.items() if name in planned}
        missing = len(job.plan.shards) - len(before) - len(result.done)
        left = [shard for shard in job.copies if shard.shard_id not in before]
        if left and missing == len(left):
            copy_equal(job.layout, job.dataset, left, self.tell, job.fence)
            found = commits_as(job.layout, Committed.of, without=before.keys() | result.done.keys())
            result.done |= {shard.shard_id: found[shard.shard_id] for shard in left}
            missing = 0
        counted = _snapshot_path(job.layout)
        if not missing:
            self.tell("writing the index")
            anew = bool(result.done) or before != job.before
            close(job, sharing, before | result.done, anew=anew)
        elif job.again and result.done:
            # Replaced commits count at once; the other shards keep their earlier commits.
            with suppress(CommitError):
                finalise(job.layout, fence=job.fence)
        if sharing.joins and sharing.works and not sharing.stays:
            result.left_to_others = missing - len(result.failed)
        closed = counted is not None and _snapshot_path(job.layout) != counted
        if closed:
            self._tell_outdated(job.layout)
        end = summarise(job, result, [*before.values()], closed=closed)
        self.sink(end)
        return end

    def _tell_outdated(self, layout: Layout) -> None:
        with suppress(CommitError):
            current = read_current(layout)
            snapshot = None if current is None else read_snapshot(layout, current)
            if snapshot is not None and snapshot.outdated:
                self.sink(events.Note(outdated_text(snapshot.outdated, layout.url())))


def _clear(job: OpenJob) -> None:
    """Remove temporary files of this run's workers; the next run removes the rest."""
    with suppress(OSError):
        clear_scratch(job.layout, job.scratch)


def _snapshot_path(layout: Layout) -> str | None:
    """Return the path of the current snapshot, or an empty text; None for a damaged file."""
    with suppress(CommitError):
        current = read_current(layout)
        return "" if current is None else current.snapshot.path
    return None
