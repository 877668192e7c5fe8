"""Workers as actors of Ray: on this machine, or on the nodes of a cluster that is joined."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from earmill.pipeline.common.text import named_line
from earmill.pipeline.driver.executors.ray_session import (
    check_address,
    is_here,
    is_joined,
    is_named,
    is_private,
    live_nodes,
    ray_session,
    wait_for_nodes,
)
from earmill.pipeline.driver.placement import ClusterView, Node, check_seats
from earmill.pipeline.worker.device import check_gpu
from earmill.pipeline.worker.messages import LostCall, Outcome

if TYPE_CHECKING:
    from ray.exceptions import ActorDiedError

    from earmill.pipeline.driver.executors.base import Hire
    from earmill.pipeline.spec.job import RunSpec


class RayExecutor:
    """See the module.

    Args:
        address: Cluster to join; None takes RAY_ADDRESS, else a private Ray is started.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    @property
    def is_private(self) -> bool:
        """Whether a Ray of our own is started."""
        return is_private(self._address)

    def check(self, run: RunSpec) -> None:
        """Whether the cluster can be reached; `cuda` is refused where nothing can bring a GPU any
        more: a cluster that is joined may grow.

        Raises:
            ClusterError: Nobody listens there.
            DeviceError: This machine, or the Ray this process is connected to, has no GPU.
        """
        check_address(self._address)
        if run.device != "cuda":
            return
        if self.is_private:
            check_gpu()
        elif not is_named(self._address):
            check_seats(live_nodes(), run)

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[RaySession]:
        """Ray is initialised inside the block.

        Raises:
            RunStopped: It cannot be started, or offers no node in time.
        """
        with ray_session(self._address):
            joined = is_joined(self._address)
            yield RaySession(wait_for_nodes(run, say, joined=joined), joined=joined)


class RaySession:
    """Ray's nodes and actors.

    Args:
        nodes: Those it began with.
        joined: It is a cluster that others may add nodes to, and take them from.
    """

    def __init__(self, nodes: list[Node], *, joined: bool) -> None:
        from earmill.pipeline.driver.executors.cluster_watch import watch_ray

        self._nodes, self._was_here = nodes, is_here(nodes)
        self._watch = watch_ray(joined=joined)
        self.check = self._watch.check

    @property
    def is_here(self) -> bool:
        """Whether its nodes are this machine, and no other has joined since."""
        seen = self._watch.seen
        return self._was_here and (seen is None or is_here(seen.nodes))

    def seen(self) -> ClusterView | None:
        """The nodes of a cluster that is joined, as of a few seconds ago."""
        return self._watch.seen

    def nodes(self) -> list[Node]:
        """The nodes there were at the start."""
        return self._nodes

    def workers(self, hire: Callable[[int], Hire]) -> RayWorkers:
        """Actors; see `Session`."""
        return RayWorkers(hire)


class RayWorkers:
    """Actors as `Workers`: Ray starts one whose process has died again by itself.

    Args:
        hire: Describes the worker of a place.
    """

    def __init__(self, hire: Callable[[int], Hire]) -> None:
        self._hire = hire

    def start(self, index: int) -> Any:
        """An actor on the node of its place, or another one where that is gone."""
        from earmill.pipeline.worker.actor import spawn_worker

        hire = self._hire(index)
        return spawn_worker(
            hire.make_runner,
            environment=hire.environment,
            num_cpus=hire.place.num_cpus,
            num_gpus=hire.place.num_gpus,
            shards=hire.shards,
            node_id=hire.place.node_id or None,
        )

    def call(self, worker: Any, kind: str, *args: Any) -> Any:
        """The reference to the answer."""
        from earmill.pipeline.worker.actor import call_worker

        return call_worker(worker, kind, *args)

    def ended(
        self, calls: Collection[Any], timeout_s: float
    ) -> Iterator[tuple[Any, Outcome | LostCall]]:
        """Those among the references whose answers are there."""
        import ray

        refs = list(calls)
        first, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if not first:
            return
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            yield ref, _result(ref)

    def kill(self, worker: Any) -> None:
        """Kill the actor for good."""
        import ray

        ray.kill(worker, no_restart=True)

    def others_cpu_s(self, pids: Collection[int]) -> dict[int, float]:
        """CPU seconds of the processes below this one that are no workers: a private Ray's."""
        found = {}
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            if process.pid not in pids:
                found[process.pid] = times.user + times.system
        return found


def _result(ref: Any) -> Outcome | LostCall:
    import ray
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        OutOfMemoryError,
        RayError,
        RayTaskError,
    )

    try:
        outcome: Outcome = ray.get(ref)
    except ActorUnavailableError:
        return LostCall("the worker process died", restarting=True)
    except ActorDiedError as error:
        return LostCall(f"the worker process died: {_cause(error)}")
    except RayTaskError as error:
        # The process lives, but the call never reached our own guard: unpickling, for one.
        return Outcome(ok=False, stage="rows", message=named_line(error.cause or error))
    except RayError as error:
        # Killed for memory, node gone, and whatever else Ray calls a lost task.
        return LostCall(named_line(error), memory=isinstance(error, OutOfMemoryError))
    return outcome


def _cause(error: ActorDiedError) -> str:
    """The line of Ray's long message that says why; an import error in the worker, for one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"
