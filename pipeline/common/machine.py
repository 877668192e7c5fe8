"""The machine and this process: processor, cores, thread pools, garbage collection, GPU.

`is_interpreted` tells, without torch, whether an interpreter stands in for the GPU.
`AMTCORE_GPU=interpreted` puts the interpreter of the compiled kernels where their driver would be;
all else of a job on a GPU stays as it is, so that it can be tried on a machine without one.
"""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

# Of cgroup v2: quota and period in µs, or "max".
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@lru_cache(maxsize=1)
def processor_name() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the standard library knows less, but something
    return platform.processor() or platform.machine()


def cores(cpu_max: Path = CPU_MAX) -> int:
    """Cores that this process may use, at least 1: those that a batch system, `taskset` or a
    container's quota leaves it."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return min(found, _quota(cpu_max) or found)


def _quota(cpu_max: Path) -> int | None:
    """Whole cores that a container may use; None without a limit."""
    try:
        quota, period = cpu_max.read_text().split()
        return int(quota) // int(period) or 1
    except (OSError, ValueError, ZeroDivisionError):
        return None


class Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that drops what nobody has begun when its `with` block raises.

    Python's own carries out all that was submitted first: after Ctrl-C, hours of it.
    """

    def __exit__(self, kind: object, *raised: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


@contextmanager
def what_is_made_stays() -> Iterator[None]:
    """No garbage is looked for inside, nor later among what was made inside.

    All that a warm worker holds stays. Looking for garbage in it takes a sixth of its start, and a
    first collection that came afterwards would take as long, out of the time of some row.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


GPU_VARIABLE = "AMTCORE_GPU"
INTERPRETED = "interpreted"


def is_interpreted() -> bool:
    """Whether "cuda" means the interpreter in this process."""
    return os.environ.get(GPU_VARIABLE) == INTERPRETED


def gpu_environment() -> dict[str, str]:
    """What a worker's environment must say of it: processes of a joined cluster have their own."""
    return {GPU_VARIABLE: os.environ[GPU_VARIABLE]} if GPU_VARIABLE in os.environ else {}
