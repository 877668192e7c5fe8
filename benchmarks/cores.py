"""Fewer cores than this process has, for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """All threads of this process, and what they start, have its first so many cores."""
    mine = sorted(os.sched_getaffinity(0))
    _allow(mine[:count])
    try:
        yield
    finally:
        _allow(mine)


def _allow(cores: Sequence[int]) -> None:
    for thread in psutil.Process().threads():
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread.id, cores)
