"""The threads that kernels run on.

Kernels release the interpreter lock, so a thread pool suffices: no OpenMP runtime that breaks after
a fork. Pool threads flush denormals to zero. In silence the filters' states decay into that range,
where the processor is a hundred times slower. Torch functions on these threads use one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from amtcore.errors import ParameterError

T = TypeVar("T")
Work = Callable[[], None]
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads = 0
_of_torch = 0  # torch's number while `one_torch_thread` hides it
_local = threading.local()
#: Wraps the work of a call of `parallel_for` for the threads of the pool, see `set_carrier`.
_carrier: Callable[[Work], Work] | None = None


def get_num_threads() -> int:
    """Return the number of threads that kernels use: as set, else torch's number."""
    return _threads or _of_torch or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch's functions on the caller's thread alone, kernels on as many as before.

    Between short functions torch's own threads spin and would take cores from the kernels.
    """
    global _of_torch
    own, before = torch.get_num_threads(), _of_torch
    _of_torch = before or own
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)
        _of_torch = before


def set_num_threads(threads: int) -> None:
    """Set how many threads kernels of this process use (1 or more)."""
    global _threads, _pool
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or threads < 1:
        raise ParameterError(f"threads must be a whole number, 1 or more, got {threads!r}")
    threads = int(threads)
    with _lock:
        if threads != _threads:
            _threads, _pool = threads, None


def set_carrier(carrier: Callable[[Work], Work]) -> None:
    """Wrap the work of each later call of `parallel_for`, to count its CPU time for the caller.

    Args:
        carrier: Called on the caller's thread; the function it returns runs on each pool thread.
    """
    global _carrier
    _carrier = carrier


def _forget() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _prepare_thread() -> None:
    _local.in_pool = True
    torch.set_flush_denormal(True)
    # A thread's first read of its thread count takes the process's: read before setting it.
    torch.get_num_threads()
    torch.set_num_threads(1)


def _get_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(get_num_threads(), "amtcore", _prepare_thread)
        return _pool


def parallel_for(function: Callable[[int], None], count: int) -> None:
    """Call `function(i)` for i in 0..count-1 on the pool; the failure of the least i is re-raised.

    Each thread takes the next number from a shared iterator, since a task for each number would
    wake a thread each time. A call from a pool thread runs on that thread.
    """
    if getattr(_local, "in_pool", False):
        for i in range(count):
            function(i)
        return
    numbers, failures = iter(range(count)), dict[int, BaseException]()

    def take() -> None:
        for i in numbers:
            try:
                function(i)
            except BaseException as error:
                failures[i] = error
                return

    own, pool = torch.get_num_threads(), _get_pool()
    work = take if _carrier is None else _carrier(take)
    wait([pool.submit(work) for _ in range(min(count, get_num_threads()))])
    # A thread that starts with one torch thread makes that the default of later ones: undo it.
    torch.set_num_threads(own)
    if failures:
        raise failures[min(failures)]


def parallel_map(function: Callable[[int], T], count: int) -> list[T]:
    """Return `function(i)` for i in 0..count-1, computed as `parallel_for` does."""
    made: dict[int, T] = {}

    def run(i: int) -> None:
        made[i] = function(i)

    parallel_for(run, count)
    return [made[i] for i in range(count)]
