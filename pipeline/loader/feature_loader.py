"""A DataLoader over a `FeatureStream`: whole batches over shared memory, and a place to resume at.

torch moves every tensor through a new piece of shared memory, whose pages the kernel clears and
maps one by one: with batches of megabytes that costs more than reading them. Here a worker collates
straight into a slot of one mapping that all processes share, and sends where things lie in it; the
slot is free again when the last tensor on it is gone. Where all slots are taken, or a batch is too
large for one, it goes torch's way, as does what is no `Batch`: slower, never wrong.

    memory    state of each slot (a page or more) | worker 0: slot 0, slot 1, ... | worker 1: ...
    state     FREE -> (worker) TAKEN -> (reader) FREE

The loader counts what it hands out.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from earmill.pipeline.loader.collate import (
    BATCH_TENSORS,
    Batch,
    Packed,
    Padded,
    allocating,
    takes_lent,
)
from earmill.pipeline.loader.epoch_order import check_whole
from earmill.pipeline.loader.stream import FeatureStream

if TYPE_CHECKING:
    from earmill.pipeline.loader.batches import EpochPlan
    from earmill.pipeline.loader.rows import Row

FREE, TAKEN = 0, 1
ALIGNED_BYTES = 64
# Pages that nothing was written to cost nothing; a slot beyond this is not worth a mapping.
MAX_SLOT_BYTES = 2**31

# Where a tensor lies in its slot: offset in bytes, dtype, shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]

_rings: weakref.WeakValueDictionary[str, BatchRing] = weakref.WeakValueDictionary()
PREFETCHED = 2
# Beside the batches that wait in the queue: one that is filled, and two in the loop's hands, as
# the one before is let go of only when the next is there.
MORE_SLOTS = 3
_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def can_share() -> bool:
    """Whether this system has shared memory without a name, which no limit of /dev/shm holds."""
    return hasattr(os, "memfd_create")


class BatchRing:
    """Slots that workers fill and one process reads.

    Args:
        workers: Processes that fill them. slots: Of each. slot_bytes: Of each slot.
    """

    def __init__(self, workers: int, slots: int, slot_bytes: int) -> None:
        page = mmap.PAGESIZE
        self._slots = slots
        self._head_bytes = -(-workers * slots // page) * page
        self.slot_bytes = -(-min(slot_bytes, MAX_SLOT_BYTES) // page) * page
        self._name = os.urandom(8).hex()
        total = self._head_bytes + workers * slots * self.slot_bytes
        fd = os.memfd_create("earmill-batches")
        os.ftruncate(fd, total)
        self._map(fd, total)

    def _map(self, fd: int, total: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._memory = np.frombuffer(mmap.mmap(fd, total), np.uint8)
        _rings[self._name] = self

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned: the mapping itself travels."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_fd", "_memory")}
        return state | {"_fd": reduction.DupFd(self._fd), "total": len(self._memory)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd, total = state.pop("_fd").detach(), state.pop("total")
        self.__dict__.update(state)
        self._map(fd, total)

    @contextmanager
    def slot(self, worker: int) -> Iterator[Slot | None]:
        """A free slot of a worker, in which collates put their tensors; None where none is."""
        mine = range(worker * self._slots, (worker + 1) * self._slots)
        free = next((number for number in mine if self._memory[number] == FREE), None)
        if free is None:
            yield None
            return
        found = Slot(self, free)
        with allocating(found.empty):
            yield found

    def bytes_of(self, number: int) -> np.ndarray:
        """The memory of a slot."""
        begin = self._head_bytes + number * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def take(self, number: int) -> None:
        """A worker: the slot holds a batch from here on."""
        self._memory[number] = TAKEN

    def opened(self, number: int) -> torch.Tensor:
        """The reader: a slot's bytes; free again when nothing uses them any more."""
        held = self.bytes_of(number)
        freed = weakref.finalize(held, _free, self._memory, number, os.getpid())
        freed.atexit = False
        return torch.from_numpy(held)


def _free(memory: np.ndarray, number: int, owner: int) -> None:
    """The last tensor on a slot is gone; in a fork of its owner that says nothing."""
    if os.getpid() == owner:
        memory[number] = FREE


class Slot:
    """One slot while a worker fills it."""

    def __init__(self, ring: BatchRing, number: int) -> None:
        self._ring, self._number, self._used = ring, number, 0
        self._bytes = torch.from_numpy(ring.bytes_of(number))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in the slot; None where no room is left."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        begin = -(-self._used // ALIGNED_BYTES) * ALIGNED_BYTES
        if begin + size > len(self._bytes):
            return None
        self._used = begin + size
        return self._bytes[begin : begin + size].view(dtype).view(tuple(shape))

    def sent(self, value: Any) -> Any:
        """What goes through the queue for a collated batch; None where it cannot lie here.

        Then it must be collated anew without a slot: parts of it may lie in this one, which the
        next batch writes over.
        """
        if not isinstance(value, Batch) or not _is_known(value):
            return None
        places: list[Place] = []
        for tensor in _parts(value):
            place = self._place(tensor)
            if place is None:
                return None
            places.append(place)
        self._ring.take(self._number)
        columns = {
            name: HERE if torch.is_tensor(each) else each for name, each in value.extra.items()
        }
        label = HERE if torch.is_tensor(value.label) else value.label
        named = {**_TENSORLESS, "extra": columns, "label": label}
        meta = replace(value, **named, features=_kinds(value.features))
        return _Sent(self._ring._name, self._number, meta, places)

    def _place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, copied here if it does not yet."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        inside = 0 <= offset and offset + tensor.nbytes <= self._used
        if not (inside and tensor.is_contiguous()):
            room = self.empty(tensor.shape, tensor.dtype)
            if room is None:
                return None
            room.copy_(tensor)
            offset = room.data_ptr() - self._bytes.data_ptr()
        return offset, tensor.dtype, tuple(tensor.shape)


class _Sent:
    """Pickles as the batch that lies in a slot."""

    def __init__(self, ring: str, slot: int, meta: Batch, places: list[Place]) -> None:
        self._args = ring, slot, meta, places

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        return _received, self._args


def _received(ring: str, slot: int, meta: Batch, places: Sequence[Place]) -> Batch:
    """The batch in the process that reads, on the memory that the worker wrote."""
    held = _rings[ring].opened(slot)
    tensors = iter(
        held[at : at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize].view(dtype).view(shape)
        for at, dtype, shape in places
    )
    named: dict[str, Any] = {name: next(tensors) for name in BATCH_TENSORS}
    named["extra"] = {k: next(tensors) if v == HERE else v for k, v in meta.extra.items()}
    named["label"] = next(tensors) if meta.label == HERE else meta.label
    features = {
        name: _joined(kind, [next(tensors) for _ in range(2)])
        for name, kind in meta.features.items()
    }
    return replace(meta, **named, features=features)


# In place of a column that lies in a slot; columns are tensors or lists.
HERE = "in the slot"
_TENSORLESS: dict[str, Any] = dict.fromkeys(BATCH_TENSORS)


def _is_known(batch: Batch) -> bool:
    """Whether every stream is of a form that collates here make."""
    return all(
        value.is_nested and value.layout == torch.jagged
        if isinstance(value, torch.Tensor)
        else type(value) in (Padded, Packed)
        for value in batch.features.values()
    )


def _parts(batch: Batch) -> list[torch.Tensor]:
    """Every tensor of a batch in the order in which they are received, two of each stream."""
    parts = [getattr(batch, name) for name in BATCH_TENSORS]
    parts += [each for each in (*batch.extra.values(), batch.label) if torch.is_tensor(each)]
    for value in batch.features.values():
        if isinstance(value, torch.Tensor):
            jagged: Any = value  # torch's stubs do not know nested tensors
            parts += [jagged.values(), jagged.offsets()]
        else:
            parts += [getattr(value, field.name) for field in fields(value)]
    return parts


def _kinds(features: Mapping[str, Any]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in features.items()}


def _joined(kind: str, parts: Sequence[torch.Tensor]) -> Any:
    made = {"Padded": Padded, "Packed": Packed}.get(kind)
    if made is not None:
        return made(*parts)
    lengths = parts[1].diff()
    return torch.nested.nested_tensor_from_jagged(
        parts[0], parts[1], min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )


class _Batches(IterableDataset[Any]):
    """Collated batches of a stream, in a process that reads."""

    def __init__(self, stream: FeatureStream, collate_fn: Callable[[list[Row]], Any]) -> None:
        self.stream, self.collate_fn = stream, collate_fn
        self.ring: BatchRing | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        lent = takes_lent(self.collate_fn)
        for rows in self.stream.worker_batches(worker, workers, lent=lent):
            read = list(rows)
            if self.ring is None:
                yield self.collate_fn(read)
            else:
                yield self._sent(self.ring, worker, read)

    def _sent(self, ring: BatchRing, worker: int, rows: list[Row]) -> Any:
        with ring.slot(worker) as slot:
            if slot is not None:
                batch = self.collate_fn(rows)
                if not isinstance(batch, Batch):
                    self.ring = None  # nor will the next ones be
                sent = slot.sent(batch)
                if sent is not None:
                    return sent
        return self.collate_fn(rows)


class FeatureLoader:
    """A DataLoader over a `FeatureStream` that knows how far it got, workers or not.

    Args:
        stream: It says what a batch is.
        num_workers: Reading processes; 0 reads in this one.
        collate_fn: One of `earmill.pipeline.loader.collate`, or any function of a list of rows;
            None takes that of the stream.
        device: Where batches are moved to; None leaves them in memory. Lightning moves them itself,
            accelerate those of its own loaders only: give it `accelerator.device`.
        options: Passed on to `torch.utils.data.DataLoader`; batches stay in order.
    Example:
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                ...
                checkpoint = {"data": loader.state_dict()}
    """

    def __init__(
        self,
        stream: FeatureStream,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Row]], Any] | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(stream, FeatureStream):
            raise TypeError(
                "expected a FeatureStream, as FeatureStream(ds, batch_size=8) makes it, got "
                f"{type(stream).__name__}"
            )
        if check_whole("num_workers", num_workers) < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}")
        if not (collate_fn is None or callable(collate_fn)):
            raise TypeError(f"collate_fn must be a function of a list of rows, got {collate_fn!r}")
        if not options.get("in_order", True):
            raise ValueError(
                "in_order=False would make positions meaningless; leave it out, or use a bare "
                "DataLoader without resume"
            )
        refused = [name for name in _OURS if name in options]
        if refused:
            raise TypeError(
                f"{refused[0]} is not an option of FeatureLoader: the stream says what a batch is; "
                "give ds.iterable(...) batch_size, batch_frames, shuffle or even"
            )
        self.stream, self._device = stream, device
        stream.is_in_loader = True
        self._batches = _Batches(stream, collate_fn or stream.collate_fn)
        self._slots = num_workers and (options.get("prefetch_factor") or PREFETCHED) + MORE_SLOTS
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            **options,
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return self.stream.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self.stream.n_batches

    def padding_share(self) -> float:
        """See `FeatureStream.padding_share`."""
        return self.stream.padding_share()

    def __iter__(self) -> Iterator[Any]:
        return self.stream.tracked(self._loaded)

    def _loaded(self, _: EpochPlan) -> Iterator[Any]:
        """Yield the batches of the DataLoader, on the device."""
        self._share_memory()
        for batch in self._loader:
            yield batch if self._device is None else batch.to(self._device, non_blocking=True)

    def set_epoch(self, epoch: int) -> None:
        """See `FeatureStream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, after the batches handed out so far."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FeatureStream.load_state_dict`; call it before iterating."""
        self.stream.load_state_dict(state)

    def _share_memory(self) -> None:
        """Slots for the workers of this epoch; those that stay keep theirs."""
        stays = self._loader.persistent_workers and self._batches.ring is not None
        if self._slots and can_share() and not stays:
            workers = self._loader.num_workers
            self._batches.ring = BatchRing(workers, self._slots, self.stream.batch_bytes())


def _as_it_is(batch: Any) -> Any:
    return batch
