"""Sharing of an output by several drivers: opening, claims on shards, closing. A driver that joins
holds the lock only to make the plan and to write the index, and works on shards it has claimed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from earmill.pipeline.common.errors import LockedError
from earmill.pipeline.dataset.description import DatasetFile, check_same, read_dataset
from earmill.pipeline.dataset.driver_lock import (
    UNFENCED,
    BlockClaims,
    DriverLock,
    Fence,
    clear_claims,
)
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.revision import restate_licenses
from earmill.pipeline.dataset.snapshot import Attempt, is_closed
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


@contextmanager
def opening(layout: Layout, sharing: SharingPolicy, *, shares: bool) -> Iterator[DriverLock | None]:
    """Hold the lock while the plan may be written; None for a driver that joins and finds one."""
    if not sharing.joins:
        with DriverLock(layout, shares=shares) as lock:
            yield lock
        return
    while read_dataset(layout) is None:
        try:
            lock = DriverLock(layout, shares=True, alone=False)
        except LockedError:
            time.sleep(TURN_S)
            continue
        with lock:
            yield lock
        return
    yield None


def close(
    layout: Layout,
    sharing: SharingPolicy,
    commits: Mapping[str, Attempt],
    *,
    anew: bool,
    licenses: Mapping[str, Mapping[str, str]],
    dataset: DatasetFile,
    fence: Fence = UNFENCED,
) -> None:
    """Write index and cards of a complete dataset, whose `commits` are of all shards, unless
    another driver does; `anew` if a shard was committed since the index was read."""
    if not sharing.joins:
        if anew or not is_closed(layout, commits):
            finalise(layout, fence=fence)
        restate_licenses(layout, licenses, fence)
    while sharing.joins and not is_closed(layout, commits):
        # Commits of another revision will never be closed by waiting.
        fence.check(layout)
        check_same(layout, dataset)
        try:
            lock = DriverLock(layout, shares=True, alone=False)
        except LockedError:
            if not sharing.stays:
                return
            time.sleep(TURN_S)
            continue
        # Another driver may have closed the dataset in the meantime.
        with lock, suppress(LockedError):
            check_same(layout, dataset)
            if not is_closed(layout, commits):
                finalise(layout, fence=lock.fence)
                restate_licenses(layout, licenses, lock.fence)
            break
    fence.check(layout)
    # Another driver that closed the dataset may have been killed before it cleared the claims.
    clear_claims(layout)


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
