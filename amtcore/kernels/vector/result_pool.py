"""A pool of memory for large results of training steps.

The page faults of a fresh array of hundreds of megabytes take longer than most kernels, and every
training step needs arrays of the same sizes. So memory of a large result returns to this pool when
its tensor is freed. Beyond a limit the oldest memory is freed.

The pool takes gradients, and results that are computed while gradients are recorded. If the caller
sets a limit, the pool takes all large results. Compiled functions do not show that they record, so
only their gradients enter the pool.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.vector.memory import CACHE_LINE

#: Smallest result that enters the pool.
LARGE_BYTES = 4 * 2**20
#: Size of the pool, unless the caller sets a limit.
TRAINING_BYTES = 2**30
_limit: int | None = None
_here = threading.local()
_lock = threading.Lock()
#: The pool, oldest first, changed under the lock only. Freed tensors put memory into `_returned`,
#: because a tensor may be freed while its thread holds the lock.
_waiting: list[NDArray[np.uint8]] = []
_returned: deque[NDArray[np.uint8]] = deque()


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
    outer, _here.training = _is_training(), True
    try:
        yield
    finally:
        _here.training = outer


def _is_training() -> bool:
    return getattr(_here, "training", False)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate a CPU tensor with the dtype of `like`, aligned to cache lines."""
    dtype = like.new_empty(0).numpy().dtype
    size = math.prod(shape) * dtype.itemsize
    if size >= LARGE_BYTES and (_is_training() or _limit is not None):
        memory = np.asarray(_BufferOwner(_take(size + CACHE_LINE)))
    else:
        memory = np.empty(size + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[skip : skip + size].view(dtype).reshape(shape))


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
        fitting = [i for i, memory in enumerate(_waiting) if size <= memory.nbytes < 2 * size]
        if fitting:
            return _waiting.pop(min(fitting, key=lambda i: _waiting[i].nbytes))
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
