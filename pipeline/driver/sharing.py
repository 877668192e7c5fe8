"""How drivers share an output: who opens it, who does which shards, who closes it.

A driver alone holds the lock to its end; one that joins holds it only to make the plan where there
is none yet, and to write the index at the end. Both do shards that they have claimed, so each of
several drivers goes on with what one that was preempted had.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from earmill.pipeline.common.errors import LockedError
from earmill.pipeline.dataset.crew import Claims, clear_claims, start_of
from earmill.pipeline.dataset.description import DatasetFile, check_same, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.lease import UNFENCED, DriverLock, Fence
from earmill.pipeline.dataset.revision import restate_licenses
from earmill.pipeline.dataset.snapshot import Attempt, is_closed
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.spec.job import SLURM_ARRAY, RunSpec
from earmill.pipeline.storage.layout import Layout

POLL_S = 0.5
# Another driver that makes the plan, or writes the index, is waited for.
TURN_S = 2.0
# Where a batch system says which task of an array this is, and of how many.
ARRAYS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("SGE_TASK_ID", "SGE_TASK_LAST"),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """How one driver goes about an output.

    Args:
        joins: Others may be at work, and are not disturbed. stays: Until all is done, also what
            others have; else until there is nothing left to claim.
        works: Does shards; else it only closes what is complete.
        start: Where in the plan to begin, as a fraction; None draws one.
    """

    joins: bool = False
    stays: bool = True
    works: bool = True
    start: float | None = 0.0


def sharing_of(run: RunSpec, *, join: bool, finish: bool) -> SharingPolicy:
    """What the job and the caller say of it."""
    if run.executor == SLURM_ARRAY or run.array is not None:
        return SharingPolicy(joins=True, stays=join, works=not finish, start=_array_start(run))
    if join or finish:
        return SharingPolicy(joins=True, works=not finish, start=None)
    return SharingPolicy()


def _array_start(run: RunSpec) -> float | None:
    if run.array is not None:
        index, count = map(int, run.array.split("/"))
        return index % count / count
    for index_name, count_name in ARRAYS:
        with suppress(KeyError, ValueError, ZeroDivisionError):
            count = int(os.environ[count_name])
            return int(os.environ[index_name]) % count / count
    return None


@contextmanager
def opening(layout: Layout, sharing: SharingPolicy, *, shares: bool) -> Iterator[DriverLock | None]:
    """The lock of whoever may write the plan; None for one that joins where there is one.

    Args:
        shares: Whether others may join.
    Raises:
        LockedError: Another driver is at work, and this one does not join it.
    """
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
    """Write index and cards of a dataset that is complete, unless another driver does.

    Args:
        anew: Something was committed since it was looked at.
        licenses: As the job states them now.
        dataset: The description that the commits are of.
        fence: The run's right to write here.
    Raises:
        OvertakenError: Another command has taken the output over, or changed the dataset.
    """
    if not sharing.joins:
        if anew or not is_closed(layout, commits):
            finalise(layout, fence=fence)
        restate_licenses(layout, licenses, fence)
        fence.check(layout)
        # Also where somebody closed it: he may have been killed before he came to that, and who
        # has not heard of the end goes on claiming.
        clear_claims(layout)
        return
    while not is_closed(layout, commits):
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
        # Closed by another in the middle of it: looked at again.
        with lock, suppress(LockedError):
            check_same(layout, dataset)
            if not is_closed(layout, commits):
                finalise(layout, fence=lock.fence)
                restate_licenses(layout, licenses, lock.fence)
            break
    fence.check(layout)
    clear_claims(layout)


class ShardClaims:
    """Shards for a ledger, claimed ahead in a thread, because a store takes its time.

    Args:
        claims: Who does what. shards: Those without a commit, by id.
        ahead: Shards that wait in the ledger and here, each.
        stays: Wait for what others have.
    """

    def __init__(
        self, claims: Claims, shards: Mapping[str, Shard], *, ahead: int, stays: bool
    ) -> None:
        self._claims, self._shards, self._stays = claims, shards, stays
        self._ahead = ahead
        self._claimed: deque[str] = deque()
        self._error: Exception | None = None
        self._ended, self._over = threading.Event(), threading.Event()
        self._taken = threading.Condition()
        self._thread = threading.Thread(target=self._claim, name="claims", daemon=True)

    def __enter__(self) -> ShardClaims:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        with self._taken:
            self._taken.notify_all()
        self._thread.join()

    def feed(self, ledger: ShardLedger) -> None:
        """Give the ledger what it has room for.

        Raises:
            StorageError: Claims cannot be read or written.
        """
        over = self._over.is_set()
        if self._error is not None:
            raise self._error
        with self._taken:
            while self._claimed and ledger.pending < self._ahead:
                ledger.add(self._shards[self._claimed.popleft()])
            self._taken.notify_all()
        ledger.more_to_come = bool(self._claimed) or not over

    def widen(self, ahead: int) -> None:
        """Claim so many ahead from now on: workers have come."""
        self._ahead = max(self._ahead, ahead)

    @property
    def left_to_others(self) -> int:
        """Shards that others have."""
        return self._claims.others

    def _claim(self) -> None:
        try:
            while not self._ended.is_set():
                with self._taken:
                    full = len(self._claimed) >= self._ahead
                    if full:
                        self._taken.wait(POLL_S)
                        continue
                found = self._claims.next()
                if found is None or not (found or self._stays):
                    return
                with self._taken:
                    self._claimed.extend(name for name in found if name in self._shards)
                if not found:
                    self._ended.wait(POLL_S)
        except Exception as error:  # told by the driver's thread
            self._error = error
        finally:
            self._over.set()


def claims_of(
    layout: Layout,
    plan_id: str,
    shards: list[str],
    done: set[str],
    *,
    run_id: str,
    sharing: SharingPolicy,
    fence: Fence,
) -> Claims:
    """One driver's claims, beginning where it should."""
    start = start_of(run_id) if sharing.start is None else sharing.start
    return Claims(layout, plan_id, shards, done, run_id=run_id, start=start, fence=fence)
