"""Records of shards that ended together are read together, and never older than the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver.scheduler import Scheduler
from earmill.pipeline.driver.shard_ledger import ShardLedger, ShardWork
from earmill.pipeline.driver.worker_pool import WorkerPool
from earmill.pipeline.worker.messages import Outcome
from tests.pipeline.runners import shard
from tests.pipeline.test_crowd import Answering
from tests.waiting import DEADLINE_S

RECORD = Committed(1, 0, 10, 1.5)
ENDED = Outcome(ok=True)


def begun(
    names: str, read: Callable[[str], Committed | None], **options: Any
) -> tuple[ShardLedger, list[ShardWork]]:
    """A ledger whose shards are all in flight."""
    ledger = ShardLedger([shard(name, name) for name in names], read, max_attempts=9, **options)
    taken = [ledger.next(idle=True) for _ in names]
    return ledger, [assignment.work for assignment in taken if assignment is not None]


def test_those_that_ended_together_are_read_side_by_side() -> None:
    """One after the other they would wait for each other for ever."""
    together = threading.Barrier(3, timeout=DEADLINE_S)

    def read(shard_id: str) -> Committed | None:
        together.wait()
        return None if shard_id == "b" else RECORD

    ledger, works = begun("abc", read)
    ledger.look_ahead([*works, works[-1]])
    for work in works:
        ledger.shard_ended(work, ENDED)
    assert ledger.result.done == {"a": RECORD, "c": RECORD}


def test_what_was_read_for_an_earlier_attempt_does_not_count() -> None:
    there: dict[str, Committed] = {}
    ledger, (a, b) = begun("ab", there.get)
    ledger.look_ahead([a, b])
    ledger.shard_ended(b, ENDED)
    assert ledger.result.done == {}
    there |= {"a": RECORD, "b": RECORD}
    ledger.shard_ended(b, ENDED)
    assert ledger.result.done == {"b": RECORD}
    ledger.look_ahead([a])
    ledger.shard_ended(a, ENDED)
    assert ledger.result.done == {"a": RECORD, "b": RECORD}


def test_a_store_that_fails_says_so_where_it_is_asked() -> None:
    def read(shard_id: str) -> Committed | None:
        raise OSError("gone")

    ledger, works = begun("ab", read)
    ledger.look_ahead(works)
    with pytest.raises(OSError, match="gone"):
        ledger.shard_ended(works[0], ENDED)


def test_the_driver_looks_ahead_to_all_that_ended_in_a_round() -> None:
    """The reads of a round wait for each other."""
    workers, names = Answering(), "abcdef"
    together = threading.Barrier(len(names), timeout=DEADLINE_S)

    def read(shard_id: str) -> Committed | None:
        together.wait()
        return RECORD

    ledger = ShardLedger([shard(name, name) for name in names], read, max_attempts=1)
    result = Scheduler(
        ledger, WorkerPool(workers, 3, clock=workers.clock), clock=workers.clock
    ).run()
    assert set(result.done) == {*names}
