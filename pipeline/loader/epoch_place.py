"""Where a stream stands in its epochs, in memory that its DataLoader's workers see as well.

Every iteration is an epoch, even one that was left early. An iteration that took at most one batch
was a look, and the next iteration repeats its epoch. A process that iterates a stream itself counts
what it hands out. Workers of a DataLoader read ahead, so each of their iterations is an epoch. They
agree on its number without waiting for each other:

    record of worker w = its latest iteration: epoch, start, skip, token
    token              = base seed of the DataLoader's workers + iterations of this worker before

A worker that finds its token in another worker's record takes the epoch of that record. Otherwise
it is the first: it takes the next epoch, writes its record, and then the common place. In this
order a worker that reads the new common place also finds the record.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Slots of the common place.
EPOCH, START, SKIP, DONE, TAKEN, BY_WORKERS = range(6)
N_SLOTS = 6
# A worker's record has epoch, start and skip in the same slots, and its token in the next one.
TOKEN = 3
MAX_WORKERS = 256
# Batches that a look takes.
LOOK = 1
MANY = 2
NO_TOKEN = 0
MASK = 2**62 - 1


class Begun(NamedTuple):
    """An iteration of a worker.

    Args:
        epoch: Number of the epoch.
        start: Where all ranks together stood when the epoch was shared out.
        skip: Rows of this rank's share that were handed out before.
        passed: Batches of this worker's share that it handed out before.
    """

    epoch: int
    start: int
    skip: int
    passed: int = 0


class EpochPlace:
    """A place in the epochs of a stream, shared by processes.

    Args:
        epoch: The first one.
    """

    def __init__(self, epoch: int) -> None:
        self._table = torch.zeros((1 + MAX_WORKERS, N_SLOTS), dtype=torch.int64).share_memory_()
        self._iterations = 0
        self._resumed: Begun | None = None
        self.set(epoch, 0, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration, or the next epoch if that iteration ended."""
        return int(self._slots[EPOCH])

    @property
    def start(self) -> int:
        """Where all ranks together stood when the epoch was shared out."""
        return int(self._slots[START])

    @property
    def skip(self) -> int:
        """Rows of this rank's share before the place to go on at."""
        return int(self._slots[SKIP])

    @property
    def done(self) -> int:
        """Rows of this rank's share that were handed out."""
        return int(self._slots[DONE])

    @property
    def is_begun(self) -> bool:
        """True if the epoch's iteration took more than one batch."""
        return int(self._slots[TAKEN]) > LOOK

    @property
    def is_by_workers(self) -> bool:
        """True if workers have read since the place was set: how much was used is not known."""
        return bool(self._slots[BY_WORKERS])

    def set(self, epoch: int, start: int, skip: int) -> None:
        """Go to a place, with nothing handed out after it."""
        self._table[1:, TOKEN] = NO_TOKEN
        values = {EPOCH: epoch, START: start, SKIP: skip, DONE: skip}
        self._slots.copy_(torch.tensor([values.get(slot, 0) for slot in range(N_SLOTS)]))

    def begin(self) -> int:
        """An iteration of this process begins; return the rows that it skips."""
        self._slots[DONE] = self._slots[SKIP]
        self._slots[TAKEN] = 0
        return self.skip

    def hand_out(self, done: int) -> None:
        """Count a batch that was handed out; `done` rows of the share were handed out in all."""
        self._slots[DONE] = done
        self._slots[TAKEN] += 1

    def resume(self, begun: Begun) -> None:
        """In a worker: continue this iteration when the next one begins."""
        self._resumed = begun

    def join(self, worker: int, seed: int, workers: int) -> Begun:
        """In a worker: begin an iteration, the same as the other workers do.

        Args:
            worker: Number of the worker.
            seed: Of the worker, `WorkerInfo.seed`.
            workers: Number of workers.
        """
        if workers > MAX_WORKERS:
            raise ValueError(f"expected at most {MAX_WORKERS} workers, got {workers}")
        token = ((seed - worker + self._iterations) & MASK) + 1
        self._iterations += 1
        begun, self._resumed = self._resumed or self._next(worker, workers, token), None
        mine = self._table[1 + worker]
        mine[: SKIP + 1] = torch.tensor(begun[: SKIP + 1])
        mine[TOKEN] = token
        values = {EPOCH: begun.epoch, START: begun.start, SKIP: begun.skip, DONE: begun.skip}
        for slot, value in (values | {BY_WORKERS: 1, TAKEN: MANY}).items():
            self._slots[slot] = value
        return begun

    def _next(self, worker: int, workers: int, token: int) -> Begun:
        """Return the iteration that another worker has begun, or the next epoch."""
        # Before the records: see the module.
        epoch, start, skip = self._slots[: SKIP + 1].tolist()
        is_begun = self.is_begun
        records = self._table[1 : 1 + workers, : TOKEN + 1].tolist()
        *mine, before = records[worker]
        for number, (*theirs, other) in enumerate(records):
            # Tokens repeat where a script seeds torch before each epoch; epochs do not.
            if other == token and number != worker and (before != token or theirs > mine):
                return Begun(*theirs)
        return Begun(epoch + 1, 0, 0) if is_begun else Begun(epoch, start, skip)

    @property
    def _slots(self) -> torch.Tensor:
        slots: torch.Tensor = self._table[0]
        return slots
