"""The plan of an epoch: which rows come in which batch, for all ranks and for one rank.

A plan is a function of (seed, epoch) and the settings, so every rank and every worker makes the
same plan without reading. Batches are `FixedBatches` of equal numbers of rows, or `BucketedBatches`
of rows of similar length under a budget of padded length. Rows are sorted by length inside each
window of the shuffle (see `loader.epoch_order`), in steps of a sixteenth of an octave. A batch ends
before rows times the longest row would exceed the budget. The batches of a window come in random
order, and reads stay inside windows.

    window      9 2 7 3 8 2 3 9   ->  9 9 | 8 7 | 3 3 2 2      budget 18
    batches     shuffled in the window, lanes in turn: batch t of lane 0, of lane 1, ...

The number of batches of an epoch depends on (seed, epoch). Ranks differ by one batch at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.crops import Cropper
from earmill.pipeline.loader.epoch_order import Even, Rows, Settings, unit
from earmill.pipeline.loader.rows import FeatureRows

BUCKET_SALT, TURN_SALT, PHASE_SALT = 3, 4, 6
STEPS_PER_OCTAVE = 16
# With fewer batches, a batch spans so many lengths that a fifth of it is padding.
BATCHES_PER_WINDOW = 8
MICROSECONDS = 1_000_000
MAX_SECONDS = 2**63 / MICROSECONDS


@dataclass(frozen=True)
class EpochPlan:
    """Rows in order, cut into batches: batch b is `rows[offsets[b]:offsets[b + 1]]`."""

    rows: Rows  # (n,) row numbers.
    passes: Rows  # (n,) earlier passes over the set of each row; the epoch if there is one set.
    offsets: Rows  # (n_batches + 1,)

    @property
    def n_batches(self) -> int:
        return len(self.offsets) - 1

    def after(self, skip: int) -> EpochPlan:
        """Return the plan without its first `skip` rows; a batch may be cut."""
        skip = min(skip, len(self.rows))
        whole = np.searchsorted(self.offsets, skip, side="right")
        offsets = np.concatenate([[skip], self.offsets[whole:]]) - skip
        return EpochPlan(self.rows[skip:], self.passes[skip:], offsets)

    def batch(self, number: int) -> tuple[Rows, Rows]:
        cut = slice(self.offsets[number], self.offsets[number + 1])
        return self.rows[cut], self.passes[cut]

    def padding_share(self, lengths: Rows) -> float:
        """Return the share of padding in the padded length of all batches, from 0 to 1."""
        if not len(self.rows):
            return 0.0
        held = lengths[self.rows]
        longest = np.maximum.reduceat(held, self.offsets[:-1])
        padded = float((longest * np.diff(self.offsets)).sum())
        return 1.0 - float(held.sum()) / padded if padded else 0.0


@dataclass(frozen=True)
class FixedBatches:
    """Batches of `settings.batch_rows` rows. Positions count rows."""

    settings: Settings

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> EpochPlan:
        """Return the plan of all ranks for rows in the order of shuffled blocks."""
        dealt = order.deal(len(rows), self.settings, seed=seed, epoch=epoch)
        return self._cut(rows[dealt], passes[dealt])

    def share(
        self, plan: EpochPlan, *, rank: int, world_size: int, even: Even, start: int
    ) -> EpochPlan:
        """Return the plan of one rank from `start` on; see `epoch_order.rank_share`."""
        taken = order.rank_share(
            np.arange(len(plan.rows), dtype=np.int64),
            rank=rank,
            world_size=world_size,
            batch_rows=self.settings.batch_rows,
            even=even,
            start=start,
        )
        return self._cut(plan.rows[taken], plan.passes[taken])

    def size(self, plan: EpochPlan) -> int:
        """Return the size of a plan in the unit of `start`."""
        return len(plan.rows)

    def place(self, plan: EpochPlan, row: int) -> dict[str, int]:
        """Return the position after `row` rows of a share, as numbers of a state."""
        return {"position": row}

    def row(self, plan: EpochPlan, state: Any) -> int:
        """Return the rows of a share before a position; ValueError if it is outside."""
        return check_within("position", state["position"], len(plan.rows))

    def start_after(self, plan: EpochPlan, state: Any) -> int:
        """Return the position of all ranks together when each rank is at `state`; ValueError if
        that is not between whole steps."""
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
        """Return the maximum frames of a padded batch by stream, given the frames of rows."""
        rows = self.settings.batch_rows
        return {name: rows * int(lengths.max(initial=0)) for name, lengths in frames.items()}

    def identity(self) -> dict[str, Any]:
        """Return the settings that must be equal for a position to mean the same row."""
        return {"batch_size": self.settings.batch_rows}

    def _cut(self, rows: Rows, passes: Rows) -> EpochPlan:
        step, n_rows = self.settings.batch_rows, len(rows)
        begins = np.arange(0, n_rows, step, dtype=np.int64)
        return EpochPlan(rows, passes, np.append(begins, np.int64(n_rows)))


def check_within(name: str, value: Any, limit: int) -> int:
    """Refuse a number of a state outside the epoch, which would skip rows silently."""
    if not 0 <= order.check_whole(name, value) <= limit:
        raise ValueError(
            f"the state has {name}={value}, this stream has 0 to {limit}; take it from "
            "state_dict() unchanged"
        )
    return int(value)


@dataclass(frozen=True, eq=False)
class BucketedBatches:
    """Batches of at most `budget` frames (or microseconds) when padded; positions count batches.
    `FixedBatches` describes the methods."""

    settings: Settings  # `batch_rows` is not used.
    lengths: Rows  # (rows of the set,) int64, from 1 to `budget`.
    budget: int  # Maximum of the rows of a batch times its longest row.
    max_rows: int | None  # Maximum rows of a batch.
    name: str  # Name of the setting that gave the budget.

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> EpochPlan:
        lengths = self.lengths[rows]
        if not len(rows):
            return EpochPlan(rows, passes, np.zeros(1, np.int64))
        if not self.settings.shuffle:
            return EpochPlan(rows, passes, self._cut_in_order(lengths))
        lanes = np.arange(self.settings.lanes, dtype=np.int64) * len(rows) // self.settings.lanes
        window = order.windows(np.unique(lanes), len(rows), self.settings.window_rows)
        phase = order.keys(1, seed=seed, epoch=epoch, salt=PHASE_SALT)
        # The step of an octave in which each length lies, exact on every machine. The epoch's phase
        # (0 to 1) shifts the steps, or the longest rows of a small set would share every batch.
        fraction, octave = np.frexp(lengths.astype(np.float64))
        within = ((fraction * 2 - 1) * STEPS_PER_OCTAVE + unit(phase)[0]).astype(np.int64)
        bucket = octave.astype(np.int64) * STEPS_PER_OCTAVE + within
        drawn = order.keys(len(rows), seed=seed, epoch=epoch, salt=BUCKET_SALT)
        by_length = np.lexsort((drawn, -bucket, window))
        group = np.stack([window[by_length], bucket[by_length]])
        offsets = self._cut_sorted(lengths[by_length], group)
        dealt = self._deal(offsets, window[by_length], np.unique(lanes), seed=seed, epoch=epoch)
        taken = by_length[order.expand(np.diff(offsets), dealt)]
        return EpochPlan(rows[taken], passes[taken], _offsets(np.diff(offsets)[dealt]))

    def share(
        self, plan: EpochPlan, *, rank: int, world_size: int, even: Even, start: int
    ) -> EpochPlan:
        """Return every `world_size`-th batch from batch number `start` on. With "pad" and None,
        batches from the front are repeated; "drop" leaves out batches at the end."""
        batches, sizes = np.arange(plan.n_batches, dtype=np.int64), np.diff(plan.offsets)
        mine = batches[start + rank :: world_size]
        if even is not False:
            mine = order.rank_share(
                batches, rank=rank, world_size=world_size, batch_rows=1, even=even, start=start
            )
        taken = order.expand(sizes, mine)
        return EpochPlan(plan.rows[taken], plan.passes[taken], _offsets(sizes[mine]))

    def size(self, plan: EpochPlan) -> int:
        return plan.n_batches

    def place(self, plan: EpochPlan, row: int) -> dict[str, int]:
        """Return the whole batches, and the rows of the next batch."""
        position = int(np.searchsorted(plan.offsets, row, side="right")) - 1
        position = min(position, plan.n_batches)
        return {"position": position, "within": row - int(plan.offsets[position])}

    def row(self, plan: EpochPlan, state: Any) -> int:
        position = check_within("position", state["position"], plan.n_batches)
        sizes = np.append(np.diff(plan.offsets), 0)
        within = check_within("within", state.get("within", 0), max(0, int(sizes[position]) - 1))
        return int(plan.offsets[position]) + within

    def start_after(self, plan: EpochPlan, state: Any) -> int:
        world, position = state["world_size"], state["position"]
        start = state["start"] + position * world
        if state.get("within", 0) or start > plan.n_batches:
            raise ValueError(
                f"a state of world_size={world} taken after {position} batches and "
                f"{state.get('within', 0)} rows does not end a whole step of a batch per rank"
            )
        return int(start)

    def most_padded(self, frames: Mapping[str, Rows]) -> dict[str, int]:
        return {
            name: math.ceil(self.budget * float((lengths / self.lengths).max(initial=0)))
            for name, lengths in frames.items()
        }

    def identity(self) -> dict[str, Any]:
        return {"batch_size": self.max_rows, self.name: self.budget, "lengths": self._digest}

    @cached_property
    def _digest(self) -> str:
        """A hash of the lengths: the streams that are read decide them, and they the batches."""
        return hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:16]

    def _cut_sorted(self, lengths: Rows, group: np.ndarray) -> Rows:
        """Return the offsets of batches of rows that are sorted by window and falling bucket. The
        longest row of the first row's bucket limits a batch."""
        first = np.flatnonzero(np.append(True, (np.diff(group) != 0).any(axis=0)))
        longest = np.repeat(
            np.maximum.reduceat(lengths, first), np.diff(np.append(first, len(lengths)))
        )
        fits = self.budget // longest
        if self.max_rows is not None:
            fits = np.minimum(fits, self.max_rows)
        counts = np.diff(np.append(np.flatnonzero(np.diff(group[0], prepend=-1)), len(lengths)))
        ends = np.repeat(np.cumsum(counts), counts).tolist()
        offsets, at, n_fits = [0], 0, fits.tolist()
        while at < len(lengths):
            at = min(at + n_fits[at], ends[at])
            offsets.append(at)
        return np.array(offsets, np.int64)

    def _cut_in_order(self, lengths: Rows) -> Rows:
        offsets, begin, longest = [0], 0, 0
        most = len(lengths) if self.max_rows is None else self.max_rows
        for at, length in enumerate(lengths.tolist()):
            longest = max(longest, length)
            if at > begin and (longest * (at + 1 - begin) > self.budget or at - begin == most):
                offsets.append(at)
                begin, longest = at, length
        return np.array([*offsets, len(lengths)], np.int64)

    def _deal(
        self, offsets: Rows, window: Rows, lane_first: Rows, *, seed: int, epoch: int
    ) -> Rows:
        """Return batch numbers in the order of the epoch."""
        begin = offsets[:-1]
        drawn = order.keys(len(begin), seed=seed, epoch=epoch, salt=TURN_SALT)
        lane = np.searchsorted(lane_first, begin, side="right") - 1
        shuffled = np.lexsort((drawn, window[begin]))  # ascending windows: lanes stay together
        counts = np.bincount(lane, minlength=len(lane_first))
        turn = np.arange(len(begin)) - np.repeat(np.cumsum(counts) - counts, counts)
        return shuffled[np.lexsort((lane, turn))]


Batching = FixedBatches | BucketedBatches


def bucketed(
    settings: Settings,
    features: FeatureRows,
    cropper: Cropper | None,
    *,
    batch_frames: int | None,
    batch_seconds: float | None,
    max_rows: int | None,
    lanes_chosen: bool,
) -> BucketedBatches:
    """Return batches under one of the two budgets, checked against the rows. With `lanes_chosen`,
    windows with too few batches are joined."""
    if batch_frames is not None and batch_seconds is not None:
        raise ValueError("expected one budget, got batch_frames and batch_seconds; drop one")
    given: Any = batch_seconds if batch_frames is None else batch_frames
    if batch_frames is not None:
        name, unit = "batch_frames", "frames"
        budget = order.check_whole(name, batch_frames)
        lengths: Rows = np.stack([*frames_of(features, cropper).values()]).max(axis=0)
    else:
        name, unit = "batch_seconds", "microseconds"
        if not 0 < order.check_number(name, given, "a number of seconds") < MAX_SECONDS:
            raise ValueError(f"batch_seconds must be above 0, got {given!r}")
        budget = math.floor(float(given) * MICROSECONDS)
        seconds = np.asarray(features.table.column("seconds").to_numpy())
        if cropper is not None:
            seconds = np.minimum(seconds, cropper.seconds)
        lengths = np.maximum(np.ceil(seconds * MICROSECONDS), 1).astype(np.int64)
    if budget < 1:
        raise ValueError(f"{name} must be at least 1, got {given!r}")
    longest = int(lengths.argmax()) if len(lengths) else 0
    if len(lengths) and lengths[longest] > budget:
        raise ValueError(
            f"row {longest} alone has {lengths[longest]} {unit}, more than {name} allows "
            f"({budget}); raise it, or cut rows with crop=Crop(seconds)"
        )
    if lanes_chosen and len(lengths):
        settings = _fewer_lanes(settings, BATCHES_PER_WINDOW * budget / float(lengths.mean()))
    return BucketedBatches(settings, lengths, budget, max_rows, name)


def _fewer_lanes(settings: Settings, wanted_rows: float) -> Settings:
    """Halve the lanes and double the windows until windows hold the wanted rows."""
    while settings.lanes > 1 and settings.window_rows < wanted_rows:
        lanes = settings.lanes // 2
        wider = settings.window_rows * settings.lanes // lanes
        settings = replace(settings, lanes=lanes, window_rows=wider)
    return settings


def frames_of(features: FeatureRows, cropper: Cropper | None) -> dict[str, Rows]:
    """Return the frames of every row as read (cropped), by stream; at least 1."""
    by_stream = {}
    for name, info in features.streams.items():
        column = features.table.column(layout_of(info).length_column)
        frames = np.maximum(np.asarray(column.to_numpy()), 1)
        if cropper is not None and info.frame_rate_hz:
            frames = np.minimum(frames, cropper.most_frames_at(info.frame_rate_hz))
        by_stream[name] = frames
    return by_stream


def _offsets(sizes: Rows) -> Rows:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
