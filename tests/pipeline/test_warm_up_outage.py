"""A worker that cannot get ready for an outage is tried as long as a run bears one, no longer."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from earmill.pipeline.driver import worker_pool as pool_module
from earmill.pipeline.driver.scheduler import OUTAGE_WARM_UP_PAUSE_S, OUTAGE_WARM_UP_S, Scheduler
from earmill.pipeline.driver.shard_ledger import ENOUGH_S, ShardLedger
from earmill.pipeline.driver.worker_pool import WorkerPool
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.worker_process import ShardWorker
from tests.pipeline.fake_workers import FakeWorkers, Ref
from tests.pipeline.outages import Clock
from tests.pipeline.runners import shard


def no_room() -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class FullDisk(FakeWorkers):
    """Workers whose warm-up finds the disk full; each try takes its time."""

    clock: Clock = field(default_factory=Clock)
    takes_s: float = 0.0

    def ended(self, calls: list[Ref], timeout_s: float) -> Iterator[tuple[Ref, Outcome]]:
        for call in calls:
            self.clock.sleep(self.takes_s)
            yield call, ShardWorker(no_room).warm_up()


@pytest.mark.parametrize("takes_s", [0.0, 15.0, 60.0])
def test_a_slow_failure_is_no_longer_borne_than_a_fast_one(
    takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(pool_module.time, "sleep", clock.sleep)
    ledger = ShardLedger([shard("00000", "ok")], lambda _: None, max_attempts=3)
    workers = FullDisk(clock=clock, takes_s=takes_s)
    began_s = clock()
    result = Scheduler(ledger, WorkerPool(workers, 1, clock=clock), clock=clock).run()
    took_s = clock() - began_s
    one_try_s = takes_s + OUTAGE_WARM_UP_PAUSE_S + 1.0
    assert ENOUGH_S < OUTAGE_WARM_UP_S <= took_s <= OUTAGE_WARM_UP_S + 2 * one_try_s
    assert result.fatal.startswith("no worker could be started: OSError: [Errno 28] No space left")
    assert f"temporary files are in {tempfile.gettempdir()}" in result.fatal


def test_a_file_that_found_no_room_is_named_and_nothing_is_guessed() -> None:
    def no_room_there() -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/kernels/x")

    said = ShardWorker(no_room_there).warm_up()
    assert "/data/kernels/x" in said.message and "temporary" not in said.message
