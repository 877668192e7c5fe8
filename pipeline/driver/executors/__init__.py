"""The executors of a job's workers: processes of this machine, or Ray. An executor opens a session:
machines with cores and GPUs, and workers on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from earmill.pipeline.common.machine import GPU_VARIABLE
from earmill.pipeline.driver.placement import Node, Placement
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.shard_runner import ShardRunner

# glibc reads these when a process starts. Clips and features are megabytes that are allocated and
# freed again and again: to return them to the system each time costs more in page faults.
KEPT_MEMORY = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    make_runner: Callable[[], ShardRunner]  # Builds the worker's runner inside its process.
    place: Placement  # Node, threads and device of the worker.
    shards: int  # Most shards that it is sent at a time.

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set before anything large is imported."""
        # Workers of a cluster do not inherit the variable of the GPU's interpreter.
        inherited = {k: v for k, v in os.environ.items() if k == GPU_VARIABLE}
        return {"OMP_NUM_THREADS": str(self.place.threads)} | inherited


class Workers(Protocol):
    """The worker processes of one run; each executor has its own objects for a worker and a call.
    The kinds of call are the methods of `ShardWorker`."""

    def start(self, index: int) -> Any:
        """Start the worker of a place, and return it; it is not warm yet."""

    def call(self, worker: Any, kind: str, *args: Any) -> Any:
        """Call a worker, and return the call. A worker whose process has died is started again."""

    def ended(self, calls: Collection[Any], timeout_s: float) -> Iterable[tuple[Any, Outcome]]:
        """Return calls that ended, with their results, after `timeout_s` seconds at the latest."""

    def kill(self, worker: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    nodes: list[Node]
    workers: Callable[[Callable[[int], WorkerRequest]], Workers]  # From a description by index.
    # Returns the machines now; None if machines never come or go, or before the first look. Raises
    # ClusterLost if they are gone. Called at every tick of the driver loop.
    seen: Callable[[], Sequence[Node] | None] = lambda: None


class Executor(Protocol):
    def check(self, run: RunSpec) -> None:
        """Refuse at once an address that nobody listens at, or a GPU that is missing."""

    def session(self, run: RunSpec, say: Callable[[str], None]) -> AbstractContextManager[Session]:
        """Start or join the machines for the block; `say` takes a sentence about waiting."""


def executor_of(run: RunSpec) -> Executor:
    """Return the executor of a job. RAY_ADDRESS, which `ray job submit` sets, is ignored in a
    process that is connected to Ray already."""
    address = run.ray_address or (None if is_connected() else os.environ.get("RAY_ADDRESS"))
    if address in ("", "local"):
        address = None
    wants_ray = address is not None or is_connected()
    if run.executor == "ray" or (run.executor == "auto" and wants_ray):
        from earmill.pipeline.driver.executors.ray import RayExecutor

        return RayExecutor(address)
    # Each task of an array is a driver with workers on its machine.
    from earmill.pipeline.driver.executors.local import LocalExecutor

    return LocalExecutor()


def is_connected() -> bool:
    """Return True if this process is connected to Ray; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
