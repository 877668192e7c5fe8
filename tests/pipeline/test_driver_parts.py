"""Deadlines, placements, summaries and events, each against hand arithmetic."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from earmill.pipeline.common.errors import CommitError, DeviceError, SpecError
from earmill.pipeline.common.text import named_line
from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.placement import Node, cpu_note, place_workers
from earmill.pipeline.driver.scheduler import (
    BASE_S,
    HUNG_FACTOR,
    OVER_MEDIAN,
    WALL_PER_AUDIO_S,
    Deadlines,
    Scheduler,
)
from earmill.pipeline.driver.shard_ledger import Result
from earmill.pipeline.driver.worker_pool import READY, WorkerPool, WorkerSlot
from earmill.pipeline.operations.run_job import summarise
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.messages import LostCall, Outcome, PublishError, ShardOrder, WorkerInfo
from earmill.pipeline.worker.worker_process import ShardWorker, is_permanent
from tests.pipeline.runners import shard


def test_a_deadline_is_generous_until_rates_are_known() -> None:
    deadlines = Deadlines()
    assert deadlines.limit_s(600.0) == BASE_S + WALL_PER_AUDIO_S * 600.0
    for wall_s in (2.0, 4.0):
        deadlines.learn(wall_s, 400.0)
    assert deadlines.limit_s(600.0) == BASE_S + WALL_PER_AUDIO_S * 600.0
    deadlines.learn(400.0, 400.0)
    # Three rates: the median is a hundredth of real time, whatever the outlier.
    assert deadlines.limit_s(600.0) == pytest.approx(BASE_S + OVER_MEDIAN * 0.01 * 600.0)
    assert deadlines.hung_s(600.0, 3) == HUNG_FACTOR * deadlines.limit_s(600.0)


def test_a_fixed_deadline_stays() -> None:
    deadlines = Deadlines(7.0)
    for _ in range(5):
        deadlines.learn(1.0, 1.0)
    assert deadlines.limit_s(1e6) == 7.0


NODES = [Node("a", cpus=8, gpus=0), Node("b", cpus=4, gpus=2), Node("c", cpus=0, gpus=0)]


def test_on_cpu_one_worker_a_node_takes_all_cores() -> None:
    places = place_workers(NODES, RunSpec(device="cpu"), at_most=99)
    assert [(place.node_id, place.threads) for place in places] == [("a", 8), ("b", 4)]


def test_workers_that_share_a_node_share_its_cores() -> None:
    on_cpu = {"device": "cpu"}
    places = place_workers(NODES, RunSpec(workers=5, **on_cpu), at_most=99)
    assert [place.node_id for place in places] == ["a", "b", "a", "b", "a"]
    assert [place.threads for place in places] == [2, 2, 2, 2, 2]
    forced = place_workers(NODES, RunSpec(workers=3, threads_per_worker=6, **on_cpu), at_most=99)
    assert [place.threads for place in forced] == [6, 6, 6]


def test_there_are_no_more_workers_than_shards() -> None:
    assert len(place_workers(NODES, RunSpec(workers=5), at_most=2)) == 2


GPU_NODES = [Node("a", cpus=8, gpus=2), Node("b", cpus=16, gpus=1), Node("c", cpus=4, gpus=0)]


def seats(run: RunSpec, at_most: int = 99) -> list[tuple[str, str, float]]:
    places = place_workers(GPU_NODES, run, at_most=at_most)
    return [(place.node_id, place.device, place.num_gpus) for place in places]


def test_every_gpu_has_a_worker_and_nodes_without_work_on_their_cpus() -> None:
    assert seats(RunSpec()) == [
        ("a", "auto", 1.0),
        ("b", "auto", 1.0),
        ("a", "auto", 1.0),
        ("c", "cpu", 0.0),
    ]
    assert seats(RunSpec(device="cuda")) == [(node, "cuda", 1.0) for node in "aba"]
    assert seats(RunSpec(device="cpu")) == [(node, "cpu", 0.0) for node in "abc"]
    assert seats(RunSpec(gpus_per_worker=0)) == [(node, "cpu", 0.0) for node in "abc"]
    assert seats(RunSpec(), at_most=1) == [("a", "auto", 1.0)]
    assert seats(RunSpec(workers=6))[3:] == [("c", "cpu", 0.0)] * 3
    threads = [place.threads for place in place_workers(GPU_NODES, RunSpec(), at_most=99)]
    assert threads == [4, 16, 4, 4]


def test_shares_of_a_gpu_never_add_up_over_two_of_them() -> None:
    halves = seats(RunSpec(device="cuda", gpus_per_worker=0.5))
    assert [node for node, *_ in halves] == ["a", "b", "a", "b", "a", "a"]
    assert {share for *_, share in halves} == {0.5}
    # Two GPUs hold two workers of 0.6, not three.
    assert len(seats(RunSpec(device="cuda", gpus_per_worker=0.6))) == 3


def test_a_job_on_gpus_says_what_it_misses() -> None:
    with pytest.raises(DeviceError, match=r"run.device: expected a node with a GPU for cuda"):
        place_workers(GPU_NODES[2:], RunSpec(device="cuda"), at_most=9)
    with pytest.raises(SpecError, match="at most 3, as many as the cluster's GPUs hold at 1 each"):
        place_workers(GPU_NODES, RunSpec(device="cuda", workers=4), at_most=9)
    assert DeviceError("x").exit_code == 2


def test_a_job_that_leaves_the_device_open_says_that_it_runs_on_cpu() -> None:
    assert "the models run on CPU" in cpu_note(GPU_NODES[2:], RunSpec())
    assert cpu_note(GPU_NODES, RunSpec()) == ""
    for chosen in (RunSpec(device="cpu"), RunSpec(gpus_per_worker=0)):
        assert cpu_note(GPU_NODES[2:], chosen) == ""


def test_a_cluster_without_a_cpu_is_refused() -> None:
    with pytest.raises(SpecError, match="no node with a CPU"):
        place_workers(NODES[2:], RunSpec(), at_most=1)


def summary(tmp_path: Path, result: Result, **changes: object) -> events.JobFinished:
    settings: dict[str, Any] = {
        "before": [Committed(rows_ok=90, rows_bad=0, nbytes=1, seconds=0.0)],
        "shards": 2,
        "max_bad_fraction": 0.05,
        **changes,
    }
    job: Any = SimpleNamespace(layout=Layout.open(str(tmp_path)))
    job.plan = SimpleNamespace(shards=[None] * settings["shards"], skipped={})
    job.spec = SimpleNamespace(run=RunSpec(max_bad_fraction=settings["max_bad_fraction"]))
    return summarise(job, result, settings["before"])


def one_done(rows_bad: int) -> Result:
    record = Committed(rows_ok=10, rows_bad=rows_bad, nbytes=1, seconds=0.0)
    return Result(done={"00001": record}, seconds=50.0, worked_s=2.0)


@pytest.mark.parametrize(("rows_bad", "code"), [(0, 0), (5, 0), (6, 3)])
def test_the_allowed_fraction_counts_all_rows_and_is_inclusive(
    tmp_path: Path, rows_bad: int, code: int
) -> None:
    # 5 of 105 is below 5 %, 6 of 106 above.
    end = summary(tmp_path, one_done(rows_bad))
    assert (end.status, end.exit_code) == ("done", code)
    assert ("max_bad_fraction" in end.message) == (code == 3)
    assert end.times_real_time == 25.0


def test_a_run_without_a_good_row_claims_no_audio_and_no_speed(tmp_path: Path) -> None:
    record = Committed(rows_ok=0, rows_bad=10, nbytes=1, seconds=0.0)
    end = summary(tmp_path, Result(done={"00001": record}, worked_s=2.0), before=[], shards=1)
    assert (end.seconds, end.times_real_time) == (0.0, 0.0)
    assert "0 s audio" in end.message and "real time" not in end.message


def test_exactly_the_allowed_fraction_is_allowed(tmp_path: Path) -> None:
    none_before = {"before": [], "shards": 1, "max_bad_fraction": 0.5}
    assert summary(tmp_path, one_done(10), **none_before).exit_code == 0
    end = summary(tmp_path, one_done(11), **none_before)
    assert end.exit_code == 3 and "so the exit code is 3" in end.message
    assert end.message.endswith(f"run: earmill inspect {end.output} --quarantine")


def test_missing_shards_say_why_and_how_to_go_on(tmp_path: Path) -> None:
    cases = [
        (Result(stopped=True), "stopped", "stopped"),
        (Result(failed={"00001": "no row fails alone"}), "failed", "00001: no row fails alone"),
        (Result(fatal="the disk is full"), "failed", "the disk is full"),
    ]
    for result, status, text in cases:
        end = summary(tmp_path, result)
        assert (end.status, end.exit_code) == (status, 1)
        assert text in end.message and "1 of 2 shards" in end.message
        assert "--resume" in end.message


def test_a_task_whose_share_is_done_has_not_failed(tmp_path: Path) -> None:
    end = summary(tmp_path, Result(left_to_others=1))
    assert (end.status, end.exit_code) == ("left", 0)
    assert "1 of 2 shards are committed, other drivers have the rest" in end.message
    failed = summary(tmp_path, Result(left_to_others=1, failed={"00001": "no row fails alone"}))
    assert (failed.status, failed.exit_code) == ("failed", 1)
    stopped = summary(tmp_path, Result(left_to_others=1, stopped=True))
    assert (stopped.status, stopped.exit_code) == ("stopped", 1) and "--resume" in stopped.message


def test_nothing_to_do_is_no_failure(tmp_path: Path) -> None:
    end = summary(tmp_path, Result(), shards=1)
    assert (end.status, end.exit_code, end.rows_ok) == ("nothing_to_do", 0, 90)


def test_every_event_is_json_with_its_name_first() -> None:
    kinds = {}
    for kind in events.Event.__subclasses__():
        fields = {field.name: "x" for field in dataclasses.fields(kind)}
        record = json.loads(json.dumps(kind(**fields).to_dict()))
        assert next(iter(record)) == "event"
        kinds[record["event"]] = kind.__name__
    # Names are what machines rely on: one a class.
    assert len(set(kinds.values())) == len(kinds) == 19


class Failing:
    """A runner that fails as told."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def warm_up(self) -> WorkerInfo:
        return WorkerInfo(1, "cpu", 1)

    def run(self, order: ShardOrder) -> None:
        if isinstance(self.error, OSError):
            raise PublishError("not written") from self.error
        raise self.error

    def probe(self, items: object) -> None:
        raise self.error

    def seconds_in_flight(self) -> float:
        return 1.5

    def cpu_s(self) -> dict[str, float]:
        return {}

    def waits_for(self) -> str:
        return ""


ORDER = ShardOrder(shard("00000", "ok-a"), "0" * 8)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space"), ("publish", True)),
        (OSError(errno.ECONNRESET, "reset"), ("publish", False)),
        (KeyError("x"), ("rows", False)),
    ],
)
def test_a_worker_turns_exceptions_into_outcomes(
    error: Exception, expected: tuple[str, bool]
) -> None:
    worker = ShardWorker(lambda: Failing(error))
    outcome = worker.run(ORDER)
    assert not outcome.ok and (outcome.stage, outcome.permanent) == expected
    assert type(error).__name__ in outcome.message and "\n" not in outcome.message
    status = worker.status()
    assert status.counts is not None
    assert dataclasses.replace(status, counts=None) == Outcome(ok=True, value=1.5)
    assert worker.probe([]).stage == "rows"


def test_a_worker_that_cannot_start_says_so_each_time() -> None:
    def broken() -> Failing:
        raise RuntimeError("no device")

    worker = ShardWorker(broken)
    for _ in range(2):
        outcome = worker.warm_up()
        assert (outcome.ok, outcome.stage) == (False, "warm_up")
        assert outcome.message == "RuntimeError: no device"
    assert worker.run(ORDER).stage == "warm_up"


def test_permanent_errors_are_found_behind_others() -> None:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system")
        except OSError as cause:
            raise CommitError("shard 1 was not written") from cause
    except CommitError as error:
        assert is_permanent(error)
    assert not is_permanent(CommitError("the file did not read back"))


def test_named_line_names_the_place() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        assert named_line(error) == "ValueError: first second"
        assert "test_named_line_names_the_place" in named_line(error, where=True)


def test_audio_in_flight_never_falls_until_its_shard_has_ended() -> None:
    """A worker forgets a shard once it is published; the driver hears of that later."""
    slot, seen = WorkerSlot(0), []
    for report in (120.0, 300.0, 340.0, 60.0):  # the first shard, of 300 s, is published before 60
        slot.under_way(report)
        seen.append(slot.seconds_in_flight)
    assert seen == [120.0, 300.0, 340.0, 340.0]
    slot.ended(300.0)
    assert slot.seconds_in_flight == 40.0
    slot.under_way(80.0)
    assert slot.seconds_in_flight == 80.0
    slot.ended(300.0)
    assert slot.seconds_in_flight == 0.0


def test_a_late_loss_of_an_earlier_process_does_not_end_the_next_one() -> None:
    """Both calls of a dead process fail, the second one when the next process is warm already."""
    said: list[events.Event] = []
    workers = mock.Mock()
    pool = WorkerPool(workers, 1)
    scheduler = Scheduler(mock.Mock(), pool, sink=said.append)
    pool.start()
    (slot,) = pool.slots
    slot.state = READY
    calls = [pool.submit(slot, "run", payload=None) for _ in range(2)]
    for call in calls:
        slot.work.remove(call)
        scheduler._settle_lost(call, LostCall("the worker process died"))
        slot.state = READY
    assert [event.kind for event in said] == ["worker_lost"]
    assert calls[0].shared_worker and calls[1].shared_worker
    warmed_up = [call for call in workers.call.call_args_list if call.args[1] == "warm_up"]
    assert len(warmed_up) == 2

    fresh = pool.submit(slot, "run", payload=None)
    scheduler._settle_lost(fresh, LostCall("the worker process died"))
    assert [event.kind for event in said] == ["worker_lost", "worker_lost"]
