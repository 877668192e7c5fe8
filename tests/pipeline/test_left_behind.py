"""What a killed process leaves is told from what is in use, and goes; Ray's death is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from earmill.pipeline.common.errors import ClusterLost, RunStopped
from earmill.pipeline.driver.executors import private_ray, ray_reaper
from earmill.pipeline.driver.executors import ray_session as ray_cluster
from earmill.pipeline.driver.executors.cluster_watch import SILENT_S, ClusterWatch
from earmill.pipeline.driver.executors.ray_session import ClusterError, wait_for_nodes
from earmill.pipeline.driver.placement import ClusterView, Node
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.storage import scratch
from earmill.pipeline.storage.scratch import OwnedFolder, own_folder, sweep
from tests.pipeline.outages import Clock
from tests.waiting import processes_end

VIEW = ClusterView((Node("a", cpus=4, gpus=0),))

OWNER = """
import sys, time
from earmill.pipeline.storage.scratch import OwnedFolder
print(OwnedFolder(parent=sys.argv[1]).path, flush=True)
time.sleep(600)
"""

# Stands for a driver: a folder, a reaper, and a process that would live on, as Ray's agents do.
DRIVER = """
import os, subprocess, sys, time
from earmill.pipeline.driver.executors import private_ray, ray_reaper
from earmill.pipeline.storage.scratch import OwnedFolder
folder = OwnedFolder(private_ray.PREFIX, sys.argv[1])
reaper = private_ray._start_reaper(folder.path)
agent = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(
    agent, env={**os.environ, ray_reaper.MARK: folder.path}, start_new_session=True
)
print(folder.path, reaper.pid, child.pid, flush=True)
time.sleep(600)
"""


def started(code: str, folder: Path) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_folder_goes_with_the_next_run_once_its_owner_is_dead(tmp_path: Path) -> None:
    process, (folder,) = started(OWNER, tmp_path)
    try:
        (Path(folder) / "fetch-1").write_bytes(b"x")
        sweep(parent=str(tmp_path))
        assert (Path(folder) / "fetch-1").exists()
    finally:
        end(process)
    sweep(parent=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_our_lock_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / f"{scratch.PREFIX}mine").mkdir()
    mine = OwnedFolder(parent=str(tmp_path))
    sweep(parent=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    mine.remove()
    mine.remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"{scratch.PREFIX}mine"]


def test_a_process_has_one_folder_that_nobody_takes() -> None:
    folder = own_folder()
    sweep()
    assert own_folder() == folder and os.path.isdir(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_of_a_private_ray_outlives_its_driver(tmp_path: Path, number: int) -> None:
    process, (folder, reaper_pid, child_pid) = started(DRIVER, tmp_path)
    reaper, child = psutil.Process(int(reaper_pid)), psutil.Process(int(child_pid))
    try:
        assert child.is_running() and os.path.isdir(folder)
        process.send_signal(number)
        process.wait()
        processes_end([child, reaper])
        assert not os.path.exists(folder)
    finally:
        end(process)


def test_what_a_killed_reaper_leaves_goes_at_the_next_start(tmp_path: Path) -> None:
    process, (folder, reaper_pid, child_pid) = started(DRIVER, tmp_path)
    child = psutil.Process(int(child_pid))
    os.kill(int(reaper_pid), signal.SIGKILL)
    end(process)
    assert child.is_running() and os.path.isdir(folder)
    private_ray._clear_up(str(tmp_path))
    processes_end([child])
    assert not os.path.exists(folder)


def test_a_folder_for_ray_is_short_enough_for_its_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 80)))
    assert private_ray._parent() == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    assert private_ray._parent() == "/scratch"


def test_a_temporary_folder_that_is_full_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> OwnedFolder:
        raise OSError(28, "No space left on device", "/tmp")

    monkeypatch.setattr(private_ray, "OwnedFolder", full)
    with (
        pytest.raises(RunStopped, match=r"Ray could not be started in .*no space") as caught,
        private_ray.private_ray(),
    ):
        pass
    assert "--resume" in str(caught.value) and "\n" not in str(caught.value)


def test_a_dead_part_of_a_private_ray_ends_the_run() -> None:
    clock = Clock()
    part = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watch = ClusterWatch([psutil.Process(part.pid)], lambda: VIEW, clock=clock)
    clock.sleep(10.0)
    watch.check()
    part.kill()
    clock.sleep(1.0)
    watch.check()  # looked at only every few seconds
    clock.sleep(3.0)
    with pytest.raises(ClusterLost, match=rf"process {part.pid} has died; .*--resume"):
        while psutil.pid_exists(part.pid) and clock() < 1e6:  # a zombie counts as dead
            clock.sleep(3.0)
            watch.check()
    part.wait()


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.RaySystemError("System error: Failed to connect to GCS within 60 seconds"),
        subprocess.TimeoutExpired("gcs_server", 30),
        TimeoutError("Timed out waiting for file gcs_server_port"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_ray_that_does_not_come_up_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(RunStopped, match=r"Ray could not be started in .*executor to local") as said,
        private_ray.private_ray(),
    ):
        pass
    assert "--resume" in str(said.value) and "\n" not in str(said.value)
    with pytest.raises(ClusterError, match=r"expected a running Ray cluster at 127.0.0.1:1, got"):
        ray_cluster._join("127.0.0.1:1")


@pytest.mark.parametrize("silent", [False, True], ids=["not a member", "hangs"])
def test_a_cluster_that_is_gone_ends_the_run_within_a_minute(silent: bool) -> None:
    clock, there = Clock(), {"now": True}

    def look() -> ClusterView | None:
        if silent and not there["now"]:
            raise ConnectionError("nobody answers")
        return VIEW if there["now"] else None

    watch = ClusterWatch([], look, clock=clock)
    for _ in range(40):
        clock.sleep(5.0)
        watch.check()
        asking = watch._asking
        assert asking is not None
        asking.join()
    there["now"] = False
    gone_at = clock()
    with pytest.raises(ClusterLost, match="silent for 45 s"):
        for _ in range(40):
            clock.sleep(5.0)
            watch.check()
            if watch._asking is not None:
                watch._asking.join()
    assert clock() - gone_at <= SILENT_S + 15.0


def test_a_cluster_without_cpus_is_asked_for_some_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, said, wishes = Clock(), [], []
    node = Node("a", cpus=4, gpus=0)
    monkeypatch.setattr(ray_cluster, "live_nodes", lambda: [node] if clock() > 30.0 else [])
    monkeypatch.setattr(ray_cluster, "_ask_for", lambda run, times: wishes.append(times))
    wait = {"clock": clock, "sleep": clock.sleep}
    assert wait_for_nodes(RunSpec(), said.append, joined=True, **wait) == [node]
    assert wishes == [1, 0] and len(said) == 1 and "offer CPUs" in said[0]

    monkeypatch.setattr(ray_cluster, "live_nodes", lambda: [])
    with pytest.raises(RunStopped, match="no CPUs within 10 min"):
        wait_for_nodes(RunSpec(), said.append, joined=True, **wait)
    assert wishes == [1, 0, 1, 0]
    # Nobody will add a node to a Ray of our own.
    before = clock()
    assert wait_for_nodes(RunSpec(), said.append, joined=False, **wait) == []
    assert clock() == before


def test_a_process_that_is_just_being_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between exec and its first instruction a process shows no environment."""

    class Young:
        pid = 7
        looks = 0

        def environ(self) -> dict[str, str]:
            self.looks += 1
            return {ray_reaper.MARK: "/tmp/folder"} if self.looks > 3 else {}

        def status(self) -> str:
            return str(psutil.STATUS_RUNNING)

        def cmdline(self) -> list[str]:
            return []

        def create_time(self) -> float:
            return time.time()

        def ppid(self) -> int:
            return os.getpid()

    young = Young()
    monkeypatch.setattr(psutil, "process_iter", lambda: [young])
    assert ray_reaper.members("/tmp/folder", ()) == [young]
