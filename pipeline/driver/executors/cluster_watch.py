"""Whether the Ray under a run is still there; asked at every tick of the driver loop.

Ray itself goes on for minutes without a word when its raylet has died: actors are started again
and wait for a node that never comes. A private Ray's processes are our children and are looked at;
of a joined cluster the nodes are asked for, in a thread, because the question may hang; what was
seen last is there for whoever follows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import psutil

from earmill.pipeline.common.errors import ClusterLost
from earmill.pipeline.driver.executors.ray_session import draining_nodes, useful_nodes
from earmill.pipeline.driver.placement import ClusterView
from earmill.pipeline.driver.summary import RESUME

PARTS = ("raylet", "gcs_server")
EVERY_S = 3.0
# A cluster that says nothing, or that this machine is no part of, for so long is gone.
SILENT_S = 45.0


class ClusterWatch:
    """Raises ClusterLost from `check` once Ray is gone.

    Args:
        parts: Processes without which a private Ray cannot go on.
        look: The cluster's nodes, None where this machine is none of them; may block or raise.
        clock: Monotonic seconds.
    Attributes:
        seen: What the last look saw; None before the first one, and always of a private Ray.
    """

    def __init__(
        self,
        parts: Sequence[psutil.Process],
        look: Callable[[], ClusterView | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._look, self._clock = parts, look, clock
        self.seen: ClusterView | None = None
        self._last_look = self._last_good = clock()
        self._asking: threading.Thread | None = None

    def check(self) -> None:
        """Look, every few seconds.

        Raises:
            ClusterLost: A part has died, or the cluster has been silent for too long.
        """
        now = self._clock()
        if now - self._last_look < EVERY_S:
            return
        self._last_look = now
        for part in self._parts:
            if not _runs(part):
                raise ClusterLost(f"Ray is gone: its process {part.pid} has died; {RESUME}")
        if self._parts:
            return
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, name="cluster-watch", daemon=True)
            self._asking.start()
        if now - self._last_good > SILENT_S:
            raise ClusterLost(
                f"the Ray cluster has been silent for {SILENT_S:.0f} s: its head or the node of "
                f"this machine is gone; {RESUME}"
            )

    def _ask(self) -> None:
        try:
            seen = self._look()
            if seen is not None:
                self.seen, self._last_good = seen, self._clock()
        except Exception:  # whatever Ray raises: silence is what counts
            return


def watch_ray(*, joined: bool) -> ClusterWatch:
    """A watch over the Ray that this process is connected to.

    Args:
        joined: It is a cluster with an address, whoever started it: nodes may come and go.
    """
    import ray

    me = str(ray.get_runtime_context().get_node_id())

    def look() -> ClusterView | None:
        entries = ray.nodes()
        if not any(entry["Alive"] and str(entry["NodeID"]) == me for entry in entries):
            return None
        return ClusterView(tuple(useful_nodes(entries)), draining_nodes())

    return ClusterWatch([] if joined else _parts(), look)


def _parts() -> list[psutil.Process]:
    """Ray's processes, where it is a private one."""
    return [child for child in psutil.Process().children() if child.name() in PARTS]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
