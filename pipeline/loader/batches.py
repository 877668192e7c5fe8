"""An epoch as a plan: which rows come in which batch, for all ranks, and the share of one.

A plan is three arrays and costs no reading. It is a function of (seed, epoch) and the settings, so
every rank and every worker makes the same one, and a place in it is a single number: resuming
slices. There are two ways to fill it.

`FixedBatches`: batches of the same number of rows.

`BucketedBatches`: batches of rows of similar length under a budget of padded length, for little
padding and even memory. Inside each window of the shuffle (see `loader.epoch_order`) rows are
sorted by length in steps of a sixteenth of an octave, in random order within a step. They are cut
where rows times the longest would pass the budget, and the batches of a window come in random
order. So reading stays inside windows. Neither the rows that meet in a batch nor the order of
batches repeat from epoch to epoch.

    window      9 2 7 3 8 2 3 9   ->  9 9 | 8 7 | 3 3 2 2      budget 18
    batches     shuffled in the window, lanes in turn: batch t of lane 0, of lane 1, ...

Batch g goes to rank g % world and there to worker (g // world) % workers. How many batches an
epoch has depends on (seed, epoch): ranks differ by one batch at most, by none with `even`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Even, Rows, Settings, unit

if TYPE_CHECKING:
    from earmill.pipeline.loader.crops import Cropper
    from earmill.pipeline.loader.rows import FeatureRows

BUCKET_SALT, TURN_SALT, PHASE_SALT = 3, 4, 6
STEPS_PER_OCTAVE = 16
# With fewer, a batch spans so much of the lengths that a fifth of it is padding.
BATCHES_PER_WINDOW = 8
MICROSECONDS = 1_000_000
MAX_SECONDS = 2**63 / MICROSECONDS


@dataclass(frozen=True)
class EpochPlan:
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

    def after(self, skip: int) -> EpochPlan:
        """What is left after the first `skip` rows; the batch in which that falls is cut."""
        skip = min(skip, len(self.rows))
        whole = np.searchsorted(self.offsets, skip, side="right")
        offsets = np.concatenate([[skip], self.offsets[whole:]]) - skip
        return EpochPlan(self.rows[skip:], self.passes[skip:], offsets)

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

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> EpochPlan:
        """The plan of all ranks, given rows in the order of shuffled blocks."""

    def share(
        self, plan: EpochPlan, *, rank: int, world_size: int, even: Even, start: int
    ) -> EpochPlan:
        """What one rank reads, from where all ranks together stand (`start`) on."""

    def size(self, plan: EpochPlan) -> int:
        """A plan in the unit of `start`."""

    def place(self, plan: EpochPlan, row: int) -> dict[str, int]:
        """A place in a share, after so many of its rows, as numbers that a state holds."""

    def row(self, plan: EpochPlan, state: Any) -> int:
        """The rows of a share that come before such a place; ValueError where there is none."""

    def start_after(self, plan: EpochPlan, state: Any) -> int:
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

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> EpochPlan:
        """See `Batching.whole`."""
        dealt = order.deal(len(rows), self.settings, seed=seed, epoch=epoch)
        return self._cut(rows[dealt], passes[dealt])

    def share(
        self, plan: EpochPlan, *, rank: int, world_size: int, even: Even, start: int
    ) -> EpochPlan:
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

    def size(self, plan: EpochPlan) -> int:
        """Rows."""
        return len(plan.rows)

    def place(self, plan: EpochPlan, row: int) -> dict[str, int]:
        """See `Batching.place`."""
        return {"position": row}

    def row(self, plan: EpochPlan, state: Any) -> int:
        """See `Batching.row`."""
        return check_within("position", state["position"], len(plan.rows))

    def start_after(self, plan: EpochPlan, state: Any) -> int:
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

    def _cut(self, rows: Rows, passes: Rows) -> EpochPlan:
        step, n_rows = self.settings.batch_rows, len(rows)
        begins = np.arange(0, n_rows, step, dtype=np.int64)
        return EpochPlan(rows, passes, np.append(begins, np.int64(n_rows)))


def check_within(name: str, value: Any, limit: int) -> int:
    """A number of a state, refused outside of the epoch: rows would be left out in silence."""
    if not 0 <= order.check_whole(name, value) <= limit:
        raise ValueError(
            f"the state has {name}={value}, this stream has 0 to {limit}; take it from "
            "state_dict() unchanged"
        )
    return int(value)


@dataclass(frozen=True, eq=False)
class BucketedBatches:
    """Batches of at most `budget` frames (or microseconds) when padded; places count batches.

    Args:
        settings: Of the order; `batch_rows` is not used.
        lengths: (rows of the set,) int64, at least 1 and at most `budget`.
        budget: Rows of a batch times its longest, at most.
        max_rows: Rows of a batch, at most.
        name: The setting that gave the budget.
    """

    settings: Settings
    lengths: Rows
    budget: int
    max_rows: int | None
    name: str

    def whole(self, rows: Rows, passes: Rows, *, seed: int, epoch: int) -> EpochPlan:
        """See `Batching.whole`."""
        lengths = self.lengths[rows]
        if not len(rows):
            return EpochPlan(rows, passes, np.zeros(1, np.int64))
        if not self.settings.shuffle:
            return EpochPlan(rows, passes, self._cut_in_order(lengths))
        lanes = np.arange(self.settings.lanes, dtype=np.int64) * len(rows) // self.settings.lanes
        window = order.windows(np.unique(lanes), len(rows), self.settings.window_rows)
        phase = order.keys(1, seed=seed, epoch=epoch, salt=PHASE_SALT)
        bucket = _buckets(lengths, unit(phase)[0])
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
        """Every `world_size`-th batch from batch number `start` on.

        With `even` every rank gets the same number: by batches from the front once more ("pad",
        None), or by leaving out the last ones ("drop"), at most `world_size - 1` of either.
        """
        order.check_split(rank, world_size)
        batches = np.arange(start, plan.n_batches, dtype=np.int64)
        excess = len(batches) % world_size
        if excess and even == "drop":
            batches = batches[: len(batches) - excess]
        elif excess and order.check_even(even) is not False:
            more = np.resize(np.arange(plan.n_batches, dtype=np.int64), world_size - excess)
            batches = np.concatenate([batches, more])
        mine = batches[rank::world_size]
        sizes = np.diff(plan.offsets)
        taken = order.expand(sizes, mine)
        return EpochPlan(plan.rows[taken], plan.passes[taken], _offsets(sizes[mine]))

    def size(self, plan: EpochPlan) -> int:
        """Batches."""
        return plan.n_batches

    def place(self, plan: EpochPlan, row: int) -> dict[str, int]:
        """Whole batches, and rows of the one after them."""
        position = int(np.searchsorted(plan.offsets, row, side="right")) - 1
        position = min(position, plan.n_batches)
        return {"position": position, "within": row - int(plan.offsets[position])}

    def row(self, plan: EpochPlan, state: Any) -> int:
        """See `Batching.row`."""
        position = check_within("position", state["position"], plan.n_batches)
        sizes = np.append(np.diff(plan.offsets), 0)
        within = check_within("within", state.get("within", 0), max(0, int(sizes[position]) - 1))
        return int(plan.offsets[position]) + within

    def start_after(self, plan: EpochPlan, state: Any) -> int:
        """See `Batching.start_after`."""
        world, position = state["world_size"], state["position"]
        start = state["start"] + position * world
        if state.get("within", 0) or start > plan.n_batches:
            raise ValueError(
                f"a state of world_size={world} taken after {position} batches and "
                f"{state.get('within', 0)} rows does not end a whole step of a batch per rank"
            )
        return int(start)

    def most_padded(self, frames: Mapping[str, Rows]) -> dict[str, int]:
        """See `Batching.most_padded`: the budget, in frames of each stream."""
        return {
            name: math.ceil(self.budget * float((found / self.lengths).max(initial=0)))
            for name, found in frames.items()
        }

    def identity(self) -> dict[str, Any]:
        """See `Batching.identity`."""
        return {"batch_size": self.max_rows, self.name: self.budget}

    def _cut_sorted(self, lengths: Rows, group: np.ndarray) -> Rows:
        """Offsets of batches of rows that are sorted by window and falling bucket.

        A batch holds as many rows as the longest of its first row's bucket allows: none of those
        that follow in the window is longer.
        """
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
        """Offsets of batches of neighbours."""
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
        """Batch numbers in the order in which they come."""
        begin = offsets[:-1]
        drawn = order.keys(len(begin), seed=seed, epoch=epoch, salt=TURN_SALT)
        lane = np.searchsorted(lane_first, begin, side="right") - 1
        shuffled = np.lexsort((drawn, window[begin]))  # ascending windows: lanes stay together
        counts = np.bincount(lane, minlength=len(lane_first))
        turn = np.arange(len(begin)) - np.repeat(np.cumsum(counts) - counts, counts)
        return shuffled[np.lexsort((lane, turn))]


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
    """Batches under one of the two budgets, checked against the rows.

    Args:
        lanes_chosen: The lanes of `settings` are ours to change: fewer of them, with larger
            windows, where a window would hold too few batches for rows of similar length to meet.

    Raises:
        TypeError, ValueError: Both budgets, one that is no number above 0, or a row that alone is
            longer than it.
    """
    if batch_frames is not None and batch_seconds is not None:
        raise ValueError("expected one budget, got batch_frames and batch_seconds; drop one")
    if batch_frames is not None:
        name, unit, budget = (
            "batch_frames",
            "frames",
            order.check_whole("batch_frames", batch_frames),
        )
        lengths = _frames(features, cropper)
    else:
        name, unit = "batch_seconds", "microseconds"
        if isinstance(batch_seconds, bool) or not isinstance(batch_seconds, numbers.Real):
            raise TypeError(f"batch_seconds must be a number of seconds, got {batch_seconds!r}")
        if not 0 < batch_seconds < MAX_SECONDS:
            raise ValueError(f"batch_seconds must be above 0, got {batch_seconds!r}")
        budget = math.floor(float(batch_seconds) * MICROSECONDS)
        lengths = _microseconds(features, cropper)
    if budget < 1:
        given = batch_seconds if batch_frames is None else batch_frames
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
    """Half the lanes and twice the window as long as windows hold fewer rows."""
    while settings.lanes > 1 and settings.window_rows < wanted_rows:
        lanes = settings.lanes // 2
        wider = settings.window_rows * settings.lanes // lanes
        settings = replace(settings, lanes=lanes, window_rows=wider)
    return settings


def frames_of(features: FeatureRows, cropper: Cropper | None) -> dict[str, Rows]:
    """Frames of every row as they are read, by stream; at least 1."""
    found = {}
    for name, info in features.streams.items():
        column = features.table.column(layout_of(info).length_column)
        frames = np.maximum(np.asarray(column.to_numpy()), 1)
        if cropper is not None and info.frame_rate_hz:
            frames = np.minimum(frames, cropper.most_frames_at(info.frame_rate_hz))
        found[name] = frames
    return found


def _frames(features: FeatureRows, cropper: Cropper | None) -> Rows:
    found = frames_of(features, cropper).values()
    longest: Rows = np.stack(list(found)).max(axis=0)
    return longest


def _microseconds(features: FeatureRows, cropper: Cropper | None) -> Rows:
    seconds = np.asarray(features.table.column("seconds").to_numpy())
    if cropper is not None:
        seconds = np.minimum(seconds, cropper.seconds)
    rounded: Rows = np.maximum(np.ceil(seconds * MICROSECONDS), 1).astype(np.int64)
    return rounded


def _buckets(lengths: Rows, phase: float) -> Rows:
    """Number of the step of an octave in which a length lies; exact on every machine.

    The steps lie elsewhere in each epoch (phase, 0 to 1), or the longest rows of a small set would
    always meet each other.
    """
    fraction, octave = np.frexp(lengths.astype(np.float64))
    within = (fraction * 2 - 1) * STEPS_PER_OCTAVE + phase
    return octave.astype(np.int64) * STEPS_PER_OCTAVE + within.astype(np.int64)


def _offsets(sizes: Rows) -> Rows:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
