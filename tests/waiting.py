"""Wait for what other threads and processes bring about.

The deadline is far above any load of the machine. A test that meets the deadline has found
something that never comes or never ends, and says what was left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import psutil
import pytest

DEADLINE_S = 120.0
POLL_S = 0.01
T = TypeVar("T")


def wait_until(holds: Callable[[], T], what: str | Callable[[], object] = "") -> T:
    """Wait for a condition and return what made it true.

    Args:
        holds: The condition; true once it has come.
        what: For the message: what was waited for, or what is seen instead.
    """
    until = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        if time.monotonic() > until:
            pytest.fail(f"waited in vain: {what() if callable(what) else what}")
        time.sleep(POLL_S)
    return found


def nothing_is_left(find: Callable[[], Iterable[Any]]) -> None:
    """Wait until `find` finds nothing; fail with what it found last."""
    wait_until(lambda: not list(find()), lambda: f"still there: {list(find())}")


def process_rests() -> None:
    """Wait until this process computes nothing, as threads of earlier tests may."""

    def rests() -> bool:
        before_s = time.process_time()
        time.sleep(0.05)
        return time.process_time() - before_s < 0.005

    wait_until(rests, "a process that rests")


def threads_end(threads: Collection[Any]) -> None:
    """Wait for the end of threads, or of processes of multiprocessing."""
    nothing_is_left(lambda: [one for one in threads if one.is_alive()])


def processes_end(processes: Sequence[psutil.Process]) -> None:
    """Wait for the end of processes, whoever started them; a zombie has ended."""
    _, left = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert [one for one in left if _lives(one)] == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
