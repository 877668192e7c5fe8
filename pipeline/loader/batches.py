"""An epoch as a plan: which rows come in which batch, for all ranks, and the share of one.

A plan is three arrays and costs no reading. It is a function of (seed, epoch) and the settings, so
every rank and every worker makes the same one, and a place in it is a single number: resuming
slices. There are two ways to fill it: batches of so many rows (here), and batches of rows of
similar length under a budget (`loader.buckets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Even, Rows, Settings


@dataclass(frozen=True)
class Plan:
    """Rows in order, cut into batches.

    Args:
        rows: (n,) row numbers.
        passes: (n,) how often the set of each row was gone through before; the epoch where there is
            one set. It decides what is drawn for the row.
        offsets: (n_batches + 1,) batch b is `rows[offsets[b]:offsets[b + 1]]`.
    """

    rows: Rows
    passes: Rows
    offsets: Rows

    @property
    def n_batches(self) -> int:
        """How many there are."""
        return len(self.offsets) - 1

    def after(self, skip: int) -> Plan:
        """What is left after the first `skip` rows; the batch in which that falls is cut."""
        skip = min(skip, len(self.rows))
        whole = np.searchsorted(self.offsets, skip, side="right")
        offsets = np.concatenate([[skip], self.offsets[whole:]]) - skip
        return Plan(self.rows[skip:], self.passes[skip:], offsets)

    def batch(self, number: int) -> tuple[Rows, Rows]:
        """Rows and passes of a batch."""
        cut = slice(self.offsets[number], self.offsets[number + 1])
        return self.rows[cut], self.passes[cut]

    def padding_share(self, lengths: Rows) -> float:
        """The share of the padded length of all batches that is padding, from 0 to 1.

        Args:
            lengths: Of every row of the set.
        """
        if not len(self.rows):
            return 0.0
        held = lengths[self.rows]
        longest = np.maximum.reduceat(held, self.offsets[:-1])
        padded = float((longest * np.diff(self.offsets)).sum())
        return 1.0 - float(held.sum()) / padded if padded else 0.0


class Batching(Protocol):
    """How a sequence of rows becomes batches, and how these are shared out."""

    @property
    def settings(self) -> Settings:
        """Of the order."""

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> Plan:
        """The plan of all ranks, given rows in the order of shuffled blocks."""

    def share(self, plan: Plan, *, rank: int, world_size: int, even: Even, start: int) -> Plan:
        """What one rank reads, from where all ranks together stand (`start`) on."""

    def size(self, plan: Plan) -> int:
        """A plan in the unit of `start`."""

    def place(self, plan: Plan, row: int) -> dict[str, int]:
        """A place in a share, after so many of its rows, as numbers that a state holds."""

    def row(self, plan: Plan, state: Any) -> int:
        """The rows of a share that come before such a place; ValueError where there is none."""

    def start_after(self, plan: Plan, state: Any) -> int:
        """Where all ranks together stand when each is at this place of `plan`, that of all ranks;
        ValueError where they are not between whole steps."""

    def most_padded(self, frames: Mapping[str, Rows]) -> dict[str, int]:
        """Frames of a padded batch at most, by stream, given those of every row."""

    def identity(self) -> dict[str, Any]:
        """What must be equal for a place to mean the same row."""


@dataclass(frozen=True)
class FixedBatches:
    """Batches of so many rows; a place is counted in rows.

    Args:
        settings: Of the order.
    """

    settings: Settings

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> Plan:
        """See `Batching.whole`."""
        dealt = order.deal(len(rows), self.settings, seed=seed, epoch=epoch)
        return self._cut(rows[dealt], passes[dealt])

    def share(self, plan: Plan, *, rank: int, world_size: int, even: Even, start: int) -> Plan:
        """Ranks differ by one row at most; see `shuffle.rank_share`."""
        taken = order.rank_share(
            np.arange(len(plan.rows), dtype=np.int64),
            rank=rank,
            world_size=world_size,
            batch_rows=self.settings.batch_rows,
            even=even,
            start=start,
        )
        return self._cut(plan.rows[taken], plan.passes[taken])

    def size(self, plan: Plan) -> int:
        """Rows."""
        return len(plan.rows)

    def place(self, plan: Plan, row: int) -> dict[str, int]:
        """See `Batching.place`."""
        return {"position": row}

    def row(self, plan: Plan, state: Any) -> int:
        """See `Batching.row`."""
        return check_within("position", state["position"], len(plan.rows))

    def start_after(self, plan: Plan, state: Any) -> int:
        """See `Batching.start_after`."""
        batch_rows, position = self.settings.batch_rows, state["position"]
        world = state["world_size"]
        n_full = (len(plan.rows) - state["start"]) // (world * batch_rows)
        if position % batch_rows or position // batch_rows > n_full:
            raise ValueError(
                f"a state of world_size={world} taken after {position} rows does not end a whole "
                f"step of {batch_rows} rows per rank"
            )
        return int(state["start"] + position * world)

    def most_padded(self, frames: Mapping[str, Rows]) -> dict[str, int]:
        """See `Batching.most_padded`."""
        rows = self.settings.batch_rows
        return {name: rows * int(found.max(initial=0)) for name, found in frames.items()}

    def identity(self) -> dict[str, Any]:
        """See `Batching.identity`."""
        return {"batch_size": self.settings.batch_rows}

    def _cut(self, rows: Rows, passes: Rows) -> Plan:
        step, n_rows = self.settings.batch_rows, len(rows)
        begins = np.arange(0, n_rows, step, dtype=np.int64)
        return Plan(rows, passes, np.append(begins, np.int64(n_rows)))


def check_within(name: str, value: Any, limit: int) -> int:
    """A number of a state, refused outside of the epoch: rows would be left out in silence."""
    if not 0 <= order.check_whole(name, value) <= limit:
        raise ValueError(
            f"the state has {name}={value}, this stream has 0 to {limit}; take it from "
            "state_dict() unchanged"
        )
    return int(value)
