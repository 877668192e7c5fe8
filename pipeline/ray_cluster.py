"""Starting or joining Ray, and nothing that outlives the run.

An address (argument or RAY_ADDRESS) joins a running cluster, an initialised Ray is used as it is,
else a private Ray starts on 127.0.0.1 without a dashboard and is stopped again. Ray's own messages
never reach standard output: they would break the progress bar and the JSON lines.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, cast

from pipeline.errors import EarmillError, SpecError

# Features never enter the object store; Ray's own minimum is 75 MiB.
OBJECT_STORE_BYTES = 128 * 2**20
CONNECT_TIMEOUT_S = 5.0
# Ray prints news from other processes in these threads of the driver.
RAY_PRINTER_THREADS = ("ray_listen_error_messages", "ray_print_logs")
# Set before Ray is first imported. The second one, despite its name, decides on every system
# whether a private Ray binds to the loopback address (0) or to all of them.
PRIVATE_RAY_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class ClusterError(EarmillError, ConnectionError):
    """The Ray cluster named by the caller cannot be joined."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Node:
    """One live Ray node; `cpus` and `gpus` are what it offers to everybody."""

    node_id: str
    cpus: int
    gpus: int


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
    reason = " ".join(str(error).split())
    return ClusterError(
        f"expected a running Ray cluster at {address}, got: {reason[:300]}; start it, or leave "
        "out --ray-address and RAY_ADDRESS to run on this machine"
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
    with quiet_streams():
        with _kept_sigterm():
            _init(wanted)
        try:
            yield
        finally:
            ray.shutdown()


def _init(address: str | None) -> None:
    import ray

    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    if address is None or address == "local":
        # The address is spelled out because None would still look for a cluster on this machine.
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
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
    """The cluster's live nodes that offer CPUs or GPUs, in a stable order."""
    import ray

    nodes = [
        Node(
            node_id=str(entry["NodeID"]),
            cpus=int(entry["Resources"].get("CPU", 0)),
            gpus=int(entry["Resources"].get("GPU", 0)),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    useful = [node for node in nodes if node.cpus or node.gpus]
    return sorted(useful, key=lambda node: node.node_id)
