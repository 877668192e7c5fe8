"""Limit processes to some cores within a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Limit the threads of this process and its new children to its first `count` cores."""
    mine = sorted(os.sched_getaffinity(0))
    with _on(psutil.Process(), mine[:count]):
        yield


@contextmanager
def apart_from(other: psutil.Process) -> Iterator[None]:
    """Limit this process to its first core, and another process to the last."""
    with on_cores(1), _on(other, sorted(os.sched_getaffinity(other.pid))[-1:]):
        yield


@contextmanager
def _on(process: psutil.Process, cores: Sequence[int]) -> Iterator[None]:
    before = sorted(os.sched_getaffinity(process.pid))
    _allow(process, cores)
    try:
        yield
    finally:
        _allow(process, before)


def _allow(process: psutil.Process, cores: Sequence[int]) -> None:
    for thread in process.threads():
        with suppress(ProcessLookupError):  # the process has ended
            os.sched_setaffinity(thread.id, cores)
