"""Sharing of an output by several drivers: opening, claims on shards. A driver that joins
holds the lock only to make the plan and to write the index, and works on shards it has claimed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from earmill.pipeline.common.errors import LockedError
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.driver_lock import BlockClaims, DriverLock
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.spec.job import SLURM_ARRAY, RunSpec
from earmill.pipeline.storage.layout import Layout

CLAIM_S = 0.5  # Longest time that a turn of the driver loop claims shards.
TURN_S = 2.0  # Pause while another driver makes the plan or writes the index, in seconds.
# Variables in which batch systems name the task of an array, and the number of tasks.
ARRAYS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("SGE_TASK_ID", "SGE_TASK_LAST"),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    joins: bool = False  # Work beside other drivers.
    stays: bool = True  # Wait for the shards of others.
    works: bool = True  # Process shards; False only closes.
    start: float = 0.0  # First shard, as a fraction of the plan.


def sharing_of(run: RunSpec, *, join: bool, finish: bool) -> SharingPolicy:
    if run.executor == SLURM_ARRAY or run.array is not None:
        return SharingPolicy(joins=True, stays=join, works=not finish, start=_array_start(run))
    if join or finish:
        return SharingPolicy(joins=True, works=not finish, start=random.random())
    return SharingPolicy()


def _array_start(run: RunSpec) -> float:
    if run.array is not None:
        index, count = map(int, run.array.split("/"))
        return index % count / count
    for index_name, count_name in ARRAYS:
        with suppress(KeyError, ValueError, ZeroDivisionError):
            count = int(os.environ[count_name])
            return int(os.environ[index_name]) % count / count
    return random.random()


def opening(layout: Layout, sharing: SharingPolicy, *, shares: bool) -> DriverLock | None:
    """Return the lock of an output whose plan may be written; None for a driver that joins and
    finds a dataset."""
    if not sharing.joins:
        return DriverLock(layout, shares=shares)
    while read_dataset(layout) is None:
        with suppress(LockedError):
            return DriverLock(layout, shares=True, alone=False)
        time.sleep(TURN_S)
    return None


def claim_ahead(
    claims: BlockClaims,
    shards: Mapping[str, Shard],
    ledger: ShardLedger,
    *,
    ahead: int,
    stays: bool,
) -> None:
    """Claim shards until `ahead` are pending in the ledger; called at every turn of the driver
    loop. The ledger's `more_to_come` turns false when nothing is left to claim."""
    until = time.monotonic() + CLAIM_S
    while ledger.more_to_come and ledger.pending < ahead and time.monotonic() < until:
        found = claims.next()
        for name in found or ():
            if name in shards:
                ledger.add(shards[name])
        if not found:  # other members have the rest, or nothing is left
            ledger.more_to_come = found is not None and stays
            return
