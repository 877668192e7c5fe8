"""Workers as Ray actors: on a cluster that is joined, or on a Ray that is started for the run.

Ray is used by its public interface. The Ray of a run listens on loopback, has no dashboard, and
ends with `ray.shutdown`; after a killed driver Ray's processes end by themselves within a minute.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from earmill.pipeline.common.errors import ClusterLost, EarmillError, RunStopped, SpecError
from earmill.pipeline.common.machine import is_interpreted
from earmill.pipeline.common.text import MESSAGE_LIMIT, named_line, one_line
from earmill.pipeline.driver.events import RESUME
from earmill.pipeline.driver.executors import is_connected
from earmill.pipeline.driver.executors.base import KEPT_MEMORY
from earmill.pipeline.driver.placement import ClusterView, Node, check_seats
from earmill.pipeline.storage.scratch import sweep
from earmill.pipeline.worker.device import check_gpu
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, LostCall, Outcome, Runner
from earmill.pipeline.worker.worker_process import ShardWorker

if TYPE_CHECKING:
    from ray.exceptions import ActorDiedError

    from earmill.pipeline.driver.executors.base import WorkerRequest
    from earmill.pipeline.spec.job import RunSpec

CONNECT_TIMEOUT_S = 5.0
NODES_WITHIN_S = 600.0
NODES_POLL_S = 2.0
LOOK_EVERY_S = 3.0
# A cluster that has not answered for 45 s is gone. Ray ends a driver without a word after 60 s.
SILENT_S = 45.0
QUIET: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
# Features never enter the object store; 75 MiB is the least that Ray accepts.
OBJECT_STORE_BYTES = 128 * 2**20
# Set before the first import of Ray. Despite its name the second variable makes a Ray that is
# started here listen on loopback, on every system. The first one is the default of later releases,
# and Ray warns until it is set.
OWN_RAY_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
} | KEPT_MEMORY
# Groups of a worker's threads: a call for its status is answered while shards run.
SHARDS, CONTROL = "shards", "control"


class ClusterError(EarmillError, ConnectionError):
    """The Ray cluster named by the caller cannot be joined."""

    help_topic = "ray"
    exit_code = 2


class RayExecutor:
    """Runs workers as Ray actors.

    Args:
        address: Cluster to join; None uses the Ray that this process is connected to, and without
            one starts a Ray for the run.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    @property
    def is_private(self) -> bool:
        """True if a Ray is started for the run, on this machine alone."""
        return self._address is None and not is_connected()

    def check(self, run: RunSpec) -> None:
        """Refuse an address that nobody listens at, and `cuda` where no GPU can come.

        A cluster with an address may grow, so its GPUs are waited for instead.

        Raises:
            ClusterError: The cluster cannot be reached.
            DeviceError: This machine, or the Ray this process is connected to, has no GPU.
        """
        if self._address is not None:
            check_address(self._address)
        elif run.device == "cuda":
            if self.is_private:
                check_gpu()
            else:
                check_seats(live_nodes(), run)

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[RaySession]:
        """Connect to Ray for the time of the block.

        Raises:
            RunStopped: Ray cannot be started, or offers no node in time.
        """
        may_grow = not self.is_private
        with ray_session(self._address):
            yield RaySession(wait_for_nodes(run, say, may_grow=may_grow))


def check_address(address: str) -> None:
    """Check that a Ray cluster can be reached; Ray itself would try for minutes.

    Raises:
        ClusterError: Nobody listens there, or the address is not that of a Ray cluster.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ClusterError(
            f"expected a Ray cluster as host:port or auto, got {address}; take the address that "
            "`ray start --head` prints, not that of a dashboard or of a Ray client server"
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
    """Connect this process to Ray for the time of the block.

    Args:
        address: Cluster to join, `auto` included. None uses the Ray that this process is connected
            to, and leaves it as it is; without one a Ray is started, and stopped after the block.
    Raises:
        ClusterError: The cluster cannot be joined.
        RunStopped: Ray cannot be started.
        SpecError: The process is connected to another cluster.
    """
    if is_connected():
        connected = _gcs_address()
        if address not in (None, "auto", connected):
            raise SpecError(
                f"expected no Ray or the one at {address}, got a process that is already connected "
                f"to {connected}; call ray.shutdown() first or leave the address out"
            )
        yield
        return
    if address is None:
        for name, value in OWN_RAY_ENV.items():
            os.environ.setdefault(name, value)
    import ray  # noqa: F401  sets its logger's level, so it comes before `_errors_only`

    before = set(threading.enumerate())
    with ExitStack() as stack:
        stack.enter_context(_errors_only(logging.getLogger("ray")))
        stack.callback(sweep)  # what killed workers have left
        stack.callback(_shut_down)
        with _sigterm_kept():
            _start() if address is None else _join(address)
        stack.enter_context(muted(set(threading.enumerate()) - before))
        yield


def _start() -> None:
    import ray

    try:
        # The interpreter stands in for a GPU that Ray cannot find by itself.
        ray.init(
            address="local",
            num_gpus=1 if is_interpreted() else None,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **QUIET,
        )
    except Exception as error:  # Ray raises errors of many classes here
        raise RunStopped(
            f"Ray could not be started: {named_line(error)[:MESSAGE_LIMIT]}; wait if this machine "
            "is busy, or set run.executor to local, which needs no Ray, then run the same command "
            "with --resume"
        ) from error


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, **QUIET)
    except Exception as error:  # Ray raises errors of many classes here
        raise _unreachable(address, error) from error


def _shut_down() -> None:
    """Disconnect, and stop a Ray that was started here, without Ray's messages."""
    import ray

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ray.shutdown()


@contextmanager
def _errors_only(logger: logging.Logger) -> Iterator[None]:
    """Keep Ray's advice off the terminal."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the caller's SIGTERM handler, which `ray.init` replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class _MutedStream:
    """A text stream that drops what some threads write."""

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
    """Drop what these threads print.

    Threads of Ray print news of other processes, which would break a bar or lines of JSON.
    """
    out, err = _MutedStream(sys.stdout, threads), _MutedStream(sys.stderr, threads)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


# -- nodes ----------------------------------------------------------------------------------------


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _this_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def live_nodes() -> list[Node]:
    """Return the live nodes that offer CPUs or GPUs, in a stable order."""
    import ray

    return useful_nodes(ray.nodes())


def useful_nodes(entries: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the entries of `ray.nodes()` that live and offer CPUs or GPUs, in a stable order."""
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


def wait_for_nodes(
    run: RunSpec,
    say: Callable[[str], None],
    *,
    may_grow: bool,
    limit_s: float = NODES_WITHIN_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Node]:
    """Return the nodes for a job, as soon as there is one.

    A cluster that scales by demand starts its first node when somebody asks for one, so the
    cluster is asked.

    Args:
        say: Called once with a sentence, if there is something to wait for.
        may_grow: Others may add nodes; False returns what there is.
        limit_s: How long to wait, in seconds.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    Raises:
        RunStopped: No node came within `limit_s`.
    """
    began, asked = clock(), False
    while not (nodes := [node for node in live_nodes() if _fits(node, run)]) and may_grow:
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
    """Ask an autoscaler for the resources of `times` workers; 0 takes the request back."""
    from ray.autoscaler.sdk import request_resources

    wish = {"GPU": run.gpus_wanted} if run.device == "cuda" else {"CPU": 1}
    with suppress(Exception):  # a cluster without an autoscaler may still get nodes by hand
        request_resources(bundles=[wish] * times)


class ClusterWatch:
    """Looks at the nodes every few seconds, and notices when Ray is gone.

    Ray goes on for minutes without a word when its raylet has died: actors are started again, and
    wait for a node that never comes. The look is made in a thread, because it may hang.

    Args:
        look: Returns the cluster's nodes, None where this machine is none of them; may block or
            raise.
        clock: Monotonic seconds.
    Attributes:
        seen: Result of the last good look; None before the first one.
    """

    def __init__(
        self, look: Callable[[], ClusterView | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock = look, clock
        self.seen: ClusterView | None = None
        self._last_look = self._last_good = clock()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Begin the next look, if it is time.

        Raises:
            ClusterLost: The last good look was too long ago.
        """
        now = self._clock()
        if now - self._last_look < LOOK_EVERY_S:
            return
        self._last_look = now
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="cluster-watch", daemon=True)
            self._thread.start()
        if now - self._last_good > SILENT_S:
            raise ClusterLost(
                f"the Ray cluster has been silent for {SILENT_S:.0f} s: its head or the node of "
                f"this machine is gone; {RESUME}"
            )

    def _ask(self) -> None:
        with suppress(Exception):  # silence is what counts, whatever Ray raises
            seen = self._look()
            if seen is not None:
                self.seen, self._last_good = seen, self._clock()


def _look() -> ClusterView | None:
    import ray

    entries, here = ray.nodes(), _this_node()
    if not any(entry["Alive"] and str(entry["NodeID"]) == here for entry in entries):
        return None
    return ClusterView(tuple(useful_nodes(entries)))


class RaySession:
    """Ray's nodes and actors.

    Args:
        nodes: The nodes at the start.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes, self._here = nodes, _this_node()
        self._watch = ClusterWatch(_look)
        self.check = self._watch.check

    @property
    def is_here(self) -> bool:
        """True if its only node is this machine."""
        nodes: Sequence[Node] = self._nodes if self._watch.seen is None else self._watch.seen.nodes
        return [node.node_id for node in nodes] == [self._here]

    def seen(self) -> ClusterView | None:
        """Return the nodes as of a few seconds ago."""
        return self._watch.seen

    def nodes(self) -> list[Node]:
        """Return the nodes at the start."""
        return self._nodes

    def workers(self, request_of: Callable[[int], WorkerRequest]) -> RayWorkers:
        """Return workers as actors; see `Session`."""
        return RayWorkers(request_of)


# -- workers --------------------------------------------------------------------------------------


class RayWorkers:
    """Actors as `Workers`; Ray starts an actor again whose process has died.

    Args:
        request_of: Describes the worker of a place.
    """

    def __init__(self, request_of: Callable[[int], WorkerRequest]) -> None:
        self._request_of = request_of

    def start(self, index: int) -> Any:
        """Start an actor on the node of its place, or on another one if that node is gone."""
        request = self._request_of(index)
        return spawn_worker(
            request.make_runner,
            environment=request.environment,
            num_cpus=request.place.num_cpus,
            num_gpus=request.place.num_gpus,
            shards=request.shards,
            node_id=request.place.node_id or None,
        )

    def call(self, worker: Any, kind: str, *args: Any) -> Any:
        """Call a worker, and return the reference to its answer."""
        group = CONTROL if kind == "status" else SHARDS
        return getattr(worker, kind).options(concurrency_group=group).remote(*args)

    def ended(
        self, calls: Collection[Any], timeout_s: float
    ) -> Iterator[tuple[Any, Outcome | LostCall]]:
        """Yield the references that are ready, with their results."""
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


def spawn_worker(
    make_runner: Callable[[], Runner],
    *,
    environment: Mapping[str, str] | None = None,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    shards: int = CONCURRENT_SHARDS,
    node_id: str | None = None,
) -> Any:
    """Start a worker as an actor, and return its handle; the worker is not warm yet.

    Args:
        make_runner: Builds the worker's runner inside its process.
        environment: Variables to set before anything large is imported.
        num_cpus: CPUs to reserve. Keep the sum below the cluster's CPUs: a cluster whose CPUs are
            all reserved cannot run anything else and hangs.
        num_gpus: Share of a GPU to reserve.
        shards: Most shards that the worker is sent at a time.
        node_id: The node to prefer; another one is taken when it is gone.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "concurrency_groups": {SHARDS: shards, CONTROL: 1},
    }
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return ray.remote(**options)(ShardWorker).remote(make_runner, environment)


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
        # The process lives, but the call failed before `ShardWorker` could catch the error: its
        # arguments could not be unpickled, for example.
        return Outcome(ok=False, stage="rows", message=named_line(error.cause or error))
    except RayError as error:
        # The process was killed for memory, its node is gone, or Ray lost the call otherwise.
        return LostCall(named_line(error), memory=isinstance(error, OutOfMemoryError))
    return outcome


def _cause(error: ActorDiedError) -> str:
    """Return the last line of Ray's message, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"
