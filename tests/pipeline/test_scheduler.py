"""The driver loop on real workers, Ray actors and plain processes, whose shards touch files instead
of audio.

Each test states what must be committed, what the events say of the way there, and that nothing
else was done; deaths are real deaths of worker processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from earmill.pipeline.driver import events, scheduler
from earmill.pipeline.driver.events import StopRequest
from earmill.pipeline.driver.executors import WorkerRequest
from earmill.pipeline.driver.executors.local import LocalWorkers
from earmill.pipeline.driver.executors.ray import RayWorkers
from earmill.pipeline.driver.placement import Placement
from earmill.pipeline.driver.scheduler import Deadlines, Scheduler
from earmill.pipeline.driver.shard_ledger import Result, ShardLedger
from earmill.pipeline.driver.worker_pool import WorkerPool
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS
from tests.pipeline.runners import MakeRunner, SentRow, SentShard, committed, read_commit
from tests.pipeline.workers_here import ThreadWorkers
from tests.waiting import nothing_is_left, wait_until


@pytest.fixture(autouse=True, params=["ray", "local"])
def _on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test with workers of each executor; none of them outlives it."""
    if request.param == "threads":
        monkeypatch.setattr(Run, "executor", ThreadWorkers)
        yield
        return
    if request.param == "ray":
        request.getfixturevalue("ray_session")
        monkeypatch.setattr(Run, "executor", RayWorkers)
        yield
        return
    monkeypatch.setattr(Run, "executor", LocalWorkers)
    before = psutil.Process().children()
    yield
    # One that was killed as the test ended is still ending.
    nothing_is_left(lambda: [one for one in psutil.Process().children() if one not in before])


#: Workers that start, are lost and stop on Ray are in other tests as well.
ON_RAY_LATER = pytest.mark.parametrize(
    "_on", [pytest.param("ray", marks=pytest.mark.long), "local"], indirect=True
)
#: No worker dies and no process is told from another: threads are enough in `make test`.
BY_THREADS = pytest.mark.parametrize(
    "_on",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("ray", "local")), "threads"],
    indirect=True,
)


class FileRow(Item):
    """A row that a worker process receives as a `SentRow`."""

    def __reduce__(self) -> tuple[type[SentRow], tuple[str]]:
        return SentRow, (self.row_id,)


class FileShard(Shard):
    """A shard that a worker process receives as a `SentShard`."""

    def __reduce__(self) -> tuple[type[SentShard], tuple[str, tuple[Item, ...]]]:
        return SentShard, (self.shard_id, self.items)


def shard(shard_id: str, *row_ids: str) -> Shard:
    """A planned shard of rows with these ids."""
    return FileShard(shard_id, tuple(FileRow(row_id, row_id, seconds=1.0) for row_id in row_ids))


class Run:
    """One run of the loop and everything it said."""

    executor: type[RayWorkers] | type[LocalWorkers] | type[ThreadWorkers] = LocalWorkers

    def __init__(self, root: Path, shards: list[Shard]) -> None:
        self.root, self.shards = root, shards
        self.events: list[events.Event] = []
        self.stop = StopRequest()

    def __call__(
        self,
        *,
        workers: int = 1,
        max_attempts: int = 2,
        deadline_s: float | None = None,
        row_deadline_s: float | None = None,
        broken: bool = False,
        on_event: Callable[[events.Event], None] = events.ignore,
    ) -> Result:
        def sink(event: events.Event) -> None:
            self.events.append(event)
            on_event(event)

        make_runner = MakeRunner(str(self.root), broken)
        ledger = ShardLedger(
            self.shards, partial(committed, self.root), max_attempts=max_attempts, sink=sink
        )
        hire = WorkerRequest(make_runner, Placement("", threads=1), CONCURRENT_SHARDS)
        pool = WorkerPool(self.executor(lambda index: hire), workers)
        limits = Deadlines(deadline_s, row_deadline_s)
        return Scheduler(ledger, pool, deadlines=limits, sink=sink, stop=self.stop).run()

    def said(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def rows(self, shard_id: str) -> list[str]:
        record = read_commit(self.root, shard_id)
        return [] if record is None else record["ok"]


def test_every_shard_is_committed_once_and_two_are_in_flight_per_worker(tmp_path: Path) -> None:
    # The first two shards wait for each other; a third beside them would leave a mark.
    names = ["meet-0", "meet-1", "step-2", "step-3", "ok-4"]
    run = Run(tmp_path, [shard(f"{i:05d}", name, "ok-x") for i, name in enumerate(names)])
    result = run()
    assert set(result.done) == {f"{i:05d}" for i in range(5)}
    assert not result.failed and not result.fatal and not result.stopped
    # Ten rows as they were decoded, not as they were planned.
    assert result.seconds == pytest.approx(15.0) and result.worked_s > 0
    # The worker says each time what it has spent in all; the rest is the driver's side.
    assert result.cpu_s["model"] == 0.25
    assert result.cpu_s["driver"] > 0 and result.cpu_s["idle"] > 0
    assert sorted(event.shard_id for event in run.said(events.ShardDone)) == sorted(result.done)
    assert run.said(events.ShardRetry) == []
    assert not (tmp_path / "seen-3").exists()


@ON_RAY_LATER
def test_two_workers_share_the_shards(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard(f"{i:05d}", f"both-{i}") for i in range(6)])
    result = run(workers=2)
    assert len(result.done) == 6 and run.said(events.ShardRetry) == []
    assert len({read_commit(tmp_path, shard_id)["pid"] for shard_id in result.done}) == 2


@ON_RAY_LATER
def test_rows_that_kill_their_worker_are_found_and_the_rest_commits(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a", "die-b", "ok-c"), shard("00001", "ok-2")])
    result = run(max_attempts=1)
    assert set(result.done) == {"00000", "00001"}
    assert run.rows("00000") == ["ok-a", "ok-c"]
    (reason,) = read_commit(tmp_path, "00000")["bad"].values()
    assert reason.startswith("the worker process died")
    assert [event.row_id for event in run.said(events.CulpritFound)] == ["die-b"]
    assert len(run.said(events.BisectStarted)) == 1
    probed = (tmp_path / "probes.txt").read_text().split("\n")
    assert not any("ok-2" in line for line in probed)


def test_a_worker_that_dies_once_costs_one_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a", "once-b"), shard("00001", "ok-c")])
    result = run(max_attempts=3)
    assert run.rows("00000") == ["ok-a", "once-b"]
    assert set(result.done) == {"00000", "00001"}
    assert run.said(events.BisectStarted) == []
    assert len(run.said(events.WorkerLost)) == 1


def test_a_lost_device_ends_its_process_and_charges_nobody_it_took_along(tmp_path: Path) -> None:
    """One attempt is all there is: a charge would start a search among innocent rows."""
    shards = [shard("00000", "meet-0", "lost-a"), shard("00001", "meet-1", "hold-b")]
    run = Run(tmp_path, shards)
    result = run(max_attempts=1)
    assert set(result.done) == {"00000", "00001"} and not result.failed
    assert run.said(events.BisectStarted) == []
    (lost,) = run.said(events.WorkerLost)
    assert "the GPU was lost" in lost.reason and "LAUNCH_FAILED" in lost.reason
    assert [event.shard_id for event in run.said(events.ShardRetry)] == ["00000", "00001"]


@ON_RAY_LATER
def test_a_worker_that_dies_after_its_commit_has_done_its_work(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "late-a")])
    result = run(max_attempts=1)
    assert result.done["00000"].rows_ok == 1
    assert run.said(events.ShardRetry) == [] and run.said(events.BisectStarted) == []


@BY_THREADS
def test_an_exception_nobody_expected_is_blamed_on_its_row(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a", "raise-b", "ok-c")])
    run(max_attempts=1)
    assert run.rows("00000") == ["ok-a", "ok-c"]
    (culprits,) = run.said(events.CulpritFound)
    assert culprits.row_id == "raise-b"
    assert "ArithmeticError: cannot digest raise-b" in culprits.reason
    assert run.said(events.WorkerLost) == []


@ON_RAY_LATER
def test_a_row_that_hangs_is_killed_and_found(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a", "hang-b")])
    run(max_attempts=1, deadline_s=0.5)
    assert run.rows("00000") == ["ok-a"]
    (culprits,) = run.said(events.CulpritFound)
    assert culprits.row_id == "hang-b" and "no result within 1 s" in culprits.reason


@ON_RAY_LATER
def test_a_row_that_takes_longer_than_rows_may_is_found_long_before_its_shard_hangs(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a", "hang-b")])
    run(max_attempts=1, row_deadline_s=0.5)
    assert run.rows("00000") == ["ok-a"]
    (culprits,) = run.said(events.CulpritFound)
    assert culprits.row_id == "hang-b" and "no result within 0.5 s" in culprits.reason


@BY_THREADS
def test_a_shard_that_runs_out_of_memory_is_done_in_less_of_it(tmp_path: Path) -> None:
    """One attempt is all there is: a charge would start a search among innocent rows."""
    run = Run(tmp_path, [shard("00000", "big-a", "ok-b"), shard("00001", "ok-c")])
    result = run(max_attempts=1)
    assert set(result.done) == {"00000", "00001"} and run.rows("00000") == ["big-a", "ok-b"]
    said = [event.reason for event in run.said(events.ShardRetry)]
    assert [reason.partition("; again with ")[2][:2] for reason in said] == ["25", "6%"]
    assert "MemoryError: 4 GB" in said[0]
    assert run.said(events.BisectStarted) == [] and run.said(events.WorkerLost) == []


def test_a_process_that_the_system_kills_is_taken_for_one_that_took_too_much(
    tmp_path: Path,
) -> None:
    if Run.executor is RayWorkers:
        pytest.skip("Ray says for itself when it kills for memory")
    run = Run(tmp_path, [shard("00000", "oom-a")])
    result = run(max_attempts=1)
    assert set(result.done) == {"00000"} and run.said(events.BisectStarted) == []
    (again,) = run.said(events.ShardRetry)
    assert "died: SIGKILL (most likely too little memory" in again.reason


def frozen_process(root: Path) -> int:
    """The process that a freeze-* row has stopped. It says so a moment before, and another worker
    may be through with the shard in that moment: a wake-up before the sleep would be lost."""

    def stopped() -> int:
        with suppress(FileNotFoundError, ValueError):
            pid = int((root / "frozen").read_text())
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return pid
        return 0

    return wait_until(stopped, "no process was stopped")


@ON_RAY_LATER
def test_a_worker_that_was_frozen_and_wakes_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has committed its shard meanwhile: it comes too late, and works on."""
    monkeypatch.setattr(scheduler, "HUNG_FACTOR", 100.0)
    run = Run(tmp_path, [shard("00000", "freeze-a")])
    late = []

    def wake(event: events.Event) -> None:
        if not isinstance(event, events.ShardDone):
            return
        pid = frozen_process(tmp_path)
        os.kill(pid, signal.SIGCONT)
        late[:] = wait_until(lambda: list(tmp_path.glob(f"too-late-{pid}")), "it never woke")

    result = run(workers=2, deadline_s=1.0, on_event=wake)
    assert late and set(result.done) == {"00000"}
    record = read_commit(tmp_path, "00000")
    assert record["ok"] == ["freeze-a"] and record["pid"] != int((tmp_path / "frozen").read_text())
    assert run.said(events.WorkerLost) == [] and run.said(events.ShardRetry) == []


@BY_THREADS
def test_a_straggler_is_overtaken_by_a_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HUNG_FACTOR", 100.0)
    # The first call of slow-a waits for a commit that only another attempt can make.
    run = Run(tmp_path, [shard("00000", "slow-a")])
    result = run(workers=2, deadline_s=1.0)
    assert run.rows("00000") == ["slow-a"]
    assert set(result.done) == {"00000"}
    assert run.said(events.WorkerLost) == [] and run.said(events.ShardRetry) == []


@ON_RAY_LATER
def test_rows_that_only_fail_together_give_the_shard_up_with_advice(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "pair-a", "pair-b"), shard("00001", "ok-c")])
    result = run(max_attempts=1)
    assert set(result.done) == {"00001"}
    assert "smaller output.shard_seconds" in result.failed["00000"]
    assert run.said(events.CulpritFound) == []
    assert [event.shard_id for event in run.said(events.ShardFailed)] == ["00000"]


@BY_THREADS
def test_a_full_disk_stops_the_run_and_says_so(tmp_path: Path) -> None:
    shards = [shard("00000", "full-a"), *(shard(f"{i:05d}", "step-b") for i in range(1, 9))]
    run = Run(tmp_path, shards)
    result = run()
    assert "No space left on device" in result.fatal and "00000" in result.fatal
    assert "00000" not in result.done and read_commit(tmp_path, "00000") is None
    assert len(result.done) < 8
    assert run.said(events.ShardRetry) == []


def test_a_request_to_stop_finishes_what_is_in_flight_and_starts_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard(f"{i:05d}", "step-a", "step-b") for i in range(9)])

    def stop_at_first_commit(event: events.Event) -> None:
        if isinstance(event, events.ShardDone):
            run.stop("SIGTERM")

    result = run(on_event=stop_at_first_commit)
    assert result.stopped and not result.failed
    assert 1 <= len(result.done) <= 3
    # Whatever was in flight is committed and whole.
    assert {path.stem for path in tmp_path.glob("*.json")} == set(result.done)
    assert list(tmp_path.glob("running-*")) == []


def test_a_second_request_abandons_what_is_in_flight(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "hang-a")])

    def stop_twice(event: events.Event) -> None:
        if isinstance(event, events.InFlight):
            run.stop("SIGINT")

    result = run(on_event=stop_twice)
    assert result.stopped and not result.done and not result.failed


@BY_THREADS
def test_workers_that_never_get_ready_end_the_run_with_their_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, [shard("00000", "ok-a")])
    result = run(broken=True)
    assert "no worker could be started: RuntimeError: no such device" in result.fatal
    assert not result.done and run.said(events.WorkersReady) == []
