"""Workers that sleep instead of computing and commit real shards, for tests of a driver's load.

A worker has a slot in the driver's pool, with one shard in work and one queued. Its sleep is an
entry of a heap, and a few processes write for all workers, so that a thousand workers cost no more
than their commits. Rows are a few zero frames; encoding, reading back, hashing, upload and commit
are the code of a job.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock, Semaphore
from typing import Any
from unittest import mock

import numpy as np

from earmill.pipeline.driver import events
from earmill.pipeline.driver.executors import WorkerRequest
from earmill.pipeline.driver.executors.local import LocalProcess, LocalWorkers
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import as_stored
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec, RunSpec
from earmill.pipeline.worker.messages import LostCall, Outcome, WorkerInfo
from earmill.pipeline.worker.row_pipeline import ShardRows
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

FRAMES = 5
PROCESSES = 4
# Shards that a process writes at a time: one works while another waits for the disk. With more,
# threads of one interpreter wait for each other, and a commit takes more CPU time.
WRITERS = 2


class EmptyRows:
    """A row pipeline without audio: every row has the same few frames.

    Args:
        spec: The job.
        extractors: Its models.
    """

    def __init__(self, spec: JobSpec, extractors: Sequence[Any]) -> None:
        infos = [info for model in extractors for info in model.streams]
        self._streams = {
            info.name: np.zeros((FRAMES, info.width), spec.output.dtype)
            for info in as_stored(infos, spec.output.dtype)
        }

    def process(self, items: Sequence[Item], **options: Any) -> ShardRows:
        """Return rows for these items."""
        return ShardRows([self._row(item) for item in items], [])

    def _row(self, item: Item) -> FeatureRow:
        seconds = item.seconds or 0.0
        facts = {"uri": item.uri, "size": item.size, "mtime": item.mtime, "pcm_sha256": "0" * 64}
        return FeatureRow(item.row_id, item.row_id, -1, seconds, facts, item.extra, self._streams)


class WritingRunner(ShardRunner):
    """The runner of a process that many workers share; it is warmed up once."""

    def __init__(self, job: WorkerJob) -> None:
        def rows(spec: JobSpec, source: Any, extractors: Sequence[Any], **rest: Any) -> Any:
            return EmptyRows(spec, extractors)

        super().__init__(job, rows)
        self._writers = Semaphore(WRITERS)
        self._begin = Lock()

    def warm_up(self) -> WorkerInfo:
        """Warm up for the first worker that asks; the others get its result."""
        with self._begin:
            return super().warm_up()


@dataclass(frozen=True)
class MakeWriting:
    """Builds the runner inside a process of workers, once."""

    job: WorkerJob

    def __call__(self) -> WritingRunner:
        with _building:
            if not _built:
                _built.append(WritingRunner(self.job))
        return _built[0]


_built: list[WritingRunner] = []
_building = Lock()


class Crowd(LocalWorkers):
    """Workers that share a few processes.

    Args:
        request_of: Describes a worker.
        sleep_s: Mean sleep of a shard.
    """

    def __init__(self, request_of: Callable[[int], WorkerRequest], sleep_s: float) -> None:
        super().__init__(lambda index: replace(request_of(index), shards=WRITERS))
        self._shared = [super(Crowd, self).start(index) for index in range(PROCESSES)]
        self._sleep_s, self._draw = sleep_s, np.random.default_rng(0)
        self._asleep: list[tuple[float, int, LocalProcess, tuple[object, ...], int]] = []
        self._numbers = 0
        self._sent: dict[int, int] = {}

    def start(self, index: int) -> LocalProcess:
        """Return one of the processes for a worker."""
        return self._shared[index % PROCESSES]

    def call(self, worker: LocalProcess, kind: str, *args: object) -> int:
        """Call a worker; the call of a shard is sent after its sleep."""
        if kind != "run":
            return super().call(worker, kind, *args)
        self._numbers += 1
        call = -self._numbers
        due_s = time.monotonic() + self._sleep_s * self._draw.uniform(0.5, 1.5)
        heapq.heappush(self._asleep, (due_s, self._numbers, worker, args, call))
        return call

    def ended(
        self, calls: Collection[int], timeout_s: float
    ) -> Iterator[tuple[int, Outcome | LostCall]]:
        """Yield calls that are answered."""
        while self._asleep and self._asleep[0][0] <= time.monotonic():
            _, _, worker, args, call = heapq.heappop(self._asleep)
            self._sent[super().call(worker, "run", *args)] = call
        if self._asleep:
            timeout_s = min(timeout_s, max(0.0, self._asleep[0][0] - time.monotonic()))
        for call, outcome in super().ended(calls, timeout_s):
            yield self._sent.pop(call, call), outcome

    def kill(self, worker: LocalProcess) -> None:
        """End the process of a worker; this happens at the end of the run."""
        if worker in self._processes:
            super().kill(worker)


class CrowdExecutor:
    """An executor and its session: one machine with all workers."""

    is_here = True

    def __init__(self, workers: int, sleep_s: float) -> None:
        self._workers, self._sleep_s = workers, sleep_s

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[CrowdExecutor]:
        """Yield this executor as its session."""
        yield self

    def seen(self) -> None:
        """Do nothing, because no node joins."""

    def nodes(self) -> list[Node]:
        """Return the one node."""
        return [Node("here", self._workers, 0)]

    def workers(self, request_of: Callable[[int], WorkerRequest]) -> Crowd:
        """Return all workers."""
        return Crowd(request_of, self._sleep_s)

    def check(self, run: RunSpec | None = None) -> None:
        """Do nothing, because this process holds the session."""


def run_sleeping(
    spec: JobSpec, *, workers: int, sleep_s: float, sink: events.Sink = events.ignore
) -> events.JobFinished:
    """Run a job whose workers sleep for each shard and commit zero frames.

    Args:
        spec: The job.
        workers: Number of workers.
        sleep_s: Mean sleep of a shard.
        sink: Takes the events.
    """
    run = spec.run.model_copy(update={"workers": workers, "threads_per_worker": 1})
    crowd = CrowdExecutor(workers, sleep_s)
    with mock.patch("earmill.pipeline.operations.run_job.executor_of", lambda *asked: crowd):
        return run_job(spec.model_copy(update={"run": run}), sink=sink, make_runner=MakeWriting)
