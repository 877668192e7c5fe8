"""Torch datasets over a feature set: by index, and as a shuffled stream for ranks and workers.

Each iteration reads the next epoch, whose order is a function of (seed, epoch) and the settings. A
state is a few plain numbers: the epoch, a place in it, and the settings that must be equal for the
place to mean the same row. Resuming slices the order and reads nothing. Behind a bare DataLoader
with workers the stream refuses to give its state, because workers read ahead. Inside a worker, the
state is what that worker has handed out, which torchdata's StatefulDataLoader saves.

`EpochPlace` keeps the place of the stream in memory that the DataLoader's workers share. An
iteration that took at most one batch is a look, and the next iteration repeats its epoch. Workers
read ahead, so each of their iterations is an epoch. They agree on its number without waiting for
each other:

    record of worker w = its latest iteration: epoch, start, skip, token
    token              = base seed of the DataLoader's workers + earlier iterations of this worker

A worker that finds its token in the record of another worker takes the epoch of that record. If it
finds none, it is the first: it takes the next epoch, writes its record, and then the common place.
Because of this order, a worker that reads the new common place also finds the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from earmill.pipeline.common.machine import cores
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader import ranks
from earmill.pipeline.loader.batches import (
    Batching,
    EpochPlan,
    FixedBatches,
    bucketed,
    check_within,
    frames_of,
)
from earmill.pipeline.loader.collate import as_tensor, collate_padded, is_sparse, takes_views
from earmill.pipeline.loader.crops import Crop, Cropper
from earmill.pipeline.loader.rows import FeatureRows, Row, Span
from earmill.pipeline.loader.statistics import Normaliser, Of

WINDOW_BYTES = 128 * 2**20
AHEAD_BATCHES = 4  # Batches whose rows are named to the set before they are read.
SPARE_BYTES = 4 * 2**20  # For lengths, and for frames that `multiple_of` adds.
STATE_VERSION = 2  # Version 2 draws the order by Philox.
_PLACE = ("epoch", "start", "position", "world_size")
# Settings that older states lack.
_LATER = ("batch_frames", "batch_seconds", "crop", "mixture")
# Columns of the common place, see `Place`.
EPOCH, START, SKIP, DONE, TAKEN, BY_WORKERS = range(6)
# Column of the token in a worker's record; epoch, start and skip are as in the common place.
TOKEN = 3
MAX_WORKERS = 256
LOOK = 1  # Maximum batches of an iteration that is a look.
MANY = 2
NO_TOKEN = 0
MASK = 2**62 - 1


def check_label(features: FeatureRows, label: str | None) -> str | None:
    columns = [each for each in features.table.column_names if each.startswith(EXTRA_PREFIX)]
    names = [each.removeprefix(EXTRA_PREFIX) for each in columns]
    if label is not None and label not in names:
        raise ValueError(f"expected a label out of the source's columns {names}, got {label!r}")
    return label


def tensor_row(row: Row) -> Row:
    return row.map(lambda features: features if is_sparse(features) else as_tensor(features))


def labelled(row: Row, label: str | None) -> Row:
    """Return the row with a column of the source as its label; refuse a row without one."""
    if label is None:
        return row
    value = row.extra.get(label)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(
            f"expected a label of every row, got none in column {label!r} of row {row.row_id!r}; "
            "leave such rows out of the job, or read the column from batch.extra"
        )
    return replace(row, label=value)


class FeatureDataset(Dataset["Row"]):
    """Rows by index, as tensors; give a DataLoader one of the collates as its `collate_fn`.

    Args:
        features: An opened feature set.
        label: Column of the source that becomes `label` of each row and batch.
    """

    def __init__(self, features: FeatureRows, *, label: str | None = None) -> None:
        self.features, self.label = features, check_label(features, label)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return labelled(tensor_row(self.features[index]), self.label)

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return rows, read in index order so that rows of one row group are read together."""
        by_index = {i: self[i] for i in sorted(set(indices))}
        return [by_index[i] for i in indices]


class Begun(NamedTuple):
    epoch: int
    start: int  # Position of all ranks together when the epoch was shared out.
    skip: int  # Rows of this rank's share that were handed out before.
    passed: int = 0  # Batches of this worker's share that it handed out before.


class Place(NamedTuple):
    epoch: int  # The epoch of the last iteration, or the next epoch if that iteration ended.
    start: int  # Position of all ranks together when the epoch was shared out.
    skip: int  # Rows of this rank's share before the resume point.
    done: int  # Rows of this rank's share that were handed out.
    taken: int  # Batches that the iteration took.
    # 1 if workers have read since the place was set, so the count is not known.
    by_workers: int

    @property
    def is_begun(self) -> bool:
        return self.taken > LOOK


class EpochPlace:
    """The place of a stream in its epochs, shared by processes; see the module."""

    def __init__(self, epoch: int) -> None:
        self._table = torch.zeros((1 + MAX_WORKERS, 6), dtype=torch.int64).share_memory_()
        self._iterations = 0
        # In a worker: the iteration that continues when the next one begins.
        self.resumed: Begun | None = None
        self.set(epoch, 0, 0)

    def now(self) -> Place:
        return Place(*self._table[0].tolist())

    def set(self, epoch: int, start: int, skip: int) -> None:
        self._table[1:, TOKEN] = NO_TOKEN
        self._table[0] = torch.tensor(Place(epoch, start, skip, done=skip, taken=0, by_workers=0))

    def begin(self) -> Place:
        self._table[0, DONE] = self._table[0, SKIP]
        self._table[0, TAKEN] = 0
        return self.now()

    def hand_out(self, done: int) -> None:
        """Count a batch that is handed out; `done` rows of the share were handed out in all."""
        self._table[0, DONE] = done
        self._table[0, TAKEN] += 1

    def join(self, worker: int, seed: int, workers: int) -> Begun:
        """In a worker: begin the iteration of the other workers; `seed` is `WorkerInfo.seed`."""
        if workers > MAX_WORKERS:
            raise ValueError(f"expected at most {MAX_WORKERS} workers, got {workers}")
        token = ((seed - worker + self._iterations) & MASK) + 1
        self._iterations += 1
        begun, self.resumed = self.resumed or self._next(worker, workers, token), None
        record = self._table[1 + worker]
        record[: SKIP + 1] = torch.tensor(begun[: SKIP + 1])
        record[TOKEN] = token
        # After the record, and one column after the other: see the module.
        place = {EPOCH: begun.epoch, START: begun.start, SKIP: begun.skip, DONE: begun.skip}
        for column, value in (place | {BY_WORKERS: 1, TAKEN: MANY}).items():
            self._table[0, column] = value
        return begun

    def _next(self, worker: int, workers: int, token: int) -> Begun:
        """Return the iteration that another worker has begun, or the next epoch."""
        # The place is read before the records: see the module.
        place = self.now()
        records = self._table[1 : 1 + workers, : TOKEN + 1].tolist()
        *mine, before = records[worker]
        for number, (*theirs, other) in enumerate(records):
            # A script may seed torch before each epoch, so tokens may repeat; epochs do not.
            if other == token and number != worker and (before != token or theirs > mine):
                return Begun(*theirs)
        return Begun(place.epoch + 1, 0, 0) if place.is_begun else Begun(*place[: SKIP + 1])


class FeatureStream(IterableDataset[Any]):
    """Rows or batches of one rank in epoch order; ranks and workers together read each row once.

    Each iteration is an epoch, and the next iteration begins the next epoch. An iteration that took
    at most one row or batch is a look, and the next iteration repeats its epoch. `set_epoch` goes
    to the start of any epoch. After `load_state_dict`, the next iteration continues in its epoch.

    Args:
        features: An opened feature set, or several: end to end, or mixed by weight (`mix`).
        shuffle: False gives index order.
        seed: The same on all ranks.
        epoch: The first epoch.
        rank: This process, from 0 to `world_size - 1`. None takes the rank of torch.distributed if
            it is initialised, else that of torchrun, mpirun or srun in the environment.
        world_size: Number of processes that share an epoch. Given together with `rank`.
        distributed: False asks neither torch.distributed nor the environment: this process reads
            all rows, or the given share of a group of its own.
        batch_size: Rows of a batch; the maximum with a budget. Iterating gives batches if this or a
            budget is set, else rows.
        batch_frames: Budget: the maximum of rows of a batch times frames of its longest row, in the
            stream with most frames. Rows of similar length share a batch (`BucketedBatches`).
        batch_seconds: The same budget in seconds.
        collate_fn: Makes a batch from a list of rows; `earmill.collate` pads.
        label: Column of the source that becomes `label` of each row and batch.
        crop: Span of each clip to read; None for whole clips.
        normalise: True scales frames to mean 0 and variance 1 by the statistics of the set. A
            mapping gives the statistics of each stream to normalise. Padding is added afterwards.
        even: False: ranks differ by at most one row (with a budget, one batch). True or "pad":
            every rank gets the same number, with up to `world_size - 1` rows (batches) repeated.
            "drop": the same number, with up to `world_size - 1` left out of this epoch. None is
            False if rank and world size are given. If they are looked up, ranks get the same number
            of batches, with as few rows repeated as possible: a rank with one more batch would wait
            for the other ranks for ever.
        lanes: Interleaved sub-orders, see `loader.epoch_order`. None chooses by the size of the
            set.
        window_rows: Rows of a lane that are shuffled together. None chooses.
        window_bytes: Maximum bytes of all windows together if None chooses. Keep it below the
            reader's `cache_bytes`, or row groups are read more than once.
    Invariants:
        The order depends on neither rank, world size nor workers; `load_state_dict` at k gives
        exactly what an undisturbed run gives after its first k rows.
    """

    def __init__(
        self,
        features: FeatureRows,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        distributed: bool = True,
        batch_size: int | None = None,
        batch_frames: int | None = None,
        batch_seconds: float | None = None,
        collate_fn: Callable[[list[Row]], Any] = collate_padded,
        label: str | None = None,
        crop: Crop | None = None,
        normalise: bool | Of = False,
        even: order.Even = None,
        lanes: int | None = None,
        window_rows: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._ranks = ranks.Ranks(rank, world_size, distributed)
        order.check_counter("seed", seed)
        order.check_counter("epoch", epoch)
        if crop is not None and not isinstance(crop, Crop):
            raise TypeError(f"expected crop=Crop(seconds) or None, got {crop!r}")
        if not callable(collate_fn):
            raise TypeError(f"collate_fn must be a function of a list of rows, got {collate_fn!r}")
        self.features, self.crop, self.seed = features, crop, seed
        self.collate_fn, self.label = collate_fn, check_label(features, label)
        self._even = order.check_even(even)
        chosen = order.choose_window(
            features.block_rows(), total_bytes=features.nbytes, window_bytes=window_bytes
        )
        self.settings = order.Settings(
            shuffle=shuffle,
            batch_rows=1 if batch_size is None else batch_size,
            lanes=chosen["lanes"] if lanes is None else lanes,
            window_rows=chosen["window_rows"] if window_rows is None else window_rows,
        )
        self._cropper = None if crop is None else Cropper(crop, features, seed)
        self._normaliser = None if normalise is False else Normaliser(features, normalise)
        self.batching: Batching = FixedBatches(self.settings)
        if batch_frames is not None or batch_seconds is not None:
            self.batching = bucketed(
                self.settings,
                features,
                self._cropper,
                batch_frames=batch_frames,
                batch_seconds=batch_seconds,
                max_rows=batch_size,
                lanes_chosen=lanes is None and window_rows is None,
            )
            self.settings = self.batching.settings
        self.gives_batches = any(
            given is not None for given in (batch_size, batch_frames, batch_seconds)
        )
        self._plans: dict[Any, EpochPlan] = {}
        self._place = EpochPlace(epoch)
        self._iterating = 0  # Iterations in progress in this process.
        self.is_in_loader = False  # True if a FeatureLoader reads the stream.
        # In a spawned worker: rank and world size of torch.distributed in the parent process, and
        # the answer of `accelerate_deals` there.
        self._carried: tuple[tuple[int, int], bool | None] | None = None
        self._handed: Begun | None = None  # In a worker: what it has handed out.

    @property
    def rank(self) -> int:
        """The rank whose share this process reads, from 0."""
        return self._split()[0]

    @property
    def world_size(self) -> int:
        """Number of processes that share an epoch."""
        return self._split()[1]

    @property
    def even(self) -> order.Even:
        """The way to equal shares of ranks; see the argument."""
        is_none = self._ranks.are_found and self.gives_batches
        return False if self._even is None and not is_none else self._even

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads; during an iteration, the epoch of that one."""
        place = self._place.now()
        return place.epoch + (not self._iterating and (place.is_begun or self._is_over(place)))

    def __len__(self) -> int:
        """Rows or batches of the epoch on this rank, whichever iterating gives. With a budget, the
        number may differ from epoch to epoch."""
        share = self._share(self.epoch, 0)
        return share.n_batches if self.gives_batches else len(share.rows)

    @property
    def n_batches(self) -> int:
        """Batches of the epoch on this rank."""
        return self._share(self.epoch, 0).n_batches

    def padding_share(self) -> float:
        """Return the share of padding in padded batches of the epoch on this rank, from 0 to 1.

        It is computed for the stream with most frames, without reading.
        """
        frames = frames_of(self.features, self._cropper)
        longest = max(frames.values(), key=lambda found: int(found.sum()))
        return self._share(self.epoch, 0).padding_share(longest)

    def batch_bytes(self) -> int:
        frames = frames_of(self.features, self._cropper)
        per_batch = self.batching.most_padded(frames)
        nbytes = SPARE_BYTES
        for name, info in self.features.streams.items():
            # Events are collated as counts in float32.
            value_bytes = max(4, self.features.dtypes[name].itemsize)
            nbytes += value_bytes * info.width * per_batch[name]
        return nbytes

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a resumed stream stays where it is inside that epoch."""
        order.check_counter("epoch", epoch)
        if ranks.accelerate_deals(self):
            # accelerate's wrapper would fail on batches with another error.
            self._check_accelerate()
        place = self._place.now()
        is_left = place.is_begun and not self._iterating
        if epoch != place.epoch or is_left or self._is_over(place):
            self._place.set(epoch, 0, 0)
        elif not self._iterating:
            self._place.set(epoch, place.start, place.skip)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return self.tracked(lambda plan: self._items(plan, range(plan.n_batches), 1))
        self._check_accelerate()
        begun = self._place.join(info.id, info.seed, info.num_workers)
        return self._of_worker(begun, info.id, info.num_workers)

    def tracked(self, batches: Callable[[EpochPlan], Iterable[Any]]) -> Iterator[Any]:
        """Iterate an epoch in this process, and count the rows that are handed out. `batches` makes
        the rows or batches of a plan, in its order."""
        self._check_accelerate()
        self._iterating += 1
        try:
            place = self._place.now()
            if place.is_begun or self._is_over(place):
                self._place.set(place.epoch + 1, 0, 0)
            place, plan = self._place.begin(), self.left()
            for batch, end in zip(batches(plan), plan.offsets[1:].tolist(), strict=True):
                self._place.hand_out(place.skip + end)
                yield batch
            self._place.set(self._place.now().epoch + 1, 0, 0)
        finally:
            self._iterating -= 1

    def _of_worker(self, begun: Begun, worker: int, workers: int) -> Iterator[Any]:
        """Yield the items of one worker of a bare DataLoader, and count them for its state."""
        self._handed = begun
        plan = self._share(begun.epoch, begun.start).after(begun.skip)
        mine = range(worker, plan.n_batches, workers)[begun.passed :]
        for item in self._items(plan, mine, workers):
            self._handed = self._handed._replace(passed=self._handed.passed + 1)
            yield item

    def _items(self, plan: EpochPlan, mine: Sequence[int], workers: int) -> Iterator[Any]:
        views = self.gives_batches and takes_views(self.collate_fn)
        for rows in self._read(plan, mine, workers, views=views):
            yield self.collate_fn(list(rows)) if self.gives_batches else next(rows)

    def worker_batches(
        self, worker: int, workers: int, *, views: bool = False
    ) -> Iterator[Iterator[Row]]:
        """Yield the rows of each batch of one worker of a loader; nothing is counted. Worker
        j % workers reads batch j. With `views`, frames are `FrameView` if they need no arithmetic.
        """
        plan = self.left()
        return self._read(plan, range(worker, plan.n_batches, workers), workers, views=views)

    def left(self) -> EpochPlan:
        """Return the plan of the iteration that has begun, from the resume point on."""
        place = self._place.now()
        return self._share(place.epoch, place.start).after(place.skip)

    def _read(
        self, plan: EpochPlan, mine: Sequence[int], workers: int, *, views: bool
    ) -> Iterator[Iterator[Row]]:
        """Yield the rows of each of these batches, and name the rows that come next to the set."""
        # A thread that reads ahead needs a core, or a store to wait for. If each core has a process
        # that reads, threads take the cores from one another and rows cost a fifth more.
        ahead = get_worker_info() is None or workers < cores() or not self.features.is_local
        for turn, number in enumerate(mine):
            if ahead:
                parts = [plan.batch(each) for each in mine[turn : turn + AHEAD_BATCHES]]
                rows, passes = (np.concatenate(column) for column in zip(*parts, strict=True))
                spans = None if self._cropper is None else self._cropper.spans_s(rows, passes)
                self.features.prefetch(rows.tolist(), spans)
            yield self._rows(plan, number, views=views)

    def _rows(self, plan: EpochPlan, number: int, *, views: bool) -> Iterator[Row]:
        rows, passes = plan.batch(number)
        spans: Sequence[Span | None] = [None] * len(rows)
        if self._cropper is not None:
            spans = self._cropper.spans_s(rows, passes)
        copy = not views or self._normaliser is not None
        for index, span_s in zip(rows.tolist(), spans, strict=True):
            row = self.features.read_row(index, span_s, copy=copy)
            if self._normaliser is not None:
                row = replace(row, features=self._normaliser(row.features))
            yield labelled(row if views else tensor_row(row), self.label)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this rank after what was handed out so far, as plain numbers.

        In a worker of a DataLoader, it is what that worker has handed out.

        Raises:
            RuntimeError: Workers of a bare DataLoader have read from the stream since its epoch was
                set, so what was handed out is not known: use `FeatureLoader`.
        """
        place, info = self._place.now(), get_worker_info()
        common = {"version": STATE_VERSION, "world_size": self.world_size} | _identity(self)
        if info is not None:
            begun = self._handed or Begun(place.epoch, place.start, place.skip)
            ours = {"position": 0, "worker": info.id, "workers": info.num_workers}
            return begun._asdict() | ours | common
        if place.by_workers:
            raise RuntimeError(
                "expected a FeatureLoader, or a DataLoader without workers, got a stream that a "
                "DataLoader's workers read ahead of what was handed out: its position is not "
                "known; iterate earmill.FeatureLoader(stream, num_workers=...) and "
                "save its state_dict()"
            )
        epoch, start, done = place.epoch, place.start, place.done
        if self._is_over(place):
            epoch, start, done = epoch + 1, 0, 0
        position = self.batching.place(self._share(epoch, start), done)
        return {"epoch": epoch, "start": start} | position | common

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; another world size may continue after a whole step."""
        _check_state(state, _identity(self))
        info = get_worker_info()
        if info is not None:
            wanted: dict[str, Any] = {"worker": info.id, "workers": info.num_workers}
            wanted["world_size"] = self.world_size
            given = {name: state.get(name) for name in wanted}
            if given != wanted:
                raise ValueError(
                    f"expected the state of {wanted}, got that of {given}; go on with the same "
                    "number of workers and ranks, or use earmill.FeatureLoader, whose state any "
                    "number takes over"
                )
            numbers = {name: order.check_whole(name, state.get(name)) for name in Begun._fields}
            self._place.resumed = Begun(**numbers)
            return
        epoch, start, skip = state["epoch"], state["start"], 0
        whole = self._whole(epoch)
        check_within("start", start, self.batching.size(whole))
        if state["world_size"] == self.world_size:
            skip = self.batching.row(self._share(epoch, start), state)
        else:
            try:
                start = self.batching.start_after(whole, state)
            except ValueError as err:
                raise ValueError(
                    f"{err}, so world_size={self.world_size} cannot take over; resume with the old "
                    "world size or save between batches"
                ) from None
        self._place.set(epoch, start, skip)

    def __getstate__(self) -> dict[str, Any]:
        """Add the rank; leave out plans, which a spawned worker makes faster than it gets them."""
        is_rank = self._ranks.are_found and ranks.of_torch() is not None
        carried = (self._split(), ranks.accelerate_deals(self)) if is_rank else None
        return {**self.__dict__, "_plans": {}, "_iterating": 0, "_carried": carried}

    def _is_over(self, place: Place) -> bool:
        return 0 < place.done and len(self._share(place.epoch, place.start).rows) <= place.done

    def _split(self) -> tuple[int, int]:
        if not self._ranks.are_found:
            return self._ranks.find()
        if self._carried is not None and get_worker_info() is not None:
            return self._carried[0]
        # accelerate splits the rows of a DataLoader among ranks, but leaves a FeatureLoader alone.
        is_dealt = not self.is_in_loader and ranks.accelerate_deals(self) is not None
        return ranks.WHOLE if is_dealt else self._ranks.find()

    def _check_accelerate(self) -> None:
        """Refuse a DataLoader through which accelerate would lose or repeat rows."""
        if self._carried is not None and get_worker_info() is not None:
            ranks.check_dealt(self._carried[1])
        elif not self.is_in_loader:
            ranks.check_accelerate(self, self._ranks, collates=self.gives_batches)

    def _whole(self, epoch: int) -> EpochPlan:
        key = "whole", epoch
        if key not in self._plans:
            chosen = {"seed": self.seed, "epoch": epoch}
            rows, passes = self.features.block_order(shuffle=self.settings.shuffle, **chosen)
            self._plans = {key: self.batching.whole(rows, passes, **chosen)}
        return self._plans[key]

    def _share(self, epoch: int, start: int) -> EpochPlan:
        rank, world_size = self._split()
        key = epoch, start, rank, world_size
        if key not in self._plans:
            self._plans[key] = self.batching.share(
                self._whole(epoch), rank=rank, world_size=world_size, even=self.even, start=start
            )
        return self._plans[key]


def _identity(stream: FeatureStream) -> dict[str, Any]:
    """Return the settings that must be equal for a place to mean the same row."""
    chosen, mixture = stream.settings, stream.features.mixture
    found = {
        "seed": stream.seed,
        "shuffle": chosen.shuffle,
        **stream.batching.identity(),
        "lanes": chosen.lanes,
        "window_rows": chosen.window_rows,
        # None repeats batches only at the end, after every place that a state can hold.
        "even": "pad" if stream.even is True else stream.even or False,
        "dataset": stream.features.fingerprint,
    }
    if stream.crop is not None:
        found["crop"] = [stream.crop.seconds, stream.crop.start_s]
    if mixture is not None:
        found["mixture"] = [*mixture]
    return found


def _check_state(state: Any, here: Mapping[str, Any]) -> None:
    """Refuse a value that is no state, or a state of a stream with another `_identity`."""
    if not isinstance(state, Mapping):
        raise TypeError(f"expected what state_dict() returned, got {type(state).__name__}")
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"expected a reader state of version {STATE_VERSION}, got "
            f"{state.get('version')!r}, whose rows come in another order; go on with the "
            f"release that wrote it, or begin its epoch anew: set_epoch({state.get('epoch')!r})"
        )
    missing = sorted({*here, *_PLACE} - {*state, *_LATER})
    if missing:
        raise ValueError(f"expected what state_dict() returned, got one without {missing}")
    if "worker" in state and get_worker_info() is None:
        raise ValueError(
            "expected the state of a whole stream, got that of one worker of a DataLoader; load it "
            "with the StatefulDataLoader that gave it"
        )
    order.check_counter("epoch", state["epoch"])
    order.check_split(0, state["world_size"])
    for name in ("start", "position"):
        if order.check_whole(name, state[name]) < 0:
            raise ValueError(f"the state has {name}={state[name]}, expected a number from 0")
    for name in (*here, *_LATER):
        if state.get(name) != here.get(name):
            raise ValueError(
                f"the state was taken with {name}={state.get(name)!r}, this stream has "
                f"{here.get(name)!r}; open the same dataset with the same settings"
            )
