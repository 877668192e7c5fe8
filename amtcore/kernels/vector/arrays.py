"""Tensors as kernels take them: channels as lanes, rows of frames, and memory of large results.

Rows of frames lie an odd number of vectors apart. Rows a power of two apart would share a few cache
sets.

The page faults of a fresh array of hundreds of megabytes take longer than most kernels, and every
training step needs arrays of the same sizes. So memory of a large result returns to a pool when its
tensor is freed. Beyond a limit the oldest memory is freed. The pool takes gradients, and results
that are computed while gradients are recorded. If the caller sets a limit, the pool takes all large
results. Compiled functions do not show that they record, so only their gradients enter the pool.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.vector.simd import CACHE_LINE, LANES
from amtcore.kernels.vector.threads import parallel_for

Array = NDArray[Any]

#: Frames of one work item.
ITEM_FRAMES = 128
#: Smallest result that enters the pool.
LARGE_BYTES = 4 * 2**20
#: Size of the pool, unless the caller sets a limit.
TRAINING_BYTES = 2**30
_limit: int | None = None
_lock = threading.Lock()

#: The pool, oldest first, changed under the lock only. Freed tensors put memory into `_returned`,
#: because a tensor may be freed while its thread holds the lock.
_waiting: list[NDArray[np.uint8]] = []
_returned: deque[NDArray[np.uint8]] = deque()


class _Here(threading.local):
    """The mark of a thread that computes a step of training."""

    training = False


_here = _Here()


def groups_of(channels: int) -> int:
    """Return the number of lane groups for this many channels."""
    return -(-channels // LANES)


def pack(values: Tensor) -> Tensor:
    """(.., channel, value) -> (.., group, value * LANES); missing channels repeat the last one."""
    channels = values.shape[-2]
    groups = groups_of(channels)
    wanted = torch.arange(groups * LANES, device=values.device).clamp(max=channels - 1)
    lanes = values.detach()[..., wanted, :].unflatten(-2, (groups, LANES)).transpose(-1, -2)
    return lanes.flatten(-2).contiguous()


def unpack(packed: Tensor, channels: int) -> Tensor:
    """The inverse of `pack`: (.., group, value * LANES) -> (.., channel, value)."""
    values = packed.shape[-1] // LANES
    lanes = packed.unflatten(-1, (values, LANES)).transpose(-1, -2)
    return lanes.flatten(-3, -2)[..., :channels, :].contiguous()


def over_frames(one: Callable[[int, int], None], frames: int) -> None:
    """Call `one(begin, end)` on the pool for ranges of frames, rounded up to whole vectors."""
    padded = frames + -frames % LANES

    def item(i: int) -> None:
        one(i * ITEM_FRAMES, min((i + 1) * ITEM_FRAMES, padded))

    parallel_for(item, -(-padded // ITEM_FRAMES))


def new_rows(values: int, frames: int) -> tuple[Array, int, Tensor]:
    """Allocate `values` rows of whole vectors of frames.

    Returns the flat array, the distance of rows, and a view (frame, value) without padding.
    """
    vectors = -(-frames // LANES)
    pitch = (vectors + 1 - vectors % 2) * LANES
    rows = np.empty((values, pitch), np.float32)
    return rows.reshape(-1), pitch, torch.from_numpy(rows).T[:frames]


def rows_of(x: Tensor) -> tuple[Array, int]:
    """Return (frame, value) as flat rows, and their distance; a view if x has that layout."""
    frames, values = x.shape
    if x.stride(0) == 1 and frames % LANES == 0 and x.stride(1) >= frames:
        size = (values - 1) * x.stride(1) + frames if x.numel() else 0
        return x.as_strided((size,), (1,)).numpy(), x.stride(1)
    flat, pitch, rows = new_rows(values, frames)
    flat.reshape(values, pitch)[:, frames:] = 0.0
    rows.copy_(x)
    return flat, pitch


def set_buffer_limit(nbytes: int) -> None:
    """Set how much memory of freed results the process keeps for its next results.

    Args:
        nbytes: Bytes, 0 for none. By default 1 GiB for results that are computed while gradients
            are recorded, and nothing for other results.
    """
    global _limit
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 0:
        raise ParameterError(f"the limit must be a whole number, 0 bytes or more, got {nbytes!r}")
    nbytes = int(nbytes)
    with _lock:
        _limit = nbytes
        _settle()


@contextmanager
def training() -> Iterator[None]:
    """Mark results that this thread computes within the context as part of a training step."""
    outer, _here.training = _here.training, True
    try:
        yield
    finally:
        _here.training = outer


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate a tensor with the dtype and device of `like`, on a CPU aligned to cache lines."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    dtype = like.new_empty(0).numpy().dtype
    size = math.prod(shape) * dtype.itemsize
    memory = None
    if size >= LARGE_BYTES and (_here.training or _limit is not None):
        memory = np.asarray(_BufferOwner(_take(size + CACHE_LINE)))
    return torch.from_numpy(aligned_array(math.prod(shape), dtype, memory).reshape(shape))


def aligned_array(count: int, dtype: np.dtype[Any], memory: Array | None = None) -> Array:
    """Return `count` numbers that begin a cache line, in this memory or in new memory."""
    size = count * dtype.itemsize
    if memory is None:
        memory = np.empty(size + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + size].view(dtype)


class _BufferOwner:
    """The base object of all arrays on a piece of memory, freed with the last array.

    Chains of numpy's views are shortened to the owner of the memory, but not past this object.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, _give_back, memory).atexit = False


def _take(size: int) -> NDArray[np.uint8]:
    """Return the smallest fitting memory of the pool, less than twice `size`, or new memory."""
    with _lock:
        _settle()
        fitting = [(m.nbytes, i) for i, m in enumerate(_waiting) if size <= m.nbytes < 2 * size]
        if fitting:
            return _waiting.pop(min(fitting)[1])
    return np.empty(size, np.uint8)


def _give_back(memory: NDArray[np.uint8]) -> None:
    _returned.append(memory)
    if _lock.acquire(blocking=False):
        try:
            _settle()
        finally:
            _lock.release()


def _settle() -> None:
    """Move returned memory to the pool, within the limit. The caller holds the lock."""
    while _returned:
        _waiting.append(_returned.popleft())
    limit = TRAINING_BYTES if _limit is None else _limit
    while _waiting and sum(memory.nbytes for memory in _waiting) > limit:
        del _waiting[0]


def _forget() -> None:
    """Give a forked child its own lock and an empty pool."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()
    _returned.clear()


os.register_at_fork(after_in_child=_forget)
