"""Starting or joining Ray, and nothing that outlives the run.

An address (argument or RAY_ADDRESS) joins a running cluster, an initialised Ray is used as it is,
else a private Ray starts on 127.0.0.1 without a dashboard and is stopped again. Ray's own messages
never reach standard output: they would break the progress bar and the JSON lines.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from earmill.pipeline.common.errors import EarmillError, RunStopped, SpecError
from earmill.pipeline.common.machine import is_interpreted
from earmill.pipeline.common.text import one_line
from earmill.pipeline.driver.executors.base import KEPT_MEMORY
from earmill.pipeline.driver.executors.private_ray import private_ray, shut_down
from earmill.pipeline.driver.placement import Node

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import RunSpec

CONNECT_TIMEOUT_S = 5.0
NODES_WITHIN_S = 600.0
NODES_POLL_S = 2.0
QUIET: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
# Ray prints news from other processes in these threads of the driver.
RAY_PRINTER_THREADS = ("ray_listen_error_messages", "ray_print_logs")
# Set before Ray is first imported. The second one, despite its name, decides on every system
# whether a private Ray binds to the loopback address (0) or to all of them. The fourth is how many
# processes Ray keeps for tasks that never come; one that waits wakes a hundred times a second. The
# last two are what Ray notes of itself and its tasks for a dashboard, which a private one has not:
# a third of the CPU time that its processes take beside a job.
PRIVATE_RAY_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_num_workers_soft_limit": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
} | KEPT_MEMORY


class ClusterError(EarmillError, ConnectionError):
    """The Ray cluster named by the caller cannot be joined."""

    help_topic = "ray"
    exit_code = 2


class _WithoutRayThreads:
    """A stand-in for a text stream that drops what Ray's printer threads write."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        if threading.current_thread().name in RAY_PRINTER_THREADS:
            return len(text)
        return self._inner.write(text)

    def __getattr__(self, name: str) -> Any:
        # flush, encoding, isatty and the rest are those of the real stream.
        return getattr(self._inner, name)


@contextmanager
def quiet_streams() -> Iterator[None]:
    """Keep Ray's advice and its messages from other processes off the standard streams."""
    before = sys.stdout, sys.stderr
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    sys.stdout = cast(TextIO, _WithoutRayThreads(before[0]))
    sys.stderr = cast(TextIO, _WithoutRayThreads(before[1]))
    try:
        yield
    finally:
        logger.setLevel(level)
        sys.stdout, sys.stderr = before


def is_joined(address: str | None = None) -> bool:
    """Whether `ray_session` joins a cluster that others may add nodes to."""
    import ray

    return ray.is_initialized() and is_named(address)


def is_named(address: str | None = None) -> bool:
    """Whether the caller, or the environment, names a cluster."""
    return _wanted(address) not in (None, "local")


def is_private(address: str | None = None) -> bool:
    """Whether `ray_session` starts a Ray of our own, of this machine alone."""
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    return not connected and not is_named(address)


def check_address(address: str | None = None) -> None:
    """Whether the cluster that `ray_session` would join can be reached; at no cost without one.

    Ray itself would try for minutes, and fill the terminal meanwhile.

    Raises:
        ClusterError: Nobody listens there, or it is no address of a Ray cluster.
    """
    wanted = _wanted(address)
    if wanted in (None, "auto", "local"):
        return
    host, _, port = str(wanted).rpartition(":")
    if "://" in str(wanted) or not host or not port.isdigit():
        raise ClusterError(
            f"expected a Ray cluster as host:port or auto, got {wanted}; take the address that "
            "`ray start --head` prints, not that of a dashboard or of a Ray client server"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _unreachable(str(wanted), error) from error


def _wanted(address: str | None) -> str | None:
    return address or os.environ.get("RAY_ADDRESS") or None


def _unreachable(address: str, error: Exception) -> ClusterError:
    return ClusterError(
        f"expected a running Ray cluster at {address}, got: {one_line(error)[:300]}; start it, or "
        "leave out --ray-address and RAY_ADDRESS to run on this machine"
    )


@contextmanager
def ray_session(address: str | None = None) -> Iterator[None]:
    """Ray is initialised inside the block; on the way out only what was started here is stopped.

    Args:
        address: Cluster to join, "auto" included; None takes RAY_ADDRESS, and without that a
            private Ray is started.
    """
    wanted = _wanted(address)
    if wanted is None or wanted == "local":
        for name, value in PRIVATE_RAY_ENV.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        if address is not None and address not in ("auto", _gcs_address()):
            raise SpecError(
                f"expected no Ray or the one at {address}, got a process that is already connected "
                f"to {_gcs_address()}; call ray.shutdown() first or leave the address out"
            )
        with quiet_streams():
            yield
        return
    with quiet_streams(), ExitStack() as session:
        with _kept_sigterm():
            if wanted is None or wanted == "local":
                session.enter_context(private_ray(**QUIET, **_stand_in_gpus()))
            else:
                session.callback(shut_down)
                _join(wanted)
        yield


def _stand_in_gpus() -> dict[str, Any]:
    """The GPU that the interpreter stands in for, which Ray cannot find by itself."""
    return {"num_gpus": 1} if is_interpreted() else {}


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, **QUIET)
    except Exception as error:  # whatever Ray raises when nobody answers as it expects
        raise _unreachable(address, error) from error


@contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Put the caller's SIGTERM handler back after Ray has set its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def live_nodes() -> list[Node]:
    """The cluster's live nodes that offer CPUs or GPUs and are not about to end, in a stable order;
    where all are, those."""
    import ray

    nodes, draining = useful_nodes(ray.nodes()), draining_nodes()
    return [node for node in nodes if node.node_id not in draining] or nodes


def draining_nodes() -> dict[str, float]:
    """Id of a node that is about to end -> when, in seconds since 1970; inf where nobody said."""
    from ray._private.state import state

    # Ray has no public call for it; Ray Serve asks the same place. Unknown means that none is.
    with suppress(Exception):
        return {
            str(node_id): deadline_ms / 1000 if deadline_ms else math.inf
            for node_id, deadline_ms in state.get_draining_nodes().items()
        }
    return {}


def useful_nodes(entries: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Those of `ray.nodes()` that live and offer CPUs or GPUs, in a stable order."""
    nodes = [
        Node(
            node_id=str(entry["NodeID"]),
            cpus=int(entry["Resources"].get("CPU", 0)),
            gpus=int(entry["Resources"].get("GPU", 0)),
        )
        for entry in entries
        if entry["Alive"]
    ]
    useful = [node for node in nodes if node.cpus or node.gpus]
    return sorted(useful, key=lambda node: node.node_id)


def is_here(nodes: Sequence[Node]) -> bool:
    """Whether these nodes are the one that this process is on, and no other."""
    import ray

    return [node.node_id for node in nodes] == [ray.get_runtime_context().get_node_id()]


def wait_for_nodes(
    run: RunSpec,
    say: Callable[[str], None],
    *,
    joined: bool,
    limit_s: float = NODES_WITHIN_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Node]:
    """The nodes for a job; a joined cluster that has none yet is asked for one and waited for.

    A cluster that scales by demand starts its first node only when somebody asks.

    Args:
        say: Told once that there is something to wait for. joined: It is somebody else's cluster.
    Raises:
        RunStopped: No node came within `limit_s`.
    """
    began, asked = clock(), False
    while not (nodes := [node for node in live_nodes() if _fits(node, run)]) and joined:
        if not asked:
            asked = True
            say(f"waiting up to {limit_s / 60:.0f} min for the cluster to offer {_wish(run)}")
            _ask_for(run, 1)
        if clock() - began > limit_s:
            _ask_for(run, 0)
            raise RunStopped(
                f"the Ray cluster offered no {_wish(run)} within {limit_s / 60:.0f} min; start a "
                "node or let it scale up, then run the same command with --resume"
            )
        sleep(NODES_POLL_S)
    if asked:
        _ask_for(run, 0)
    return nodes or live_nodes()


def _fits(node: Node, run: RunSpec) -> bool:
    if run.device == "cuda":
        return node.gpus > 0
    return node.cpus > 0 or bool(run.gpus_wanted and node.gpus)


def _wish(run: RunSpec) -> str:
    return "GPUs" if run.device == "cuda" else "CPUs"


def _ask_for(run: RunSpec, times: int) -> None:
    """Tell an autoscaler what is wanted; takes the wish back with 0."""
    from ray.autoscaler.sdk import request_resources

    wish = {"GPU": run.gpus_wanted} if run.device == "cuda" else {"CPU": 1}
    with suppress(Exception):  # a cluster without an autoscaler may still get nodes by hand
        request_resources(bundles=[wish] * times)
