"""Which executor a job has, and the border to Ray: addresses, nodes, output, a lost cluster."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import ray as ray_package

from earmill.pipeline.common.errors import ClusterLost, DeviceError, RunStopped, SpecError
from earmill.pipeline.driver.executors import WorkerRequest, executor_of, ray
from earmill.pipeline.driver.executors.local import LocalExecutor
from earmill.pipeline.driver.executors.ray import (
    SILENT_S,
    ClusterError,
    ClusterWatch,
    RayExecutor,
    RayWorkers,
    check_address,
    live_nodes,
    muted,
    wait_for_nodes,
)
from earmill.pipeline.driver.executors.ray import ray_session as session
from earmill.pipeline.driver.placement import Node, Placement
from earmill.pipeline.spec.job import JobSpec, RunSpec
from tests.pipeline.outages import Clock

ADDRESS = "10.0.0.1:6379"
CPU_NODE, GPU_NODE = Node("a", cpus=4, gpus=0), Node("b", cpus=4, gpus=1)
VIEW = [CPU_NODE]


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Replace Ray by a mock that is not connected, and unset RAY_ADDRESS."""
    module = mock.Mock()
    module.is_initialized.return_value = False
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return module


class TestChoice:
    """`auto` is Ray only where somebody has a Ray."""

    def test_one_machine_has_local_processes(self, unconnected: mock.Mock) -> None:
        assert RunSpec().executor == "auto"
        assert isinstance(executor_of(RunSpec()), LocalExecutor)

    def test_an_address_in_the_job_is_joined(self, unconnected: mock.Mock) -> None:
        executor = executor_of(RunSpec(ray_address=ADDRESS))
        assert isinstance(executor, RayExecutor) and not executor.is_private
        assert executor._address == ADDRESS

    def test_ray_address_is_joined_also_in_a_submitted_job(
        self, unconnected: mock.Mock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
        executor = executor_of(RunSpec())
        assert isinstance(executor, RayExecutor) and executor._address == ADDRESS
        assert isinstance(executor_of(RunSpec(executor="local")), LocalExecutor)
        assert isinstance(executor_of(RunSpec(executor="slurm-array")), LocalExecutor)
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert isinstance(executor_of(RunSpec()), LocalExecutor)

    def test_a_connected_process_keeps_its_ray(
        self, unconnected: mock.Mock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unconnected.is_initialized.return_value = True
        monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
        executor = executor_of(RunSpec())
        assert isinstance(executor, RayExecutor) and executor._address is None
        assert not executor.is_private

    def test_ray_without_an_address_is_of_this_machine(self, unconnected: mock.Mock) -> None:
        executor = executor_of(RunSpec(executor="ray"))
        assert isinstance(executor, RayExecutor) and executor.is_private

    @pytest.mark.parametrize("executor", ["local", "slurm-array"])
    def test_an_address_needs_ray(self, executor: str) -> None:
        with pytest.raises(ValueError, match=f"auto or ray with ray_address, got {executor}"):
            RunSpec.model_validate({"executor": executor, "ray_address": ADDRESS})

    def test_the_hash_of_a_job_does_not_know_who_runs_it(self) -> None:
        job = {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "melspectrogram", "fs_hz": 16000}],
            "output": {"uri": "out", "formats": ["parquet"]},
        }
        named = {"executor": "ray", "ray_address": ADDRESS}
        assert JobSpec.load(job).sha256() == JobSpec.load({**job, "run": named}).sha256()


class TestAddress:
    def test_nobody_listens(self) -> None:
        with socket.socket() as taken:
            # Bound but not listening: connecting is refused, and nobody else can take the port.
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ClusterError, match=f"{address}.*refused") as error:
                RayExecutor(address).check(RunSpec())
        assert error.value.exit_code == 2

    @pytest.mark.parametrize(
        "address", ["http://127.0.0.1:8265", "ray://head:10001", "head", ":1", "local:"]
    )
    def test_an_address_of_something_else(self, address: str) -> None:
        with pytest.raises(ClusterError, match="host:port or auto"):
            check_address(address)

    def test_a_live_cluster(self, ray_session: None) -> None:
        check_address(ray_package.get_runtime_context().gcs_address)
        check_address("auto")

    def test_an_initialised_ray_is_used_and_left_alone(self, ray_session: None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        with session():
            (node,) = live_nodes()
            assert node.cpus == 3
        assert ray_package.is_initialized() and signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(SpecError, match="already connected"), session("10.9.8.7:6379"):
            pass


@pytest.mark.parametrize(
    "error",
    [
        ray_package.exceptions.RaySystemError("Failed to connect to GCS within 60 seconds"),
        subprocess.TimeoutExpired("gcs_server", 30),
        TimeoutError("Timed out waiting for file gcs_server_port"),
        OSError(28, "No space left on device", "/tmp/ray"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_ray_that_does_not_come_up_is_one_line(
    error: Exception, unconnected: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "OWN_RAY_ENV", {})
    unconnected.init.side_effect = error
    with pytest.raises(RunStopped, match=r"Ray could not .*executor to local") as said, session():
        pass
    assert "--resume" in str(said.value) and "\n" not in str(said.value)
    with (
        pytest.raises(ClusterError, match=r"expected a running Ray cluster at 127.0.0.1:1, got"),
        session("127.0.0.1:1"),
    ):
        pass


def test_what_threads_of_ray_print_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = threading.Thread(target=print, args=("a worker died",))
    with muted({noisy}):
        noisy.start()
        noisy.join()
        print("progress")
        print("trouble", file=sys.stderr)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("progress\n", "trouble\n")


def test_a_muted_stream_can_do_what_the_real_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with muted(set()):
        assert sys.stdout.encoding == "latin-1" and not sys.stdout.isatty()


class TestNodes:
    def test_a_cluster_without_cpus_is_asked_for_some_and_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, said, wishes = Clock(), [], []
        monkeypatch.setattr(ray, "live_nodes", lambda: [CPU_NODE] if clock() > 30.0 else [])
        monkeypatch.setattr(ray, "_ask_for", lambda run, times: wishes.append(times))
        wait = {"clock": clock, "sleep": clock.sleep}
        assert wait_for_nodes(RunSpec(), said.append, may_grow=True, **wait) == [CPU_NODE]
        assert wishes == [1, 0] and len(said) == 1 and "offer CPUs" in said[0]

        monkeypatch.setattr(ray, "live_nodes", lambda: [])
        with pytest.raises(RunStopped, match="no CPUs within 10 min"):
            wait_for_nodes(RunSpec(), said.append, may_grow=True, **wait)
        assert wishes == [1, 0, 1, 0]
        # Nobody adds a node to a Ray that was started for the run.
        before = clock()
        assert wait_for_nodes(RunSpec(), said.append, may_grow=False, **wait) == []
        assert clock() == before

    def test_gpus_are_waited_for_where_only_they_will_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = iter([[CPU_NODE], [CPU_NODE], [CPU_NODE, GPU_NODE]])
        monkeypatch.setattr(ray, "live_nodes", lambda: next(nodes))
        wishes: list[tuple[str, int]] = []
        monkeypatch.setattr(ray, "_ask_for", lambda run, times: wishes.append((run.device, times)))
        said: list[str] = []
        wait: dict[str, Any] = {"may_grow": True, "sleep": lambda seconds: None}
        on_gpu = RunSpec(device="cuda", gpus_per_worker=0.5)
        assert wait_for_nodes(on_gpu, said.append, **wait) == [GPU_NODE]
        assert wishes == [("cuda", 1), ("cuda", 0)] and "offer GPUs" in said[0]
        monkeypatch.setattr(ray, "live_nodes", lambda: [CPU_NODE, GPU_NODE])
        assert wait_for_nodes(RunSpec(), said.append, **wait) == [CPU_NODE, GPU_NODE]

    def test_a_gpu_is_looked_for_first_where_none_can_come_later(
        self, unconnected: mock.Mock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_gpu = RunSpec(device="cuda")
        monkeypatch.setattr(ray, "check_gpu", mock.Mock(side_effect=DeviceError("none here")))
        with pytest.raises(DeviceError, match="none here"):
            RayExecutor().check(on_gpu)
        RayExecutor().check(RunSpec())
        unconnected.is_initialized.return_value = True
        monkeypatch.setattr(ray, "live_nodes", lambda: [CPU_NODE])
        with pytest.raises(DeviceError, match="a Ray cluster that offers none"):
            RayExecutor().check(on_gpu)
        monkeypatch.setattr(ray, "check_address", lambda address: None)
        RayExecutor(ADDRESS).check(on_gpu)
        monkeypatch.setattr(ray, "live_nodes", lambda: [GPU_NODE])
        RayExecutor().check(on_gpu)

    @pytest.mark.parametrize("silent", [False, True], ids=["not a member", "hangs"])
    def test_a_cluster_that_is_gone_ends_the_run_within_a_minute(self, silent: bool) -> None:
        clock, there = Clock(), {"now": True}

        def look() -> list[Node] | None:
            if silent and not there["now"]:
                raise ConnectionError("nobody answers")
            return VIEW if there["now"] else None

        watch = ClusterWatch(look, clock)

        def tick() -> None:
            clock.sleep(5.0)
            watch.seen()
            if watch._thread is not None:
                watch._thread.join()

        for _ in range(40):
            tick()
        assert watch.seen() is VIEW
        there["now"] = False
        gone_at = clock()
        with pytest.raises(ClusterLost, match=r"silent for 45 s.*--resume"):
            for _ in range(40):
                tick()
        assert clock() - gone_at <= SILENT_S + 15.0


def test_an_actor_reserves_the_share_and_room_for_the_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    remote = mock.MagicMock()
    monkeypatch.setattr(ray_package, "remote", lambda **options: asked.update(options) or remote)
    place = Placement("", threads=1, num_gpus=0.5)
    RayWorkers(lambda index: WorkerRequest(mock.Mock(), place, 32)).start(0)
    assert (asked["num_cpus"], asked["num_gpus"]) == (0.001, 0.5)
    assert asked["concurrency_groups"]["shards"] == 32
