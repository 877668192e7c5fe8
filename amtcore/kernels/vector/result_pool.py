"""Memory of large results of training, used again once nothing refers to it.

A fresh array of hundreds of megabytes costs more in page faults than most kernels take to fill it,
and a training step makes the same ones over and over. So a large result that is made while
gradients are recorded, or is one, gives its memory back to this module when its tensor dies, and
the next such result that fits gets it:

    empty() -> tensor -> .. -> last reference gone -> waiting, up to the limit -> empty()

What waits is dropped, oldest first, beyond the limit. Other results go back to the system at once,
unless the caller sets a limit: then it is for all. Compiled functions do not show that they record,
so of their results only gradients are kept. Memory comes from numpy, which asks the system for huge
pages.
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

#: From this size on, memory is kept.
LARGE_BYTES = 4 * 2**20
#: What may wait of a training step, unless the caller sets a limit.
TRAINING_BYTES = 2**30
_limit: int | None = None
_here = threading.local()
_lock = threading.Lock()
#: Oldest first; changed under the lock only. Dying tensors put theirs into `_returned`, as they may
#: die at any moment, even where this thread holds the lock.
_waiting: list[NDArray[np.uint8]] = []
_returned: deque[NDArray[np.uint8]] = deque()


def set_buffer_limit(nbytes: int) -> None:
    """Set how much memory of results that are gone stays with the process, for its next results.

    Args:
        nbytes: Bytes, 0 for none. Unless set: 1 GiB of what is made while gradients are recorded,
            nothing of other results.
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
    """Results that this thread makes inside belong to a training step."""
    outer, _here.training = _is_training(), True
    try:
        yield
    finally:
        _here.training = outer


def _is_training() -> bool:
    return getattr(_here, "training", False)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of any content on the CPU, with the dtype of `like`, aligned to cache lines."""
    dtype = like.new_empty(0).numpy().dtype
    size = math.prod(shape) * dtype.itemsize
    if size >= LARGE_BYTES and (_is_training() or _limit is not None):
        memory = np.asarray(_Lease(_take(size + CACHE_LINE)))
    else:
        memory = np.empty(size + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[skip : skip + size].view(dtype).reshape(shape))


class _Lease:
    """What arrays on a piece of memory refer to as long as one of them lives.

    numpy shortens chains of views to the array that owns the memory, but stops at other objects.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, _give_back, memory).atexit = False


def _take(size: int) -> NDArray[np.uint8]:
    """The smallest piece that waits and is large enough but not twice as large, else a new one."""
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
    """Let what came back wait, within the limit. Under the lock."""
    while _returned:
        _waiting.append(_returned.popleft())
    limit = TRAINING_BYTES if _limit is None else _limit
    while _waiting and sum(memory.nbytes for memory in _waiting) > limit:
        del _waiting[0]


def _forget() -> None:
    """A forked child has its own lock, and need not hold its parent's memory."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()
    _returned.clear()


os.register_at_fork(after_in_child=_forget)
