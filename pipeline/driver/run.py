"""One job from spec to finished dataset: check, lock, plan, schedule, finalise.

Everything a user can get wrong is raised before Ray starts. The plan is made once and stored;
resume is the stored plan minus the commits. The output is the only state: whatever kills this
process, running it again with `resume` goes on where the commits end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from earmill.pipeline.common import stand_in
from earmill.pipeline.common.errors import CommitError, OutputError, RunStopped, StorageError
from earmill.pipeline.common.extension_points import FORMATS, SOURCES
from earmill.pipeline.dataset.carry import carry_over
from earmill.pipeline.dataset.description import DatasetFile, open_dataset, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.lease import DriverLock
from earmill.pipeline.dataset.provenance import run_provenance
from earmill.pipeline.dataset.publish import CommitRecord, commits, read_commit
from earmill.pipeline.dataset.recompute import Again, Chooser, open_again
from earmill.pipeline.dataset.snapshot import is_closed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.cluster_watch import watch_ray
from earmill.pipeline.driver.deadlines import Deadlines
from earmill.pipeline.driver.placement import (
    Placement,
    check_device,
    cpu_note,
    has_seats,
    place_workers,
)
from earmill.pipeline.driver.ray_session import (
    Node,
    check_address,
    is_here,
    is_joined,
    is_private,
    ray_session,
    wait_for_nodes,
)
from earmill.pipeline.driver.shard_tracker import WITNESSES, Committed, Ledger, Result, smallest
from earmill.pipeline.driver.source_changes import source_changed, update_hint
from earmill.pipeline.driver.stop_request import StopRequest
from earmill.pipeline.driver.summary import RESUME, summarise
from earmill.pipeline.formats.casting import as_stored
from earmill.pipeline.formats.format import BINARY
from earmill.pipeline.formats.registry import check_formats
from earmill.pipeline.planning.plan import Plan, Shard, make_plan, skipped_text
from earmill.pipeline.planning.speeds import keep_job
from earmill.pipeline.sources import Item, Source, open_source
from earmill.pipeline.spec.changes import describe_changes
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.owned_folders import sweep
from earmill.pipeline.storage.store_calls import patient
from earmill.pipeline.worker.kernels import compiling
from earmill.pipeline.worker.launch_batches import shards_in_flight
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Runner
from earmill.pipeline.worker.shard_runner import WorkerJob

if TYPE_CHECKING:
    from amtcore.features.base import Extractor
    from earmill.pipeline.driver.scheduler import Scheduler

# Builds, for a worker's job, what builds its runner inside the worker's process.
RunnerFactory = Callable[[WorkerJob], Callable[[], Runner]]


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
    check_address(ray_address)
    check_device(spec.run, ray_address)
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    check_formats(spec.output.formats)
    source = open_source(spec.source)
    stored = _stored_dataset(spec, layout)
    extractors = validate_models(spec)
    if stored is None:
        sink(events.Step("listing the source"))
    plan = make_plan(source, spec) if stored is None else Plan.read(layout, stored.plan_id)
    for note in plan.notes if stored is None else ():
        sink(events.Note(note))
    layout.check_writable()
    with DriverLock(layout) as lock:
        if again is not None:
            sink(events.Step("looking for shards to process again"))
        job = _open_job(spec, layout, plan, extractors, source, resume=resume, again=again)
        if job.before and (changed := source_changed(source, plan)) is not None:
            sink(changed)
        sink(job.started())
        result = Result()
        # The output is finished before Ray stops: whatever keeps Ray does not keep the dataset.
        with ExitStack() as session:
            if job.pending:
                sink(events.Step("starting Ray and the workers"))
                if is_private(ray_address) and spec.run.device != "cuda":
                    session.enter_context(compiling(extractors))
                session.enter_context(ray_session(ray_address))
                nodes = wait_for_nodes(
                    spec.run,
                    lambda text: sink(events.Step(text)),
                    joined=is_joined(ray_address),
                )
                result = _scheduler(job, nodes, sink, stop, lock, make_runner).run()
                if is_here(nodes) and not has_seats(nodes, spec.run):
                    start_s = time.monotonic() - began_s - result.worked_s
                    keep_job(spec, result.seconds, result.cpu_s, start_s)
            return _finish(job, result, sink)


@dataclass(frozen=True)
class _Job:
    """A job that may start: everything is checked, the lock is held.

    Args:
        before: Commits of earlier runs. pending: Shards that have none, or are done again.
        again: The latter.
    """

    spec: JobSpec
    layout: Layout
    plan: Plan
    dataset: DatasetFile
    before: dict[str, CommitRecord]
    pending: tuple[Shard, ...]
    again: Mapping[str, Again] = field(default_factory=dict)

    def started(self) -> events.JobStarted:
        """The event that opens the run."""
        records = self.before.values()
        total_s = sum(shard.seconds for shard in self.plan.shards)
        return events.JobStarted(
            job=self.spec.name,
            output=self.layout.url(),
            plan_id=self.plan.plan_id,
            shards_total=len(self.plan.shards),
            shards_done=len(self.before),
            rows_total=self.plan.rows,
            rows_ok=sum(record.rows_ok for record in records),
            rows_bad=sum(record.rows_bad for record in records),
            seconds_total=total_s,
            seconds_done=total_s - sum(shard.seconds for shard in self.pending),
            audio_s_done=sum(record.seconds for record in records),
        )

    def witnesses(self) -> list[Item]:
        """Rows that an earlier run could read: those of its best shards."""
        records = [record for record in self.before.values() if record.rows_ok]
        best = sorted(records, key=lambda record: record.rows_bad / record.rows_ok)[:WITNESSES]
        shards = {shard.shard_id: shard for shard in self.plan.shards}
        return [smallest(shards[record.shard]) for record in best if record.shard in shards]


def _stored_dataset(spec: JobSpec, layout: Layout) -> DatasetFile | None:
    """The output's own description, None where it is new; OutputError if it is another job's."""
    stored = read_dataset(layout)
    if stored is not None and stored.spec_sha256 != spec.sha256():
        changed = describe_changes(stored.spec, spec.canonical()) or "not visible in the spec"
        raise OutputError(
            f"{layout.url()} belongs to another spec (different: {changed}); use another output.uri"
        )
    return stored


def _open_job(
    spec: JobSpec,
    layout: Layout,
    plan: Plan,
    extractors: Sequence[Extractor],
    source: Source,
    *,
    resume: bool,
    again: Chooser | None,
) -> _Job:
    """Write or check plan and dataset.json; refuse to go on unasked."""
    plan.write(layout)
    dataset = open_dataset(layout, _describe(spec, plan, extractors))
    chosen = again(layout) if again is not None else {}
    before = commits(layout, without=chosen)
    if before and not resume:
        raise OutputError(
            f"{layout.url()} already holds {len(before)} of {len(plan.shards)} shards of this job; "
            f"add --resume to go on with it{update_hint(source, plan)}, or use another output.uri"
        )
    layout.clear_scratch()
    sweep()  # a run without pending shards starts no Ray, which would do it
    if carry_over(layout, dataset, plan):
        before = commits(layout, without=chosen)
    pending = tuple(shard for shard in plan.shards if shard.shard_id not in before)
    return _Job(spec, layout, plan, dataset, before, pending, open_again(layout, chosen))


def _describe(spec: JobSpec, plan: Plan, extractors: Sequence[Extractor]) -> DatasetFile:
    described = [extractor.describe() for extractor in extractors]
    return DatasetFile(
        name=spec.name,
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id=plan.plan_id,
        streams=tuple(
            info.to_dict()
            for model in extractors
            for info in as_stored(model.streams, spec.output.dtype)
        ),
        buffers_sha256={
            _unique(index, spec): model.buffers_sha256() for index, model in enumerate(extractors)
        },
        provenance=run_provenance(described, device=spec.run.device, dtype=spec.output.dtype)
        | {"extensions": _extensions(spec)},
        parquet_form=spec.output.parquet_form or BINARY,
        extra_types=plan.extra_types,
        extra_labels=plan.extra_labels,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _extensions(spec: JobSpec) -> dict[str, object]:
    """The distributions that bring the job's source and formats: what a reader may have to get."""
    return {
        "source": SOURCES.owner(spec.source.kind),
        "formats": {name: FORMATS.owner(name) for name in spec.output.formats},
    }


def _unique(index: int, spec: JobSpec) -> str:
    """The model's name; a second entry of the same model gets a number."""
    name = spec.extract[index].model
    earlier = sum(entry.model == name for entry in spec.extract[:index])
    return f"{name}#{earlier}" if earlier else name


def _scheduler(
    job: _Job,
    nodes: Sequence[Node],
    sink: events.Sink,
    stop: StopRequest,
    lock: DriverLock,
    make_runner: RunnerFactory,
) -> Scheduler:
    # These import Ray, which reads its environment once: ray_session sets it first.
    from earmill.pipeline.driver.pool import Pool
    from earmill.pipeline.driver.scheduler import Scheduler

    run = job.spec.run
    placements = place_workers(nodes, run, at_most=len(job.pending))
    if note := cpu_note(nodes, run):
        sink(events.Note(note))

    def committed(shard_id: str) -> Committed | None:
        known = job.again.get(shard_id, Again())
        record = read_commit(job.layout, shard_id, known.generation)
        return None if record is None else _committed(record)

    def spawn(index: int) -> object:
        return _spawn(job, placements[index], make_runner)

    watch = watch_ray()

    def on_tick() -> None:
        lock.check()
        watch.check()

    ledger = Ledger(
        job.pending,
        committed,
        max_attempts=run.max_attempts,
        sink=sink,
        witnesses=job.witnesses(),
    )
    return Scheduler(
        ledger,
        Pool(spawn, len(placements)),
        deadlines=Deadlines(run.shard_deadline_s),
        sink=sink,
        stop=stop,
        on_tick=on_tick,
    )


def _spawn(job: _Job, place: Placement, make_runner: RunnerFactory) -> object:
    from earmill.pipeline.worker.actor import spawn_worker

    count = len(job.plan.shards)
    in_flight = shards_in_flight(
        job.plan.rows / count, sum(shard.seconds for shard in job.plan.shards) / count
    )
    shards = in_flight if place.num_gpus else CONCURRENT_SHARDS
    work = WorkerJob(
        spec=job.spec,
        plan_id=job.plan.plan_id,
        threads=place.threads,
        folder=os.getcwd(),
        device=place.device,
        shards=shards,
        parquet_form=job.dataset.parquet_form,
        extra_types=job.dataset.extra_types,
        again=job.again,
    )
    return spawn_worker(
        make_runner(work),
        # Ray sets this to the CPUs it reserved, which is none.
        environment={"OMP_NUM_THREADS": str(place.threads)} | stand_in.for_workers(),
        num_cpus=place.num_cpus,
        num_gpus=place.num_gpus,
        shards=shards,
        node_id=place.node_id,
    )


def _committed(record: CommitRecord) -> Committed:
    return Committed(
        rows_ok=record.rows_ok,
        rows_bad=record.rows_bad,
        nbytes=sum(file.bytes for file in record.files),
        seconds=record.seconds,
    )


def _finish(job: _Job, result: Result, sink: events.Sink) -> events.JobFinished:
    """Finalise what is complete, and sum up."""
    complete = len(job.before) + len(result.done) == len(job.plan.shards)
    if complete and (result.done or not is_closed(job.layout, job.before)):
        sink(events.Step("writing the index"))
        finalise(job.layout)
    elif job.again and result.done:
        # What was done again counts, also where the rest of it keeps the commits of before.
        with suppress(CommitError):
            finalise(job.layout)
    before = [_committed(record) for record in job.before.values()]
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
