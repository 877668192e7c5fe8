"""Workers that sleep instead of computing and commit for real: what a driver sees of many machines.

A worker has a seat in the driver's table like any other, with a shard under way and one behind it.
Its sleep is a line in a heap, and a few processes write for all of them, so that a thousand cost no
more than they commit. Rows are a few frames of nothing; from there on all is as in a job: encoding,
reading back, hashing, upload, commit.
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
from earmill.pipeline.driver.executors.base import Hire
from earmill.pipeline.driver.executors.local import LocalCall, LocalProcess, LocalWorkers
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.formats.dtypes import as_stored
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec, RunSpec
from earmill.pipeline.worker.messages import LostCall, Outcome, WorkerInfo
from earmill.pipeline.worker.row_pipeline import ShardRows
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

FRAMES = 5
PROCESSES = 4
# Shards that a process writes at a time: while one waits for the disk, another works. With more of
# them, threads of one interpreter wait for each other, and a commit takes more of a processor.
WRITERS = 2


class EmptyRows:
    """A row pipeline without audio: every row has the same few frames.

    Args:
        spec: The job. extractors: Its models.
    """

    def __init__(self, spec: JobSpec, extractors: Sequence[Any]) -> None:
        infos = [info for model in extractors for info in model.streams]
        self._streams = {
            info.name: np.zeros((FRAMES, info.width), spec.output.dtype)
            for info in as_stored(infos, spec.output.dtype)
        }

    def process(self, items: Sequence[Item], **options: Any) -> ShardRows:
        """The rows of these items."""
        return ShardRows([self._row(item) for item in items], [])

    def _row(self, item: Item) -> FeatureRow:
        seconds = item.seconds or 0.0
        facts = {"uri": item.uri, "size": item.size, "mtime": item.mtime, "pcm_sha256": "0" * 64}
        return FeatureRow(item.row_id, item.row_id, -1, seconds, facts, item.extra, self._streams)


class WritingRunner(ShardRunner):
    """The runner of a process that many workers share: it is made ready once, and they do not wait
    for each other."""

    def __init__(self, job: WorkerJob) -> None:
        def rows(spec: JobSpec, source: Any, extractors: Sequence[Any], **rest: Any) -> Any:
            return EmptyRows(spec, extractors)

        super().__init__(job, rows)
        self._writers = Semaphore(WRITERS)
        self._begin = Lock()

    def warm_up(self) -> WorkerInfo:
        """Ready, as soon as the first worker that asks has made it so."""
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
        hire: Describes a worker. sleep_s: For a shard, on average.
    """

    def __init__(self, hire: Callable[[int], Hire], sleep_s: float) -> None:
        super().__init__(lambda index: replace(hire(index), shards=WRITERS))
        self._shared = [super(Crowd, self).start(index) for index in range(PROCESSES)]
        self._sleep_s, self._draw = sleep_s, np.random.default_rng(0)
        self._asleep: list[tuple[float, int, LocalProcess, tuple[object, ...], LocalCall]] = []
        self._numbers = 0
        self._sent: dict[LocalCall, LocalCall] = {}

    def start(self, index: int) -> LocalProcess:
        """A seat in one of the processes."""
        return self._shared[index % PROCESSES]

    def call(self, worker: LocalProcess, kind: str, *args: object) -> LocalCall:
        """The call; a shard's is sent after its sleep."""
        if kind != "run":
            return super().call(worker, kind, *args)
        self._numbers += 1
        call = LocalCall(-self._numbers)
        due_s = time.monotonic() + self._sleep_s * self._draw.uniform(0.5, 1.5)
        heapq.heappush(self._asleep, (due_s, self._numbers, worker, args, call))
        return call

    def ended(
        self, calls: Collection[LocalCall], timeout_s: float
    ) -> Iterator[tuple[LocalCall, Outcome | LostCall]]:
        """Calls whose answers have come."""
        while self._asleep and self._asleep[0][0] <= time.monotonic():
            _, _, worker, args, call = heapq.heappop(self._asleep)
            self._sent[super().call(worker, "run", *args)] = call
        if self._asleep:
            timeout_s = min(timeout_s, max(0.0, self._asleep[0][0] - time.monotonic()))
        for call, outcome in super().ended(calls, timeout_s):
            yield self._sent.pop(call, call), outcome

    def kill(self, worker: LocalProcess) -> None:
        """The process goes with the first of its workers; the run is over then."""
        if worker in self._processes:
            super().kill(worker)


class CrowdExecutor:
    """An executor, and its session: one machine of so many workers."""

    is_private, is_here = True, True

    def __init__(self, workers: int, sleep_s: float) -> None:
        self._workers, self._sleep_s = workers, sleep_s

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[CrowdExecutor]:
        """It is there already."""
        yield self

    def seen(self) -> None:
        """Nobody joins it."""

    def nodes(self) -> list[Node]:
        """One."""
        return [Node("here", self._workers, 0)]

    def workers(self, hire: Callable[[int], Hire]) -> Crowd:
        """All of them."""
        return Crowd(hire, self._sleep_s)

    def check(self, run: RunSpec | None = None) -> None:
        """It is there as long as this process is."""


def run_sleeping(
    spec: JobSpec, *, workers: int, sleep_s: float, sink: events.Sink = events.ignore
) -> events.JobFinished:
    """A job whose workers sleep for their shards and commit rows of nothing.

    Args:
        sleep_s: For a shard, on average.
    """
    run = spec.run.model_copy(update={"workers": workers, "threads_per_worker": 1})
    crowd = CrowdExecutor(workers, sleep_s)
    with mock.patch("earmill.pipeline.driver.run.executor_of", lambda *asked: crowd):
        return run_job(spec.model_copy(update={"run": run}), sink=sink, make_runner=MakeWriting)
