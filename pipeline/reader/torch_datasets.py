"""Torch datasets over a feature set: by index, and as a shuffled stream for many ranks and workers.

The stream's order is a function of (seed, epoch) and its settings (see `reader.shuffle`); rank and
world size are arguments, and torch.distributed is never touched. Its state is a few integers, and
resuming slices the order instead of reading what came before. `FeatureLoader` counts what a
DataLoader with workers has handed out; behind a bare one nobody knows, as workers read ahead, so
there the stream refuses to say where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from earmill.pipeline.reader import shuffle as order
from earmill.pipeline.reader.collate import Batch, as_tensor, collate_padded, is_sparse

if TYPE_CHECKING:
    from earmill.pipeline.reader.base import FeatureRows
    from earmill.pipeline.reader.read_row import Row

# 2: another order, drawn by Philox.
STATE_VERSION = 2
WINDOW_BYTES = 128 * 2**20
_PLACE = ("epoch", "start", "position", "world_size")
# Slots of the shared state.
EPOCH, START, SKIP, DONE, UNSEEN = range(5)
COMPLETE = -1


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
        features: An opened feature set.
        shuffle: False gives index order.
        seed: Same on all ranks.
        epoch: The first epoch.
        rank: This process, from 0 to `world_size - 1`.
        world_size: Number of processes that share an epoch.
        batch_size: Rows dealt to a worker at a time. Equal to the DataLoader's batch size, batches
            do not depend on the number of workers.
        even: False: no row repeats, ranks differ by one row at most. True or "pad": every rank
            gets the same number, with up to `world_size - 1` rows repeated. "drop": the same
            number, with up to `world_size - 1` rows left out of this epoch.
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
        batch_size: int = 1,
        even: order.Even = False,
        lanes: int | None = None,
        window_rows: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        order.check_split(rank, world_size)
        order.check_counter("seed", seed)
        order.check_counter("epoch", epoch)
        self.features = features
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.even = order.check_even(even)
        self._block_rows = features.block_rows()
        chosen = order.choose_window(
            self._block_rows, total_bytes=features.nbytes, window_bytes=window_bytes
        )
        self.settings = order.Settings(
            shuffle=shuffle,
            batch_rows=batch_size,
            lanes=chosen["lanes"] if lanes is None else lanes,
            window_rows=chosen["window_rows"] if window_rows is None else window_rows,
        )
        # Shared memory: workers that outlive an epoch (persistent_workers) see the next one.
        self._state = torch.tensor([epoch, 0, 0, 0, 0]).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return int(self._state[EPOCH])

    def __len__(self) -> int:
        """Rows of a whole epoch on this rank."""
        return self._n_rows(start=0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; no change if a resumed run is inside that epoch."""
        order.check_counter("epoch", epoch)
        if epoch != self.epoch or int(self._state[DONE]) == COMPLETE:
            self._set(epoch=epoch, start=0, skip=0)

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        if info is None:
            yield from self._tracked(*self._left())
            return
        # What of this the loader hands out does not come back here.
        self._state[UNSEEN] = 1
        yield from self.worker_rows(info.id, info.num_workers)

    def worker_rows(self, worker: int, workers: int) -> Iterator[Row]:
        """What one worker of a DataLoader reads, without a trace."""
        split = {"worker": worker, "workers": workers}
        rows, _ = self._left()
        for batch in order.worker_batches(rows, **split, batch_rows=self.settings.batch_rows):
            yield from map(self._read, batch)

    def _left(self) -> tuple[order.Rows, int]:
        """The rows from the resume point on, and how many come before it."""
        epoch, start, skip = self._state[:DONE].tolist()
        return self._share(epoch, start)[skip:], skip

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
        if done == COMPLETE or 0 < self._n_rows(start) <= done:
            epoch, start, done = epoch + 1, 0, 0
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "start": start,
            "position": done,
            "world_size": self.world_size,
        } | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another world size may take over between whole steps."""
        if not isinstance(state, Mapping):
            raise TypeError(f"expected what state_dict() returned, got {type(state).__name__}")
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"expected a reader state of version {STATE_VERSION}, got "
                f"{state.get('version')!r}, whose rows come in another order; go on with the "
                f"release that wrote it, or begin its epoch anew: set_epoch({state.get('epoch')!r})"
            )
        missing = sorted({*self._identity(), *_PLACE} - set(state))
        if missing:
            raise ValueError(f"expected what state_dict() returned, got one without {missing}")
        self._check_place(state)
        for name, here in self._identity().items():
            if state[name] != here:
                raise ValueError(
                    f"the state was taken with {name}={state[name]!r}, this stream has {here!r}; "
                    "open the same dataset with the same settings"
                )
        start, skip = state["start"], state["position"]
        if state["world_size"] != self.world_size:
            start, skip = self._after_whole_steps(state), 0
        self._set(epoch=state["epoch"], start=start, skip=skip)

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Refuse a place outside of the epoch, from which rows would be left out in silence."""
        order.check_counter("epoch", state["epoch"])
        order.check_split(0, state["world_size"])
        n_rows = int(self._block_rows.sum())
        for name in ("start", "position"):
            if not 0 <= order.check_whole(name, state[name]) <= n_rows:
                raise ValueError(
                    f"the state has {name}={state[name]}, this stream has rows 0 to {n_rows}; take "
                    "it from state_dict() unchanged"
                )

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same row."""
        chosen = self.settings
        return {
            "seed": self.seed,
            "shuffle": chosen.shuffle,
            "batch_size": chosen.batch_rows,
            "lanes": chosen.lanes,
            "window_rows": chosen.window_rows,
            "even": "pad" if self.even is True else self.even,
            "dataset": self.features.fingerprint,
        }

    def _after_whole_steps(self, state: Mapping[str, Any]) -> int:
        """Rows that all ranks of the old world have had, if that is a prefix of the order."""
        batch_rows, position, world = (
            self.settings.batch_rows,
            state["position"],
            state["world_size"],
        )
        n_full = (int(self._block_rows.sum()) - state["start"]) // (world * batch_rows)
        if position % batch_rows or position // batch_rows > n_full:
            raise ValueError(
                f"a state of world_size={world} taken after {position} rows does not end a whole "
                f"step of {batch_rows} rows per rank, so world_size={self.world_size} cannot take "
                "over; resume with the old world size or save between batches"
            )
        return int(state["start"] + position * world)

    def _set(self, *, epoch: int, start: int, skip: int) -> None:
        self._state.copy_(torch.tensor([epoch, start, skip, skip, 0]))

    def _begin(self) -> int:
        """The iteration starts at the resume point; returns it."""
        self._state[DONE] = self._state[SKIP]
        return int(self._state[SKIP])

    def _done(self, position: int) -> None:
        self._state[DONE] = position

    def _complete(self) -> None:
        """The epoch ran to its end: the next iteration starts from zero."""
        self._state[START:UNSEEN] = torch.tensor([0, 0, COMPLETE])

    def _n_rows(self, start: int) -> int:
        return order.rank_rows(
            int(self._block_rows.sum()) - start,
            rank=self.rank,
            world_size=self.world_size,
            batch_rows=self.settings.batch_rows,
            even=self.even,
        )

    def _share(self, epoch: int, start: int) -> order.Rows:
        rows = order.epoch_order(self._block_rows, self.settings, seed=self.seed, epoch=epoch)
        return order.rank_share(
            rows,
            rank=self.rank,
            world_size=self.world_size,
            batch_rows=self.settings.batch_rows,
            even=self.even,
            start=start,
        )

    def _tracked(self, rows: np.ndarray, skip: int) -> Iterator[Row]:
        self._begin()
        for position, index in enumerate(rows, start=skip + 1):
            row = self._read(index)
            self._done(position)
            yield row
        self._complete()

    def _read(self, index: SupportsIndex) -> Row:
        return tensor_row(self.features[index])


class _Counted(IterableDataset["Row"]):
    """A stream behind a loader that counts what it hands out."""

    def __init__(self, stream: FeatureStream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self.stream.worker_rows(worker, workers)


class FeatureLoader:
    """A DataLoader over a `FeatureStream` that knows how far it got, workers or not.

    Args:
        stream: Its `batch_size` is the batch size.
        num_workers: Reading processes; 0 reads in this one.
        collate_fn: One of `earmill.pipeline.reader.collate`, or any function of a list of rows.
        options: Passed on to `torch.utils.data.DataLoader`; batches stay in order.
    Example:
        for epoch in range(loader.epoch, 10):
            loader.set_epoch(epoch)
            for batch in loader:
                ...
                checkpoint = {"data": loader.state_dict()}
    """

    def __init__(
        self,
        stream: FeatureStream,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Row]], Any] = collate_padded,
        **options: Any,
    ) -> None:
        if not isinstance(stream, FeatureStream):
            raise TypeError(
                "expected a FeatureStream, as FeatureStream(ds, batch_size=8) makes it, got "
                f"{type(stream).__name__}"
            )
        if not options.get("in_order", True):
            raise ValueError(
                "in_order=False would make positions meaningless; leave it out, or use a bare "
                "DataLoader without resume"
            )
        self.stream = stream
        self._loader: DataLoader[Batch] = DataLoader(
            _Counted(stream),  # type: ignore[arg-type]  # rows in, batches out
            batch_size=stream.settings.batch_rows,
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return self.stream.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        stream, batch_rows = self.stream, self.stream.settings.batch_rows
        last = stream._n_rows(int(stream._state[START]))
        position = stream._begin()
        for batch in self._loader:
            position = min(position + batch_rows, last)
            stream._done(position)
            yield batch
        stream._complete()

    def set_epoch(self, epoch: int) -> None:
        """See `FeatureStream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, after the batches handed out so far."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FeatureStream.load_state_dict`; call it before iterating."""
        self.stream.load_state_dict(state)
