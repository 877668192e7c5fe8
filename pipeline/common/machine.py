"""What computes here: the processor's name, and the cores this process may use."""

from __future__ import annotations

import os
import platform
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
