"""Workers as Ray actors: on a cluster that is joined, or on a Ray that is started for the run. Ray
is used by its public interface. The Ray of a run listens on loopback, has no dashboard, and ends
with `ray.shutdown`; after a killed driver Ray's processes end by themselves within a minute."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from earmill.pipeline.common.errors import ClusterLost, EarmillError, RunStopped, SpecError
from earmill.pipeline.common.machine import is_interpreted
from earmill.pipeline.common.text import MESSAGE_LIMIT, named_line, one_line
from earmill.pipeline.driver.events import RESUME
from earmill.pipeline.driver.executors import KEPT_MEMORY, Session, WorkerRequest, is_connected
from earmill.pipeline.driver.placement import Node, gpu_seats
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.storage.scratch import sweep
from earmill.pipeline.worker.device import check_gpu
from earmill.pipeline.worker.messages import LostCall, Outcome
from earmill.pipeline.worker.worker_process import ShardWorker

CONNECT_TIMEOUT_S = 5.0
NODES_WITHIN_S = 600.0
NODES_POLL_S = 2.0
LOOK_EVERY_S = 3.0
# A cluster that has not answered for 45 s is gone. Ray ends a driver without a word after 60 s.
SILENT_S = 45.0
QUIET: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
# Features never enter the object store; 75 MiB is the least that Ray accepts.
OBJECT_STORE_BYTES = 128 * 2**20
CPUS_RESERVED = 0.001  # Enough for Ray to count a worker, too little to ever fill a node.
# Set before the first import of Ray. Despite its name the second variable makes a Ray that is
# started here listen on loopback. Ray warns until the first one is set.
OWN_RAY_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
} | KEPT_MEMORY
# Groups of a worker's threads: a call for its status is answered while shards run.
SHARDS, CONTROL = "shards", "control"


class ClusterError(EarmillError, ConnectionError, help_topic="ray", exit_code=2):
    """The Ray cluster named by the caller cannot be joined."""


class RayExecutor:
    """Runs workers as Ray actors on the cluster at `address`, or on the Ray of this process."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    @property
    def is_private(self) -> bool:
        """True if a Ray is started for the run, on this machine alone."""
        return self._address is None and not is_connected()

    def check(self, run: RunSpec) -> None:
        """Refuse a dead address, and `cuda` where no GPU can come, as it can to a cluster."""
        if self._address is not None:
            check_address(self._address)
        elif run.device == "cuda":
            if self.is_private:
                check_gpu()
            else:
                gpu_seats(live_nodes(), run)

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[Session]:
        is_private = self.is_private
        with ray_session(self._address):
            nodes, watch = wait_for_nodes(run, say, may_grow=not is_private), ClusterWatch()
            yield Session(nodes, RayWorkers, watch.seen)


def check_address(address: str) -> None:
    """Raise ClusterError where no cluster answers at once; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ClusterError(
            f"expected a Ray cluster as host:port or auto, got {address}; take the address that "
            "`ray start --head` prints, not the one of a dashboard or Ray client server"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> ClusterError:
    return ClusterError(
        f"expected a running Ray cluster at {address}, got: {one_line(error)[:300]}; start it, or "
        "leave out run.ray_address and RAY_ADDRESS to run on this machine"
    )


@contextmanager
def ray_session(address: str | None = None) -> Iterator[None]:
    """Connect this process to Ray for the time of the block: to the address, else to the Ray of
    this process, which is left as it is, else to one that is started for the block."""
    if address is None and not is_connected():
        for name, value in OWN_RAY_ENV.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        connected = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto", connected):
            raise SpecError(
                f"expected no Ray or the one at {address}, got a process that is already connected "
                f"to {connected}; call ray.shutdown() first or leave the address out"
            )
        yield
        return
    before = set(threading.enumerate())
    # Keeps Ray's advice off the terminal. The import of Ray has set the logger's level.
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _connect(address)
        with muted(set(threading.enumerate()) - before):
            yield
    finally:
        # Disconnects, and stops a Ray that was started here, without Ray's messages.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ray.shutdown()
        sweep()  # temporary files of killed workers
        logger.setLevel(level)


def _connect(address: str | None) -> None:
    """Join the cluster, or start a Ray; keep the caller's SIGTERM handler, which Ray replaces."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            ray.init(address=address, **QUIET)
            return
        # The interpreter stands in for a GPU that Ray cannot find by itself.
        ray.init(
            address="local",
            num_gpus=1 if is_interpreted() else None,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **QUIET,
        )
    except Exception as error:  # Ray raises errors of many classes here
        if address is not None:
            raise _unreachable(address, error) from error
        raise RunStopped(
            f"Ray could not be started: {named_line(error)[:MESSAGE_LIMIT]}; wait if this machine "
            "is busy, or set run.executor to local, which needs no Ray, then run the same command "
            "with --resume"
        ) from error
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class _MutedStream:
    def __init__(self, inner: TextIO, threads: Collection[threading.Thread]) -> None:
        self._inner, self._threads = inner, threads

    def write(self, text: str) -> int:
        if threading.current_thread() in self._threads:
            return len(text)
        return self._inner.write(text)

    def __getattr__(self, name: str) -> Any:
        # The real stream answers for flush, encoding, isatty and so on.
        return getattr(self._inner, name)


@contextmanager
def muted(threads: Collection[threading.Thread]) -> Iterator[None]:
    """Drop what these threads of Ray print: it would break a bar or lines of JSON."""
    out, err = _MutedStream(sys.stdout, threads), _MutedStream(sys.stderr, threads)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


def live_nodes() -> list[Node]:
    import ray

    return useful_nodes(ray.nodes())


def useful_nodes(entries: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the entries of `ray.nodes()` that live and offer CPUs or GPUs, in a stable order."""
    living = [(entry["NodeID"], entry["Resources"]) for entry in entries if entry["Alive"]]
    nodes = [Node(str(k), int(has.get("CPU", 0)), int(has.get("GPU", 0))) for k, has in living]
    useful = [node for node in nodes if node.cpus or node.gpus]
    return sorted(useful, key=lambda node: node.node_id)


def wait_for_nodes(
    run: RunSpec,
    say: Callable[[str], None],
    *,
    may_grow: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Node]:
    """Return the nodes for a job, as soon as there is one; RunStopped after 10 minutes without one.
    An autoscaler starts its first node on request, so it is asked. Without `may_grow`, all nodes
    are returned at once."""
    wish = "GPUs" if run.device == "cuda" else "CPUs"

    def fitting() -> list[Node]:
        if run.device == "cuda":
            return [node for node in live_nodes() if node.gpus]
        return [node for node in live_nodes() if node.cpus or (run.gpus_wanted and node.gpus)]

    if (nodes := fitting()) or not may_grow:
        return nodes or live_nodes()
    began = clock()
    say(f"waiting up to {NODES_WITHIN_S / 60:.0f} min for the cluster to offer {wish}")
    _ask_for(run, 1)
    try:
        while not (nodes := fitting()):
            if clock() - began > NODES_WITHIN_S:
                raise RunStopped(
                    f"the Ray cluster offered no {wish} within {NODES_WITHIN_S / 60:.0f} min; "
                    "start a node or let it scale up, then run the same command with --resume"
                )
            sleep(NODES_POLL_S)
    finally:
        _ask_for(run, 0)
    return nodes


def _ask_for(run: RunSpec, times: int) -> None:
    """Ask an autoscaler for the resources of `times` workers; 0 takes the request back."""
    from ray.autoscaler.sdk import request_resources

    wish = {"GPU": run.gpus_wanted} if run.device == "cuda" else {"CPU": 1}
    with suppress(Exception):  # a cluster without an autoscaler may still get nodes by hand
        request_resources(bundles=[wish] * times)


def _look() -> list[Node] | None:
    import ray

    entries, here = ray.nodes(), str(ray.get_runtime_context().get_node_id())
    if not any(entry["Alive"] and str(entry["NodeID"]) == here for entry in entries):
        return None
    return useful_nodes(entries)


class ClusterWatch:
    """Ray's nodes; notices when Ray is gone, which Ray does not report for minutes. `look` runs in
    a thread, because it may hang. It returns the nodes, or None if this machine is missing."""

    def __init__(
        self,
        look: Callable[[], list[Node] | None] = _look,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._clock = look, clock
        self._seen: list[Node] | None = None
        self._last_look = self._last_good = clock()
        self._thread: threading.Thread | None = None

    def seen(self) -> list[Node] | None:
        """Return the nodes of the last good look, and begin the next look, if it is time;
        ClusterLost after `SILENT_S` without a good look."""
        now = self._clock()
        if now - self._last_look < LOOK_EVERY_S:
            return self._seen
        self._last_look = now
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="cluster-watch", daemon=True)
            self._thread.start()
        if now - self._last_good > SILENT_S:
            raise ClusterLost(
                f"the Ray cluster has been silent for {SILENT_S:.0f} s: its head or the node of "
                f"this machine is gone; {RESUME}"
            )
        return self._seen

    def _ask(self) -> None:
        with suppress(Exception):  # silence is what counts, whatever Ray raises
            seen = self._look()
            if seen is not None:
                self._seen, self._last_good = seen, self._clock()


class RayWorkers:
    """Actors as `Workers`; Ray starts an actor again whose process has died."""

    def __init__(self, request_of: Callable[[int], WorkerRequest]) -> None:
        self._request_of = request_of

    def start(self, index: int) -> Any:
        """Start an actor on the node of its place, or on another one if that node is gone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        request = self._request_of(index)
        options: dict[str, Any] = {
            "num_cpus": CPUS_RESERVED,
            "num_gpus": request.place.num_gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "concurrency_groups": {SHARDS: request.shards, CONTROL: 1},
        }
        if node_id := request.place.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
        actor = ray.remote(**options)(ShardWorker)
        return actor.remote(request.make_runner, request.environment)

    def call(self, worker: Any, kind: str, *args: Any) -> Any:
        group = CONTROL if kind == "status" else SHARDS
        return getattr(worker, kind).options(concurrency_group=group).remote(*args)

    def ended(self, calls: Collection[Any], timeout_s: float) -> Iterator[tuple[Any, Outcome]]:
        import ray

        refs = list(calls)
        first, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if not first:
            return
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            yield ref, _result(ref)

    def kill(self, worker: Any) -> None:
        import ray

        ray.kill(worker, no_restart=True)


def _result(ref: Any) -> Outcome:
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
        # The last line of Ray's message names the cause.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = lines[-1][:200] if lines else "no reason given"
        return LostCall(f"the worker process died: {cause}")
    except RayTaskError as error:
        # The process lives, but the call failed before `ShardWorker`: in unpickling, for example.
        return Outcome(ok=False, stage="rows", message=named_line(error.cause or error))
    except RayError as error:
        # The process was killed for memory, its node is gone, or Ray lost the call otherwise.
        return LostCall(named_line(error), memory=isinstance(error, OutOfMemoryError))
    return outcome
