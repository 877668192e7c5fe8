"""Set up the scheduler of a job: ledger, worker pool, claims on shards, orders to workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from earmill.pipeline.dataset.commit_record import READ_THREADS, Recommit, read_commit
from earmill.pipeline.dataset.driver_lock import Heartbeat
from earmill.pipeline.driver import events
from earmill.pipeline.driver.events import StopRequest
from earmill.pipeline.driver.executors import Session, WorkerRequest
from earmill.pipeline.driver.placement import Placement, cpu_note, place_workers
from earmill.pipeline.driver.scheduler import Deadlines, Scheduler
from earmill.pipeline.driver.shard_ledger import Committed, ShardLedger
from earmill.pipeline.driver.sharing import ShardClaims
from earmill.pipeline.driver.worker_pool import WorkerPlacements, WorkerPool
from earmill.pipeline.operations.open_job import OpenJob, committed_of
from earmill.pipeline.worker.launches import shards_in_flight
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob


class CommitReader:
    """Reads commit records for `ShardLedger`, with `side_by_side` several at a time.

    A store takes tens of milliseconds to answer, which would limit a job of many workers to some
    tens of shards a second.
    """

    def __init__(self, read: Callable[[str], Committed | None], *, side_by_side: bool) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(READ_THREADS, "commits") if side_by_side else None
        self._begun: dict[str, Future[Committed | None]] = {}

    def look_ahead(self, shards: Sequence[str]) -> None:
        """Begin to read the records of these shards, and drop reads that were begun before."""
        self._begun = {}
        if self._threads is not None and len(shards) > 1:
            self._begun = {shard: self._threads.submit(self._read, shard) for shard in {*shards}}

    def __call__(self, shard_id: str) -> Committed | None:
        """Return the record of a shard as of now, or as of the end of its attempt."""
        begun = self._begun.pop(shard_id, None)
        return self._read(shard_id) if begun is None else begun.result()


# Returns, for a worker's job, the function that builds its runner inside the worker's process.
RunnerFactory = Callable[[WorkerJob], Callable[[], ShardRunner]]


def scheduler_of(
    job: OpenJob,
    session: Session,
    sink: events.Sink,
    observe: events.Sink,
    stop: StopRequest,
    lease: Heartbeat | None,
    make_runner: RunnerFactory,
    supply: Callable[[int], ShardClaims] | None,
) -> Scheduler:
    """Return the scheduler of the pending shards, with a worker for each place of the session.

    `lease` gives the run its right to write. `supply` begins to claim shards, so many ahead; None
    for a run that does not share.
    """
    run, nodes = job.spec.run, session.nodes()
    placements = place_workers(nodes, run, at_most=len(job.pending))
    worker_places = WorkerPlacements(placements, run, seen=session.seen, sink=sink)
    if note := cpu_note(nodes, run):
        sink(events.Note(note))

    def read(shard_id: str) -> Committed | None:
        known = job.again.get(shard_id, Recommit())
        record = read_commit(job.layout, shard_id, known.generation)
        return None if record is None else committed_of(record)

    committed = CommitReader(read, side_by_side=not job.layout.is_local)

    def request_of(index: int) -> WorkerRequest:
        place = worker_places.places[index]
        shards = shards_of(job, place)
        work = WorkerJob(
            spec=job.spec,
            plan_id=job.plan.plan_id,
            threads=place.threads,
            folder=os.getcwd(),
            device=place.device,
            shards=shards,
            parquet_form=job.dataset.parquet_form,
            streams=job.dataset.streams,
            extra_types=job.dataset.extra_types,
            again=job.again,
            scratch=job.scratch,
            fence=job.fence,
        )
        return WorkerRequest(make_runner(work), place, shards)

    placed = len(placements)
    ahead = sum(shards_of(job, place) for place in placements)
    claims = None if supply is None else supply(ahead)

    def on_tick() -> None:
        nonlocal placed
        if lease is not None:
            lease.check()
        session.check()
        worker_places.follow(pool, ledger)
        if claims is None:
            return
        if len(worker_places.places) > placed:
            placed = len(worker_places.places)
            claims.widen(sum(shards_of(job, place) for place in worker_places.of_living(pool)))
        claims.feed(ledger)

    ledger = ShardLedger(
        job.pending if claims is None else (),
        committed,
        max_attempts=run.max_attempts,
        sink=sink,
        witnesses=job.witnesses(),
        look_ahead=committed.look_ahead,
    )
    ledger.more_to_come = claims is not None
    pool = WorkerPool(session.workers(request_of), len(placements))
    return Scheduler(
        ledger,
        pool,
        deadlines=Deadlines(run.shard_deadline_s, run.row_deadline_s),
        sink=sink,
        observe=observe,
        stop=stop,
        on_tick=on_tick,
        drain_s=run.grace_s,
    )


def shards_of(job: OpenJob, place: Placement) -> int:
    """Return the most shards that the worker of a place is sent at a time."""
    if not place.num_gpus:
        return CONCURRENT_SHARDS
    count = len(job.plan.shards)
    return shards_in_flight(
        job.plan.rows / count, sum(shard.seconds for shard in job.plan.shards) / count
    )
