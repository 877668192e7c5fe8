"""A DataLoader over a `FeatureStream`: batches in shared memory, and a position to resume at.

torch sends every tensor through a new piece of shared memory, which costs more than reading batches
of megabytes. Here a worker collates into a slot of one mapping that all processes share, and sends
the places of tensors in the slot. The slot is free again when its last tensor is gone. A batch is
sent in torch's way if no slot is free, if it is too large for a slot, or if it is no `Batch`.

    memory    state of each slot (a page or more) | worker 0: slot 0, slot 1, ... | worker 1: ...
    state     FREE -> (worker) TAKEN -> (reader) FREE
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from multiprocessing import reduction
from pickle import Unpickler
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from earmill.pipeline.loader.batches import EpochPlan
from earmill.pipeline.loader.collate import Batch, takes_views
from earmill.pipeline.loader.epoch_order import check_whole
from earmill.pipeline.loader.rows import Row
from earmill.pipeline.loader.stream import FeatureStream

FREE, TAKEN = 0, 1
ALIGNED_BYTES = 64
# Unused pages of a slot cost no memory. A larger slot is not worth a mapping.
MAX_SLOT_BYTES = 2**31

# Offset of a tensor in its slot in bytes, its dtype and shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]

_rings: weakref.WeakValueDictionary[str, BatchRing] = weakref.WeakValueDictionary()
PREFETCHED = 2
# Slots beside the queue: one is filled, and a loop frees its batch only once it has the next one.
MORE_SLOTS = 3
_STREAM_OPTIONS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def can_share() -> bool:
    """Return True if the system has anonymous shared memory, which /dev/shm does not limit."""
    return hasattr(os, "memfd_create")


class BatchRing:
    """Slots that workers fill and one process reads."""

    def __init__(self, workers: int, slots: int, slot_bytes: int) -> None:
        page = mmap.PAGESIZE
        self._slots = slots
        self._head_bytes = -(-workers * slots // page) * page
        self.slot_bytes = -(-min(slot_bytes, MAX_SLOT_BYTES) // page) * page
        self.name = os.urandom(8).hex()
        total = self._head_bytes + workers * slots * self.slot_bytes
        fd = os.memfd_create("earmill-batches")
        os.ftruncate(fd, total)
        self._map(fd, total)

    def _map(self, fd: int, total: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._memory = np.frombuffer(mmap.mmap(fd, total), np.uint8)
        _rings[self.name] = self

    def __getstate__(self) -> dict[str, Any]:
        """Send the mapping itself to a spawned worker."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_fd", "_memory")}
        return state | {"_fd": reduction.DupFd(self._fd), "total": len(self._memory)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd, total = state.pop("_fd").detach(), state.pop("total")
        self.__dict__.update(state)
        self._map(fd, total)

    def slot(self, worker: int) -> Slot | None:
        """Return a free slot of a worker; None if no slot is free."""
        mine = range(worker * self._slots, (worker + 1) * self._slots)
        free = next((number for number in mine if self._memory[number] == FREE), None)
        return None if free is None else Slot(self, free)

    def bytes_of(self, number: int) -> np.ndarray:
        begin = self._head_bytes + number * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def take(self, number: int) -> None:
        self._memory[number] = TAKEN

    def opened(self, number: int) -> torch.Tensor:
        """Return the bytes of a full slot, in the reader; the last user of the bytes frees it."""
        held = self.bytes_of(number)
        freed = weakref.finalize(held, _free, self._memory, number, os.getpid())
        freed.atexit = False
        return torch.from_numpy(held)


def _free(memory: np.ndarray, number: int, owner: int) -> None:
    """Free a slot whose last tensor is gone, but not in a fork of its owner."""
    if os.getpid() == owner:
        memory[number] = FREE


class Slot(reduction.ForkingPickler):
    """One slot while a worker fills it. Pickles a batch; places in the slot stand for its tensors,
    two for a jagged tensor."""

    def __init__(self, ring: BatchRing, number: int) -> None:
        self._content = BytesIO()
        super().__init__(self._content)
        self._ring, self._number, self._used = ring, number, 0
        self._bytes = torch.from_numpy(ring.bytes_of(number))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor in the slot; None if there is no room left."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        begin = -(-self._used // ALIGNED_BYTES) * ALIGNED_BYTES
        if begin + size > len(self._bytes):
            return None
        self._used = begin + size
        return self._bytes[begin : begin + size].view(dtype).view(tuple(shape))

    def sent(self, batch: Any) -> _Sent | None:
        """Return the message for a batch in this slot; None if it must be collated without one."""
        try:
            self.dump(batch)
        except _NoPlaceError:
            return None
        self._ring.take(self._number)
        return _Sent(self._ring.name, self._number, self._content.getvalue())

    def persistent_id(self, value: Any) -> list[Place] | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_nested and value.layout == torch.jagged:
            jagged: Any = value  # torch's stubs do not know nested tensors
            return [self.place(jagged.values()), self.place(jagged.offsets())]
        return [self.place(value)]

    def place(self, tensor: torch.Tensor) -> Place:
        """Return the place of a tensor in the slot; copy the tensor if it lies elsewhere."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise _NoPlaceError
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        inside = 0 <= offset and offset + tensor.nbytes <= self._used
        if not (inside and tensor.is_contiguous()):
            room = self.empty(tensor.shape, tensor.dtype)
            if room is None:
                raise _NoPlaceError
            room.copy_(tensor)
            offset = room.data_ptr() - self._bytes.data_ptr()
        return offset, tensor.dtype, tuple(tensor.shape)


class _NoPlaceError(Exception):
    """A tensor cannot lie in the slot."""


class _Unpickler(Unpickler):
    """Unpickles a batch, with views of the memory that the worker wrote for its tensors."""

    def __init__(self, memory: torch.Tensor, content: bytes) -> None:
        super().__init__(BytesIO(content))
        self._memory = memory

    def persistent_load(self, places: list[Place]) -> torch.Tensor:
        parts = [
            self._memory[at : at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for at, dtype, shape in places
        ]
        if len(parts) == 1:
            return parts[0]
        values, offsets = parts
        lengths = offsets.diff()
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
        )


class _Sent:
    """The message for a batch in a slot; it unpickles as the batch."""

    def __init__(self, ring: str, slot: int, content: bytes) -> None:
        self._args = ring, slot, content

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[str, int, bytes]]:
        return _received, self._args


def _received(ring: str, slot: int, content: bytes) -> Any:
    return _Unpickler(_rings[ring].opened(slot), content).load()


class _Batches(IterableDataset[Any]):
    """Collated batches of a stream, in a reading process."""

    def __init__(self, stream: FeatureStream, collate_fn: Callable[..., Any]) -> None:
        self.stream, self.collate_fn = stream, collate_fn
        self.ring: BatchRing | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            # Arrow's default pool returns memory at once: each row group would touch new pages.
            pa.set_memory_pool(pa.system_memory_pool())
        views = takes_views(self.collate_fn)
        for rows in self.stream.worker_batches(worker, workers, views=views):
            read = list(rows)
            if self.ring is None:
                yield self.collate_fn(read)
            else:
                yield self._sent(self.ring.slot(worker), read, views)

    def _sent(self, slot: Slot | None, rows: list[Row], is_ours: bool) -> Any:
        if slot is not None:
            batch = self.collate_fn(rows, **({"allocate": slot.empty} if is_ours else {}))
            if not isinstance(batch, Batch):
                self.ring = None  # this collate never makes a Batch
            elif (sent := slot.sent(batch)) is not None:
                return sent
        return self.collate_fn(rows)


class FeatureLoader:
    """A DataLoader over a `FeatureStream` that counts what it hands out, with or without workers.

    Args:
        stream: The stream, whose settings define a batch.
        num_workers: Reading processes; 0 reads in this process.
        collate_fn: A collate of `earmill.pipeline.loader.collate`, or any function of a list of
            rows; None takes the collate of the stream.
        device: Device for batches; None leaves them in memory. Lightning moves batches itself.
            accelerate moves batches of its own loaders only: pass `accelerator.device`.
        options: Options of `torch.utils.data.DataLoader`; batches stay in order.
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
        refused = [name for name in _STREAM_OPTIONS if name in options]
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
            self._batches, batch_size=None, num_workers=num_workers, collate_fn=_as_it_is, **options
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating reads."""
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
        # Slots are made anew in each epoch, unless the workers stay.
        stays = self._loader.persistent_workers and self._batches.ring is not None
        if self._slots and can_share() and not stays:
            workers = self._loader.num_workers
            self._batches.ring = BatchRing(workers, self._slots, self.stream.batch_bytes())
        for batch in self._loader:
            yield batch if self._device is None else batch.to(self._device, non_blocking=True)

    def set_epoch(self, epoch: int) -> None:
        """See `FeatureStream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank after the batches handed out so far."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FeatureStream.load_state_dict`; call it before iterating."""
        self.stream.load_state_dict(state)


def _as_it_is(batch: Any) -> Any:
    return batch
