"""Torch datasets over a feature set: by index, and as a shuffled stream for many ranks and workers.

The stream's order is a function of (seed, epoch) and its settings (see `loader.batches`); which
part of it this process reads, `loader.ranks` finds. Each iteration reads the next epoch, see
`loader.epoch_place`.

A state is a few plain numbers: the epoch, a place in it, and everything that must be equal for that
place to mean the same row. Resuming slices the order instead of reading what came before.
`FeatureLoader` counts what a DataLoader with workers has handed out; behind a bare one nobody
knows, as workers read ahead, so there the stream refuses to say where it stands. Inside a worker it
says what that worker has read, which torchdata's StatefulDataLoader keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from earmill.pipeline.common.machine import cores
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.batches import (
    Batching,
    FixedBatches,
    Plan,
    bucketed,
    check_within,
    frames_of,
)
from earmill.pipeline.loader.collate import as_tensor, collate_padded, is_sparse, takes_lent
from earmill.pipeline.loader.crops import Crop, Cropper
from earmill.pipeline.loader.epoch_place import Begun, EpochPlace
from earmill.pipeline.loader.ranks import (
    WHOLE,
    Ranks,
    accelerate_deals,
    check_accelerate,
    check_dealt,
    of_torch,
)
from earmill.pipeline.loader.statistics import Normaliser, Of

if TYPE_CHECKING:
    from earmill.pipeline.loader.rows import FeatureRows, Row

WINDOW_BYTES = 128 * 2**20
# Batches whose rows a set is told of before they are read.
AHEAD_BATCHES = 4
# Beside the values of a batch: lengths, and frames that `multiple_of` adds.
SPARE_BYTES = 4 * 2**20
# 2: another order, drawn by Philox.
STATE_VERSION = 2
_PLACE = ("epoch", "start", "position", "world_size")
# What states written before these settings do not name.
_LATER = ("batch_frames", "batch_seconds", "crop", "mixture")


def tensor_row(row: Row) -> Row:
    """The same row with tensors for arrays; events stay sparse until they are collated."""
    return row.map(lambda features: features if is_sparse(features) else as_tensor(features))


def check_label(features: FeatureRows, label: str | None) -> str | None:
    """Return the name of a column of the source.

    Raises:
        ValueError: The set has no such column.
    """
    if label is None:
        return None
    names = [
        name.removeprefix(EXTRA_PREFIX)
        for name in features.table.column_names
        if name.startswith(EXTRA_PREFIX)
    ]
    if label not in names:
        raise ValueError(f"expected a label out of the source's columns {names}, got {label!r}")
    return label


def labelled(row: Row, label: str | None) -> Row:
    """The row with a column of the source as its label.

    Raises:
        ValueError: The column is empty in this row.
    """
    if label is None:
        return row
    value = row.extra.get(label)
    if value is None:
        raise ValueError(
            f"expected a label of every row, got none in column {label!r} of row {row.row_id!r}; "
            "leave such rows out of the job, or read the column from batch.extra"
        )
    return replace(row, label=value)


class FeatureDataset(Dataset["Row"]):
    """Rows by index, as tensors; give a DataLoader one of the collates as its `collate_fn`.

    Args:
        features: An opened feature set.
        label: Column of the source that is `label` of each row and batch, as losses take it.
    """

    def __init__(self, features: FeatureRows, *, label: str | None = None) -> None:
        self.features, self.label = features, check_label(features, label)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return labelled(tensor_row(self.features[index]), self.label)

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """A batch; read in index order, so that rows of one row group are read together."""
        by_index = {i: self[i] for i in sorted(set(indices))}
        return [by_index[i] for i in indices]


class FeatureStream(IterableDataset[Any]):
    """Rows or batches of one rank in epoch order, each row once per epoch over ranks and workers.

    Each iteration is an epoch, and the next iteration begins the next epoch. An iteration that took
    at most one row or batch was a look, and costs nothing. `set_epoch` goes to the start of any
    epoch. After `load_state_dict` the next iteration goes on inside of its epoch.

    Args:
        features: An opened feature set, or several: end to end, or mixed by weight (`mix`).
        shuffle: False gives index order.
        seed: Same on all ranks.
        epoch: The first epoch.
        rank: This process, from 0 to `world_size - 1`; None takes that of torch.distributed, where
            it is initialised, else that of torchrun, mpirun or srun in the environment.
        world_size: Number of processes that share an epoch; None as `rank`, together with it.
        distributed: False asks neither torch.distributed nor the environment: this process reads
            all rows, or the given share of a group of its own.
        batch_size: Rows of a batch, at most with a budget. Iterating gives batches where this or a
            budget is set, else rows.
        batch_frames: Budget: rows of a batch times frames of its longest, at most, counted in the
            stream with most frames. Rows of similar length come together (`BucketedBatches`).
        batch_seconds: The same in seconds.
        collate_fn: Makes a batch of a list of rows; `earmill.collate` pads.
        label: Column of the source that is `label` of each row and batch, as losses take it.
        crop: Stretch of each clip to read; None for whole clips.
        normalise: True: frames with mean 0 and variance 1 by the set's statistics; or the
            statistics of each stream to normalise. Padding is put in after it.
        even: False: ranks differ by one row (with a budget: one batch) at most. True or "pad":
            every rank gets the same number, with up to `world_size - 1` rows (batches) repeated.
            "drop": the same number, with up to `world_size - 1` left out of this epoch. None is
            False, except that found ranks get the same number of batches, by repeating as few rows:
            a rank with one more would wait for the others for ever.
        lanes: Interleaved sub-orders, see `loader.epoch_order`. None chooses from the set's size.
        window_rows: Rows of a lane that are shuffled together. None chooses.
        window_bytes: What the windows may hold together where None chooses; keep it below the
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
        self._ranks = Ranks(rank, world_size, distributed)
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
        self._plans: dict[Any, Plan] = {}
        self._place = EpochPlace(epoch)
        # Iterations of this process that are under way.
        self._under_way = 0
        # Set by a FeatureLoader, which reads the stream by itself.
        self.is_in_loader = False
        # In a worker that was spawned: its parent's rank and world size, where torch.distributed
        # says them, and what `accelerate_deals` said there.
        self._carried: tuple[tuple[int, int], bool | None] | None = None
        # In a worker: what it has handed out.
        self._handed: Begun | None = None

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
        """How ranks get equal shares; None repeats as few rows as equal numbers of batches need."""
        is_none = self._ranks.are_found and self.gives_batches
        return False if self._even is None and not is_none else self._even

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives; in a loop over the stream, the epoch that it gives."""
        is_past = not self._under_way and (self._place.is_begun or self._is_over())
        return self._place.epoch + is_past

    def __len__(self) -> int:
        """Rows or batches of the epoch on this rank, whichever iterating gives; with a budget the
        number may differ from epoch to epoch."""
        share = self._share(self.epoch, 0)
        return share.n_batches if self.gives_batches else len(share.rows)

    @property
    def n_batches(self) -> int:
        """Batches of the epoch on this rank."""
        return self._share(self.epoch, 0).n_batches

    def padding_share(self) -> float:
        """The share of padding in the epoch's batches on this rank, from 0 to 1, if padded; of the
        stream with most frames, and without reading any."""
        frames = frames_of(self.features, self._cropper)
        longest = max(frames.values(), key=lambda found: int(found.sum()))
        return self._share(self.epoch, 0).padding_share(longest)

    def batch_bytes(self) -> int:
        """What a padded batch may take, at most, with columns as they are."""
        frames = frames_of(self.features, self._cropper)
        per_batch = self.batching.most_padded(frames)
        nbytes = SPARE_BYTES
        for name, info in self.features.streams.items():
            # Of events their counts, in float32.
            value_bytes = max(4, self.features.dtypes[name].itemsize)
            nbytes += value_bytes * info.width * per_batch[name]
        return nbytes

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; no change if a resumed run is inside that epoch."""
        order.check_counter("epoch", epoch)
        if accelerate_deals(self):
            # Before its wrapper stumbles over batches.
            self._check_accelerate()
        is_left = self._place.is_begun and not self._under_way
        if epoch != self._place.epoch or is_left or self._is_over():
            self._place.set(epoch, 0, 0)
        elif not self._under_way:
            self._place.set(epoch, self._place.start, self._place.skip)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return self._tracked()
        self._check_accelerate()
        begun = self._place.join(info.id, info.seed, info.num_workers)
        return self._of_worker(begun, info.id, info.num_workers)

    def _of_worker(self, begun: Begun, worker: int, workers: int) -> Iterator[Any]:
        """Yield the items of one worker of a bare DataLoader, and count them for its state."""
        self._handed = begun
        plan = self._share(begun.epoch, begun.start).after(begun.skip)
        mine = range(worker, plan.n_batches, workers)
        for items in self._collated(plan, mine, workers, begun.passed):
            self._handed = self._handed._replace(passed=self._handed.passed + 1)
            yield items

    @contextmanager
    def iterating(self) -> Iterator[None]:
        """An iteration of this process is under way."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def _tracked(self) -> Iterator[Any]:
        self._check_accelerate()
        with self.iterating():
            skip, plan = self.begin(), self.left()
            made = self._collated(plan, range(plan.n_batches), 1)
            for items, end in zip(made, plan.offsets[1:].tolist(), strict=True):
                self.hand_out(skip + end)
                yield items
            self.complete()

    def _collated(
        self, plan: Plan, mine: Sequence[int], workers: int, passed: int = 0
    ) -> Iterator[Any]:
        """Yield rows or batches of the numbered batches of a plan, after the first `passed`."""
        lent = self.gives_batches and takes_lent(self.collate_fn)
        for rows in self._read(plan, mine[passed:], workers, lent=lent):
            yield self.collate_fn(list(rows)) if self.gives_batches else next(rows)

    def worker_batches(
        self, worker: int, workers: int, *, lent: bool = False
    ) -> Iterator[Iterator[Row]]:
        """What one worker of a DataLoader reads, without a trace: batch j is of worker j % workers.

        The loader takes its workers in the same turn, so it hands out the plan in order.

        Args:
            lent: See `read`.
        """
        plan = self.left()
        return self._read(plan, range(worker, plan.n_batches, workers), workers, lent=lent)

    def _read(
        self, plan: Plan, mine: Sequence[int], workers: int, *, lent: bool
    ) -> Iterator[Iterator[Row]]:
        """The rows of these batches of a plan."""
        ahead = self._reads_ahead(workers)
        for turn, number in enumerate(mine):
            if ahead:
                self._announce(plan, mine[turn : turn + AHEAD_BATCHES])
            yield self.read(plan, number, lent=lent)

    def left(self) -> Plan:
        """The plan of the iteration that has begun, from the resume point on."""
        return self._share(self._place.epoch, self._place.start).after(self._place.skip)

    def read(self, plan: Plan, number: int, *, lent: bool = False) -> Iterator[Row]:
        """The rows of a batch of a plan, one by one as they are read.

        Args:
            lent: For a collate of `loader.collate`, which makes its own tensors: arrays stay what
                they are, and where they need no arithmetic are views of cached blocks, which the
                collate copies (`formats.frames.FrameView`).
        """
        rows, passes = plan.batch(number)
        starts: list[float | None] = [None] * len(rows)
        if self._cropper is not None:
            starts = self._cropper.starts_s(rows, passes)
        for index, start_s in zip(rows.tolist(), starts, strict=True):
            row = self._row(index, start_s, copy=not lent or self._normaliser is not None)
            if self._normaliser is not None:
                row = replace(row, features=self._normaliser(row.features))
            yield labelled(row if lent else tensor_row(row), self.label)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, after what was handed out so far; a few plain numbers. In a
        worker of a DataLoader, what that worker has handed out.

        Raises:
            RuntimeError: Workers of a bare DataLoader have read from the stream since its epoch was
                set, and how much of that was handed out is not known: use `FeatureLoader`.
        """
        info = get_worker_info()
        if info is not None:
            begun = self._handed or Begun(self._place.epoch, self._place.start, self._place.skip)
            return _state_of_worker(self, begun, info.id, info.num_workers)
        if self._place.is_by_workers:
            raise RuntimeError(
                "expected a FeatureLoader, or a DataLoader without workers, got a stream that a "
                "DataLoader's workers read ahead of what was handed out: its position is not "
                "known; iterate earmill.FeatureLoader(stream, num_workers=...) and "
                "save its state_dict()"
            )
        epoch, start, done = self._place.epoch, self._place.start, self._place.done
        if self._is_over():
            epoch, start, done = epoch + 1, 0, 0
        share = self._share(epoch, start)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "start": start,
            **self.batching.place(share, done),
            "world_size": self.world_size,
        } | _identity(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another world size may take over between whole steps."""
        _check_state(state, _identity(self))
        info = get_worker_info()
        if info is not None:
            begun = _begun_of_worker(state, info.id, info.num_workers, self.world_size)
            self._place.resume(begun)
            return
        epoch, start = state["epoch"], state["start"]
        whole = self._whole(epoch)
        check_within("start", start, self.batching.size(whole))
        if state["world_size"] != self.world_size:
            start, skip = _after_whole_steps(self, whole, state), 0
        else:
            skip = self.batching.row(self._share(epoch, start), state)
        self._place.set(epoch, start, skip)

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: a worker that is spawned makes its own in less time than they travel. With
        the rank, which a spawned worker cannot ask torch.distributed for."""
        is_rank = self._ranks.are_found and of_torch() is not None
        carried = (self._split(), accelerate_deals(self)) if is_rank else None
        return {**self.__dict__, "_plans": {}, "_under_way": 0, "_carried": carried}

    def begin(self) -> int:
        """An iteration of this process begins; return the rows that it skips."""
        if self._place.is_begun or self._is_over():
            self.complete()
        return self._place.begin()

    def hand_out(self, position: int) -> None:
        """Count a row or batch that is handed out; `position` rows of the share were in all."""
        self._place.hand_out(position)

    def complete(self) -> None:
        """The epoch ran to its end: the next iteration is of the next one."""
        self._place.set(self._place.epoch + 1, 0, 0)

    def _is_over(self) -> bool:
        """Return True if this process has handed out all rows of its rank's share."""
        place, done = self._place, self._place.done
        return 0 < done and len(self._share(place.epoch, place.start).rows) <= done

    def _split(self) -> tuple[int, int]:
        """Rank and world size by which rows are shared out."""
        if not self._ranks.are_found:
            return self._ranks.find()
        if self._carried is not None and get_worker_info() is not None:
            return self._carried[0]
        # accelerate deals out the rows of a DataLoader, and leaves a FeatureLoader as it is.
        is_dealt = not self.is_in_loader and accelerate_deals(self) is not None
        return WHOLE if is_dealt else self._ranks.find()

    def _check_accelerate(self) -> None:
        """Refuse to be read in a way in which accelerate would lose or repeat rows."""
        if self._carried is not None and get_worker_info() is not None:
            check_dealt(self._carried[1])
        elif not self.is_in_loader:
            check_accelerate(self, self._ranks, collates=self.gives_batches)

    def _whole(self, epoch: int) -> Plan:
        """The plan of all ranks; one is kept."""
        key = "whole", epoch
        if key not in self._plans:
            chosen = {"seed": self.seed, "epoch": epoch}
            rows, passes = self.features.block_order(shuffle=self.settings.shuffle, **chosen)
            self._plans = {key: self.batching.whole(rows, passes, **chosen)}
        return self._plans[key]

    def _share(self, epoch: int, start: int) -> Plan:
        """The plan of this rank."""
        rank, world_size = self._split()
        key = epoch, start, rank, world_size
        if key not in self._plans:
            self._plans[key] = self.batching.share(
                self._whole(epoch),
                rank=rank,
                world_size=world_size,
                even=self.even,
                start=start,
            )
        return self._plans[key]

    def _reads_ahead(self, workers: int) -> bool:
        """Threads that read ahead pay where they have a core, or wait for a store. Where every core
        has a process that reads they take it from one another, and rows cost a fifth more."""
        return get_worker_info() is None or workers < cores() or not self.features.is_local

    def _announce(self, plan: Plan, batches: Sequence[int]) -> None:
        """Tell the set which rows, or stretches of rows, come next, the first of them now."""
        parts = [plan.batch(number) for number in batches]
        rows = np.concatenate([rows for rows, _ in parts])
        if self.crop is None or self._cropper is None:
            self.features.prefetch(rows.tolist())
            return
        seconds = self.crop.seconds
        starts = self._cropper.starts_s(rows, np.concatenate([passes for _, passes in parts]))
        spans = [None if start is None else (start, start + seconds) for start in starts]
        self.features.prefetch(rows.tolist(), spans)

    def _row(self, index: int, start_s: float | None, *, copy: bool) -> Row:
        if start_s is None or self.crop is None:
            return self.features.read_row(index, copy=copy)
        span_s = start_s, start_s + self.crop.seconds
        return replace(self.features.read_row(index, span_s, copy=copy), start_s=start_s)


def _identity(stream: FeatureStream) -> dict[str, Any]:
    """What must be equal for a place to mean the same row."""
    chosen, mixture = stream.settings, stream.features.mixture
    found = {
        "seed": stream.seed,
        "shuffle": chosen.shuffle,
        **stream.batching.identity(),
        "lanes": chosen.lanes,
        "window_rows": chosen.window_rows,
        # None repeats batches at the end, behind every place that a state can name.
        "even": "pad" if stream.even is True else stream.even or False,
        "dataset": stream.features.fingerprint,
    }
    if stream.crop is not None:
        found["crop"] = [stream.crop.seconds, stream.crop.start_s]
    if mixture is not None:
        found["mixture"] = [*mixture]
    return found


def _state_of_worker(
    stream: FeatureStream, begun: Begun, worker: int, workers: int
) -> dict[str, Any]:
    """The state of a stream in one worker of a DataLoader."""
    return {
        "version": STATE_VERSION,
        **begun._asdict(),
        "position": 0,
        "worker": worker,
        "workers": workers,
        "world_size": stream.world_size,
    } | _identity(stream)


def _begun_of_worker(state: Mapping[str, Any], worker: int, workers: int, world_size: int) -> Begun:
    """Return the iteration that a worker continues, from the saved state of its number."""
    wanted = {"worker": worker, "workers": workers, "world_size": world_size}
    found = {name: state.get(name) for name in wanted}
    if found != wanted:
        raise ValueError(
            f"expected the state of {wanted}, got that of {found}; go on with the same number of "
            "workers and ranks, or use earmill.FeatureLoader, whose state any number takes over"
        )
    return Begun(**{name: order.check_whole(name, state.get(name)) for name in Begun._fields})


def _check_state(state: Any, here: Mapping[str, Any]) -> None:
    """Refuse what is no state, or one of another stream.

    Args:
        here: What `_identity` says of the stream that is to go on.
    """
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


def _after_whole_steps(stream: FeatureStream, whole: Plan, state: Mapping[str, Any]) -> int:
    """Where all ranks of another world stand, if that is a prefix of the order."""
    try:
        return stream.batching.start_after(whole, state)
    except ValueError as err:
        raise ValueError(
            f"{err}, so world_size={stream.world_size} cannot take over; resume with the old world "
            "size or save between batches"
        ) from None
