"""Where a job's workers run: what the driver asks of an executor.

An executor opens a session: machines with cores and GPUs, and workers on them that are started,
called and killed. It knows nothing of shards, and the scheduler nothing of how a call travels: a
call that no worker answers any more is a `Lost`, whatever the executor's library makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from earmill.pipeline.common.machine import gpu_environment

if TYPE_CHECKING:
    from earmill.pipeline.driver.placement import ClusterView, Node, Placement
    from earmill.pipeline.spec.job import RunSpec
    from earmill.pipeline.worker.messages import Lost, Outcome, Runner

# glibc reads these when a process starts. Clips and features are megabytes that come and go:
# memory that goes back to the system each time costs more in page faults than it holds.
KEPT_MEMORY = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker to be started.

    Args:
        make_runner: Builds its work inside the process. place: Where, with how many threads.
        shards: Most shards that it is sent at a time.
    """

    make_runner: Callable[[], Runner]
    place: Placement
    shards: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set before anything heavy is imported."""
        return {"OMP_NUM_THREADS": str(self.place.threads)} | gpu_environment()


class Workers(Protocol):
    """The processes of one run; a worker and a call are whatever the executor has for them.

    The kinds of call are the methods of `ShardWorker`.
    """

    def start(self, index: int) -> Any:
        """Start the worker of a place; it is not warm yet."""

    def call(self, worker: Any, kind: str, *args: Any) -> Any:
        """Call a worker; what names the call. One whose process has died is started again."""

    def ended(
        self, calls: Collection[Any], timeout_s: float
    ) -> Iterable[tuple[Any, Outcome | Lost]]:
        """Calls that ended, with their results; returns after `timeout_s` at the latest."""

    def kill(self, worker: Any) -> None:
        """End a worker at once and for good."""


class Session(Protocol):
    """An executor at work."""

    @property
    def is_here(self) -> bool:
        """Whether its machines are this one, and no other."""

    def nodes(self) -> list[Node]:
        """The machines there were at the start."""

    def seen(self) -> ClusterView | None:
        """The machines there are now; None where none comes or goes, or nobody has looked yet."""

    def workers(self, hire: Callable[[int], WorkerRequest]) -> Workers:
        """Workers of the places that `hire` describes; none is started yet."""

    def check(self) -> None:
        """Asked at every tick of the driver loop.

        Raises:
            ClusterLost: What carries the workers is gone.
        """


class Executor(Protocol):
    """See the module."""

    @property
    def is_private(self) -> bool:
        """Whether workers are on this machine, and nobody else's."""

    def check(self, run: RunSpec) -> None:
        """What can be told at once: an address nobody listens at, a GPU that is not there."""

    def session(self, run: RunSpec, say: Callable[[str], None]) -> AbstractContextManager[Session]:
        """Start it, or join it; what was started is gone after the block.

        Args:
            say: Told what is waited for.
        """
