"""The machine and this process: processor, cores, thread pools, GPU.

Setting `AMTCORE_GPU=interpreted` replaces the GPU's driver by an interpreter of the compiled
kernels. So a GPU job can be tried on a machine without a GPU. `is_interpreted` asks for it without
torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

# File of cgroup v2: quota and period in µs, or "max".
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@lru_cache(maxsize=1)
def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the standard library has a shorter name
    return platform.processor() or platform.machine()


def cores(cpu_max: Path = CPU_MAX) -> int:
    """Return the cores that a batch system, `taskset` or a container leaves to this process."""
    is_linux = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    try:
        quota, period = map(int, cpu_max.read_text().split())
        return min(count, max(1, quota // period))
    except (OSError, ValueError, ZeroDivisionError):
        return count  # no container, or one without a limit


class Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that cancels waiting work when its `with` block raises."""

    def __exit__(self, kind: object, *raised: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


def run_python(what: str, code: str, given: bytes = b"") -> bytes:
    """Run code in a process of its own, whose imports take no memory here; return its output for
    the input `given`. ChildProcessError, with `what` it does ("builds the models"), if it fails."""
    path = "import sys; sys.path[:] = sys.argv[1:]"
    done = subprocess.run(
        [sys.executable, "-c", f"{path}; {code}", *sys.path],
        input=given,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which ends the other
    )
    if done.returncode:
        raise ChildProcessError(
            f"the process that {what} ended with {done.returncode}; what it wrote to standard "
            "error says why"
        )
    return done.stdout


GPU_VARIABLE = "AMTCORE_GPU"
INTERPRETED = "interpreted"


def is_interpreted() -> bool:
    """Return True if "cuda" means the interpreter in this process."""
    return os.environ.get(GPU_VARIABLE) == INTERPRETED
