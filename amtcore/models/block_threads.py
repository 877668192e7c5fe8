"""Blocks of a signal side by side on threads, when no gradient is asked for.

A block is many small matrix products: on torch's own threads two of them mostly wait for each
other, so each block has one thread to itself. Like the kernels' threads these flush denormals.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..recurrence.threads import get_num_threads

In = TypeVar("In")
Out = TypeVar("Out")

_lock = threading.Lock()
_pool: tuple[int, ThreadPoolExecutor] | None = None


def _forget() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _prepare_thread() -> None:
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)


def _get_pool(threads: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool[0] != threads:
            pool = ThreadPoolExecutor(threads, "amtcore-blocks", initializer=_prepare_thread)
            _pool = threads, pool
        return _pool[1]


def can_share() -> bool:
    """Whether blocks may go to threads: gradients and compilation record one thread only."""
    return (
        not torch.compiler.is_compiling() and not torch.is_grad_enabled() and get_num_threads() > 1
    )


def map_blocks(function: Callable[[In], Out], blocks: Sequence[In]) -> list[Out]:
    """`function` of every block, in order."""
    if not can_share():
        return [function(block) for block in blocks]

    def run(block: In) -> Out:
        with torch.no_grad():
            return function(block)

    own = torch.get_num_threads()
    results = list(_get_pool(get_num_threads()).map(run, blocks))
    # A thread that starts with one torch thread makes that the default of later ones: undo it.
    torch.set_num_threads(own)
    return results
