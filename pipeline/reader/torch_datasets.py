"""Torch datasets over a feature set: by index, and as a shuffled stream for many ranks and workers.

The stream's order is a function of (seed, epoch) and its settings (see `reader.batching`); rank and
world size are arguments, and torch.distributed is never touched. Its state is a few numbers, and
resuming slices the order instead of reading what came before. `FeatureLoader` counts what a
DataLoader with workers has handed out; behind a bare one nobody knows, as workers read ahead, so
there the stream refuses to say where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from earmill.pipeline.common.machine import cores
from earmill.pipeline.formats.lent import lending
from earmill.pipeline.reader import shuffle as order
from earmill.pipeline.reader import stream_state as saved
from earmill.pipeline.reader.batching import Batching, FixedBatches, Plan
from earmill.pipeline.reader.buckets import bucketed, frames_of
from earmill.pipeline.reader.collate import as_tensor, is_sparse
from earmill.pipeline.reader.crops import Crop, Cropper
from earmill.pipeline.reader.mixing import block_order
from earmill.pipeline.reader.statistics import Normaliser, Of

if TYPE_CHECKING:
    from earmill.pipeline.reader.base import FeatureRows
    from earmill.pipeline.reader.read_row import Row

WINDOW_BYTES = 128 * 2**20
# Slots of the shared state.
EPOCH, START, SKIP, DONE, UNSEEN = range(5)
COMPLETE = -1
# Batches whose rows a set is told of before they are read.
AHEAD_BATCHES = 4
# Beside the values of a batch: lengths, and frames that `multiple_of` adds.
SPARE_BYTES = 4 * 2**20


def tensor_row(row: Row) -> Row:
    """The same row with tensors for arrays; events stay sparse until they are collated."""
    return row.map(lambda features: features if is_sparse(features) else as_tensor(features))


class FeatureDataset(Dataset["Row"]):
    """Rows by index, as tensors; give a DataLoader one of the collates as its `collate_fn`.

    Args:
        features: An opened feature set.
    """

    def __init__(self, features: FeatureRows) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return tensor_row(self.features[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """A batch; read in index order, so that rows of one row group are read together."""
        by_index = {i: self[i] for i in sorted(set(indices))}
        return [by_index[i] for i in indices]


class FeatureStream(IterableDataset["Row"]):
    """Rows of one rank in epoch order, each row once per epoch over all ranks and workers.

    Call `set_epoch` before each epoch, as with torch's DistributedSampler. Iterating again starts
    the epoch again (from the resume point, if one was loaded and the epoch is still running).

    Args:
        features: An opened feature set, or several: end to end, or mixed by weight (`mix`).
        shuffle: False gives index order.
        seed: Same on all ranks.
        epoch: The first epoch.
        rank: This process, from 0 to `world_size - 1`.
        world_size: Number of processes that share an epoch.
        batch_size: Rows of a batch, dealt to a worker at a time; None for 1. With a budget, rows at
            most, None for as many as it allows.
        batch_frames: Budget: rows of a batch times frames of its longest, at most, counted in the
            stream with most frames. Rows of similar length come together (`reader.buckets`).
        batch_seconds: The same in seconds.
        crop: Stretch of each clip to read; None for whole clips.
        normalise: True: frames in float32 with mean 0 and variance 1 by the set's statistics; or
            the statistics of each stream to normalise. Padding is put in after it.
        even: False: ranks differ by one row (with a budget: one batch) at most. True or "pad":
            every rank gets the same number, with up to `world_size - 1` rows (batches) repeated.
            "drop": the same number, with up to `world_size - 1` left out of this epoch.
        lanes: Interleaved sub-orders, see `reader.shuffle`. None chooses from the set's size.
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
        rank: int = 0,
        world_size: int = 1,
        batch_size: int | None = None,
        batch_frames: int | None = None,
        batch_seconds: float | None = None,
        crop: Crop | None = None,
        normalise: bool | Of = False,
        even: order.Even = False,
        lanes: int | None = None,
        window_rows: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        order.check_split(rank, world_size)
        order.check_counter("seed", seed)
        order.check_counter("epoch", epoch)
        if crop is not None and not isinstance(crop, Crop):
            raise TypeError(f"expected crop=Crop(seconds) or None, got {crop!r}")
        self.features, self.crop = features, crop
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.even = order.check_even(even)
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
        self._plans: dict[Any, Plan] = {}
        # Shared memory: workers that outlive an epoch (persistent_workers) see the next one.
        self._state = torch.tensor([epoch, 0, 0, 0, 0]).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return int(self._state[EPOCH])

    def __len__(self) -> int:
        """Rows of the epoch on this rank; with a budget it may differ from epoch to epoch."""
        return len(self._share(self.epoch, 0).rows)

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
        """What a padded batch may take, at most, of values of 4 bytes and columns as they are."""
        frames = frames_of(self.features, self._cropper)
        widths = {name: info.width for name, info in self.features.streams.items()}
        per_batch = self.batching.most_padded(frames)
        return (
            4 * sum(widths[name] * n_frames for name, n_frames in per_batch.items()) + SPARE_BYTES
        )

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; no change if a resumed run is inside that epoch."""
        order.check_counter("epoch", epoch)
        if epoch != self.epoch or int(self._state[DONE]) == COMPLETE:
            self._set(epoch=epoch, start=0, skip=0)

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        if info is None:
            yield from self._tracked()
            return
        # What of this the loader hands out does not come back here.
        self._state[UNSEEN] = 1
        for batch in self.worker_batches(info.id, info.num_workers):
            yield from batch

    def worker_batches(
        self, worker: int, workers: int, *, lent: bool = False
    ) -> Iterator[Iterator[Row]]:
        """What one worker of a DataLoader reads, without a trace: batch j is of worker j % workers.

        The loader takes its workers in the same turn, so it hands out the plan in order.

        Args:
            lent: See `read`.
        """
        plan, ahead = self.left(), self._reads_ahead(workers)
        mine = range(worker, plan.n_batches, workers)
        for turn, number in enumerate(mine):
            if ahead:
                self._announce(plan, mine[turn : turn + AHEAD_BATCHES])
            yield self.read(plan, number, lent=lent)

    def left(self) -> Plan:
        """The plan from the resume point on."""
        epoch, start, skip = self._state[:DONE].tolist()
        return self._share(epoch, start).after(skip)

    def read(self, plan: Plan, number: int, *, lent: bool = False) -> Iterator[Row]:
        """The rows of a batch of a plan, one by one as they are read.

        Args:
            lent: For a collate of `reader.collate`, which makes its own tensors: arrays stay what
                they are, and where they need no arithmetic come as they lie in the cache, to be
                copied by it (`formats.lent`).
        """
        rows, passes = plan.batch(number)
        starts: list[float | None] = [None] * len(rows)
        if self._cropper is not None:
            starts = self._cropper.starts_s(rows, passes)
        for index, start_s in zip(rows.tolist(), starts, strict=True):
            with lending() if lent and self._normaliser is None else nullcontext():
                row = self._row(index, start_s)
            if self._normaliser is not None:
                row = replace(row, features=self._normaliser(row.features))
            yield row if lent else tensor_row(row)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, after the rows handed out so far; a few plain numbers.

        Raises:
            RuntimeError: Workers of a bare DataLoader have read from the stream since its epoch was
                set, and how much of that was handed out is not known: use `FeatureLoader`.
        """
        epoch, start, _, done, unseen = self._state.tolist()
        if unseen:
            raise RuntimeError(
                "expected a FeatureLoader, or a DataLoader without workers, got a stream that a "
                "DataLoader's workers read ahead of what was handed out: its position is not "
                "known; iterate earmill.FeatureLoader(stream, num_workers=...) and "
                "save its state_dict()"
            )
        share = self._share(epoch, start)
        if done == COMPLETE or 0 < len(share.rows) <= done:
            epoch, start, done = epoch + 1, 0, 0
        return {
            "version": saved.STATE_VERSION,
            "epoch": epoch,
            "start": start,
            **self.batching.place(share, done),
            "world_size": self.world_size,
        } | saved.identity(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another world size may take over between whole steps."""
        saved.check_state(state, saved.identity(self))
        epoch, start = state["epoch"], state["start"]
        whole = self._whole(epoch)
        saved.check_within("start", start, self.batching.size(whole))
        if state["world_size"] != self.world_size:
            start, skip = saved.after_whole_steps(self, whole, state), 0
        else:
            skip = self.batching.row(self._share(epoch, start), state)
        self._set(epoch=epoch, start=start, skip=skip)

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: a worker that is spawned makes its own in less time than they travel."""
        return {**self.__dict__, "_plans": {}}

    def _set(self, *, epoch: int, start: int, skip: int) -> None:
        self._state.copy_(torch.tensor([epoch, start, skip, skip, 0]))

    def begin(self) -> int:
        """The iteration starts at the resume point; returns it."""
        self._state[DONE] = self._state[SKIP]
        return int(self._state[SKIP])

    def done(self, position: int) -> None:
        """So many rows of this rank's share were handed out."""
        self._state[DONE] = position

    def complete(self) -> None:
        """The epoch ran to its end: the next iteration starts from zero."""
        self._state[START:UNSEEN] = torch.tensor([0, 0, COMPLETE])

    def _whole(self, epoch: int) -> Plan:
        """The plan of all ranks; one is kept."""
        key = "whole", epoch
        if key not in self._plans:
            chosen = {"seed": self.seed, "epoch": epoch}
            rows, passes = block_order(self.features, shuffle=self.settings.shuffle, **chosen)
            self._plans = {key: self.batching.whole(rows, passes, **chosen)}
        return self._plans[key]

    def _share(self, epoch: int, start: int) -> Plan:
        """The plan of this rank."""
        key = epoch, start
        if key not in self._plans:
            self._plans[key] = self.batching.share(
                self._whole(epoch),
                rank=self.rank,
                world_size=self.world_size,
                even=self.even,
                start=start,
            )
        return self._plans[key]

    def _tracked(self) -> Iterator[Row]:
        position = self.begin()
        for batch in self.worker_batches(0, 1):
            for row in batch:
                position += 1
                self.done(position)
                yield row
        self.complete()

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

    def _row(self, index: int, start_s: float | None) -> Row:
        if start_s is None or self.crop is None:
            return self.features[index]
        row = self.features.slice(index, start_s, start_s + self.crop.seconds)
        return replace(row, start_s=start_s)
