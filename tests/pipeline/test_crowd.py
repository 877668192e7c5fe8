"""The loop with very many workers: what it does each second must not grow with their square."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.scheduler import (
    MANY_WORKERS,
    STATUS_AT_ONCE,
    STATUS_EVERY_S,
    TURN_S,
    Scheduler,
)
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.driver.worker_pool import WorkerPool
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Outcome, WorkerInfo
from tests.pipeline.runners import shard

WORKERS = 3 * STATUS_AT_ONCE
ROUNDS = 12


class Answering:
    """Workers that answer at once, but for their shards, which end after some rounds of the loop.

    Each round takes as long as it takes until workers are asked again.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[int] = []
        self.calls: dict[int, tuple[int, str]] = {}
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now_s

    def start(self, index: int) -> int:
        return index

    def call(self, worker: int, kind: str, *args: Any) -> int:
        number = next(self._numbers)
        self.calls[number] = (worker, kind)
        if kind == "status":
            self.asked.append(worker)
        return number

    def ended(self, calls: Collection[int], timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        self.now_s += STATUS_EVERY_S
        info = WorkerInfo(pid=1, device="cpu", threads=1)
        for number in calls:
            kind = self.calls[number][1]
            if kind == "warm_up":
                yield number, Outcome(ok=True, info=info)
            elif kind == "status":
                yield number, Outcome(ok=True, value=0.25)
            elif self.now_s > ROUNDS:
                yield number, Outcome(ok=True)

    def kill(self, worker: int) -> None:
        pass


def test_a_few_workers_are_asked_at_a_time_and_each_in_its_turn() -> None:
    workers, seen = Answering(), list[events.Event]()
    shards = [shard(f"{n:05d}", f"{n}") for n in range(CONCURRENT_SHARDS * WORKERS)]
    ledger = ShardLedger(shards, lambda name: Committed(1, 0, 10, 1.5), max_attempts=1)
    pool = WorkerPool(workers, WORKERS, clock=workers.clock)
    result = Scheduler(ledger, pool, sink=seen.append, clock=workers.clock).run()
    assert len(result.done) == len(shards)
    # As many rounds of questions as time allows, none of them to more than some.
    assert STATUS_AT_ONCE < len(workers.asked) <= ROUNDS * STATUS_AT_ONCE
    times = Counter(workers.asked)
    assert set(times) == set(range(WORKERS))
    assert max(times.values()) - min(times.values()) <= 1
    # All answers of a round are one event: it adds up all workers.
    told = [event for event in seen if isinstance(event, events.InFlight)]
    assert 2 <= len(told) <= ROUNDS + 1
    assert max(event.seconds for event in told) == 0.25 * WORKERS


class Trickling(Answering):
    """Workers whose shards end one a millisecond, as long as somebody waits or sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0
        self._ends_s: dict[int, float] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def call(self, worker: int, kind: str, *args: Any) -> int:
        number = super().call(worker, kind, *args)
        latest_s = max(self._ends_s.values(), default=self.now_s)
        self._ends_s[number] = latest_s + 0.001 if kind == "run" else self.now_s
        return number

    def ended(self, calls: Collection[int], timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        info = WorkerInfo(pid=1, device="cpu", threads=1)
        self.now_s = max(self.now_s, min(self._ends_s[number] for number in calls))
        for number in [number for number in calls if self._ends_s[number] <= self.now_s]:
            del self._ends_s[number]
            yield number, Outcome(ok=True, info=info, value=0.0)


@pytest.mark.parametrize("count", [MANY_WORKERS, MANY_WORKERS // 10])
def test_shards_of_very_many_workers_that_end_within_a_moment_share_a_turn(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A turn looks at every worker; a few are answered at once."""
    workers, turns = Trickling(), itertools.count()
    monkeypatch.setattr("earmill.pipeline.driver.scheduler.time.sleep", workers.sleep)
    shards = [shard(f"{n:05d}", f"{n}") for n in range(1000)]
    ledger = ShardLedger(shards, lambda name: Committed(1, 0, 10, 1.5), max_attempts=1)
    pool = WorkerPool(workers, count, clock=workers.clock)
    scheduler = Scheduler(ledger, pool, clock=workers.clock, on_tick=lambda: next(turns))
    assert len(scheduler.run().done) == len(shards)
    if count < MANY_WORKERS:
        assert workers.slept_s == 0.0
        assert next(turns) > len(shards) / 2
    else:
        assert next(turns) <= workers.now_s / TURN_S + 3
