"""Records of shards that ended together are read together, and never older than the end."""

from __future__ import annotations

import threading

import pytest

from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver.scheduler import Scheduler
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.driver.worker_pool import WorkerPool
from earmill.pipeline.operations.run_job import CommitReader
from tests.pipeline.runners import shard
from tests.pipeline.test_crowd import Answering
from tests.waiting import DEADLINE_S

RECORD = Committed(1, 0, 10, 1.5)


def test_those_that_ended_together_are_read_side_by_side() -> None:
    """One after the other they would wait for each other for ever."""
    together = threading.Barrier(3, timeout=DEADLINE_S)

    def read(shard_id: str) -> Committed | None:
        together.wait()
        return None if shard_id == "b" else RECORD

    reader = CommitReader(read, side_by_side=True)
    reader.look_ahead(["a", "b", "c", "c"])
    assert [reader(name) for name in "abc"] == [RECORD, None, RECORD]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_what_was_read_for_an_earlier_attempt_does_not_count(side_by_side: bool) -> None:
    there: dict[str, Committed] = {}
    reader = CommitReader(there.get, side_by_side=side_by_side)
    reader.look_ahead(["a", "b"])
    assert reader("b") is None
    there |= {"a": RECORD, "b": RECORD}
    assert reader("b") == RECORD
    reader.look_ahead(["a"])
    assert reader("a") == RECORD


def test_a_store_that_fails_says_so_where_it_is_asked() -> None:
    def read(shard_id: str) -> Committed | None:
        raise OSError("gone")

    reader = CommitReader(read, side_by_side=True)
    reader.look_ahead(["a", "b"])
    with pytest.raises(OSError, match="gone"):
        reader("a")


def test_the_driver_looks_ahead_to_all_that_ended_in_a_round() -> None:
    workers, told = Answering(), list[list[str]]()
    names = [f"{n:05d}" for n in range(6)]
    ledger = ShardLedger(
        [shard(name, name) for name in names],
        lambda name: RECORD,
        max_attempts=1,
        look_ahead=lambda shards: told.append(list(shards)),
    )
    result = Scheduler(
        ledger, WorkerPool(workers, 3, clock=workers.clock), clock=workers.clock
    ).run()
    assert set(result.done) == {*names}
    assert sorted(max(told, key=len)) == names
