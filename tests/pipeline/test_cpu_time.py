"""CPU time by part: parts that add up, in one thread, in several, and in threads of libraries."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amtcore.kernels.vector import threads
from earmill.pipeline.common import monitoring
from earmill.pipeline.common.monitoring import (
    CpuSeconds,
    LibraryThreads,
    carried,
    carried_alike,
    counted,
    current,
    doing,
    in_order,
)
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.driver.scheduler import CpuAccount
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.messages import ShardOrder
from earmill.pipeline.worker.shard_runner import ShardRunner
from tests.chaos.jobs import write_corpus, write_job
from tests.pipeline.workers_here import worker_job
from tests.waiting import process_rests

# Clocks of threads and of the process are read one after the other, and their owners run on.
CLOCKS_S = 0.002


def spend(seconds: float) -> None:
    """Keep this thread's processor busy."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_goes_to_the_innermost_part_and_none_of_it_twice() -> None:
    whole = CpuSeconds()
    tally = CpuSeconds(whole)
    begin = time.thread_time()
    with doing("decode", tally):
        spend(0.02)
        with doing("hash"):
            spend(0.01)
        spend(0.005)
    spent = time.thread_time() - begin
    spend(0.01)
    found = tally.seconds()
    assert found["hash"] == pytest.approx(0.01, abs=CLOCKS_S)
    assert found["decode"] == pytest.approx(0.025, abs=CLOCKS_S)
    assert sum(found.values()) == pytest.approx(spent, abs=CLOCKS_S)
    assert whole.seconds() == found
    assert current() is None


def test_time_of_models_is_a_part_and_known_by_model(
    libraries: tuple[Library, Library, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kernels, _ = libraries
    monkeypatch.setattr(monitoring, "library_threads", LibraryThreads())
    whole = CpuSeconds()
    tally = CpuSeconds(whole)
    with doing("model", tally):
        with doing("model", libraries="models", model="a"):
            kernels(0.01)
            with doing("encode"):
                spend(0.005)
        with doing("model", model="b"):
            spend(0.02)
        with doing("model", model="a"):
            spend(0.005)
        spend(0.01)
    assert tally.of_models() == whole.of_models()
    by_model = tally.of_models()
    assert by_model["a"] == pytest.approx(0.015, abs=CLOCKS_S)
    assert by_model["b"] == pytest.approx(0.02, abs=CLOCKS_S)
    assert tally.seconds() == {
        "model": pytest.approx(sum(by_model.values()) + 0.01, abs=CLOCKS_S),
        "encode": pytest.approx(0.005, abs=CLOCKS_S),
    }


def test_kernels_count_for_the_model_that_calls_them_beside_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring, "library_threads", LibraryThreads())
    monkeypatch.setattr(threads, "_carrier", None)
    threads.set_carrier(carried_alike)
    tally, begun = CpuSeconds(), threading.Barrier(2)

    def extract(model: str, seconds: float) -> None:
        with doing("model", tally, libraries="models", model=model):
            begun.wait()
            threads.parallel_for(lambda _: spend(seconds / 4), 4)

    with ThreadPoolExecutor(2) as callers:
        for done in [callers.submit(extract, "a", 0.04), callers.submit(extract, "b", 0.12)]:
            done.result()
    by_model = tally.of_models()
    assert by_model["a"] == pytest.approx(0.04, abs=5 * CLOCKS_S)
    assert by_model["b"] == pytest.approx(0.12, abs=5 * CLOCKS_S)


def test_a_part_counts_for_nobody_where_nobody_counts() -> None:
    with doing("hash"):
        assert current() is None


def test_an_error_ends_its_part() -> None:
    tally = CpuSeconds()
    with doing("decode", tally):
        with pytest.raises(ValueError, match="broken"), doing("hash"):
            spend(0.005)
            raise ValueError("broken")
        assert current() is tally
    assert tally.seconds()["hash"] >= 0.005


def test_work_and_items_made_in_other_threads_count_for_who_asked() -> None:
    tally = CpuSeconds()
    closed = []

    def items() -> Iterator[int]:
        try:
            while True:
                spend(0.005)
                yield 1
        finally:
            closed.append(True)

    with doing("other", tally):
        work, made = carried("encode", spend), counted("fetch", items(), current())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work, 0.01).result()
        assert pool.submit(lambda: next(made) + next(made)).result() == 2
        pool.submit(spend, 0.01).result()
        made.close()  # type: ignore[attr-defined]
    assert closed
    assert tally.seconds()["encode"] == pytest.approx(0.01, abs=CLOCKS_S)
    assert tally.seconds()["fetch"] == pytest.approx(0.01, abs=CLOCKS_S)


class Library:
    """A thread that spends what it is told to, and says nothing to anybody."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, seconds: float) -> None:
        self._pool.submit(spend, seconds).result()

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(name="libraries")
def two_libraries() -> Iterator[tuple[Library, Library, Library]]:
    found = Library(), Library(), Library()
    yield found
    for library in found:
        library.close()


def test_a_library_s_threads_work_for_what_has_started_them(
    libraries: tuple[Library, Library, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, kernels, zarr = libraries
    ray(0.001)
    monkeypatch.setattr(monitoring, "library_threads", LibraryThreads())
    tally = CpuSeconds()
    with doing("model", tally, libraries="models"):
        kernels(0.01)
        ray(0.01)
    with doing("encode", tally, libraries="files"):
        zarr(0.02)
    with doing("check", tally, libraries="files"):
        zarr(0.005)
        kernels(0.015)
    with doing("model", tally, libraries="models"):
        pass
    found = tally.seconds()
    assert found["model"] == pytest.approx(0.025, abs=2 * CLOCKS_S)
    assert found["encode"] == pytest.approx(0.02, abs=2 * CLOCKS_S)
    assert found["check"] == pytest.approx(0.005, abs=2 * CLOCKS_S)


def test_what_an_unseen_thread_spent_before_the_beginning_counts_for_nothing() -> None:
    first, second = Library(), Library()
    first(0.001)
    threads = LibraryThreads()
    first.close()
    second(0.05)
    threads.begin()
    second(0.01)
    assert threads.spent("models") == pytest.approx(0.01, abs=CLOCKS_S)
    second.close()


def test_a_thread_that_says_what_it_does_is_no_library_s() -> None:
    tally, done = CpuSeconds(), threading.Event()

    def ours() -> None:
        with doing("decode", tally):
            spend(0.01)
        done.wait()

    threads = LibraryThreads()
    thread = threading.Thread(target=ours)
    thread.start()
    while "decode" not in tally.seconds():
        time.sleep(0.001)
    assert threads.spent("models") < CLOCKS_S
    done.set()
    thread.join()


def test_a_worker_s_parts_are_its_process_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "corpus", 6, seconds=4.0)
    path = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", shard_seconds=9)
    models = [{"model": "dau1997", "fs_hz": 16000}, {"model": "melspectrogram"}]
    spec = JobSpec.load(path, [f"extract={json.dumps(models)}"])
    plan = make_plan(open_source(spec.source), spec)
    runner = ShardRunner(worker_job(spec, plan, 2, tmp_path))
    runner.warm_up()
    process_rests()
    earlier, before = sum(runner.cpu_s().values()), time.process_time()
    assert len(plan.shards) > 1
    with ThreadPoolExecutor(2) as pool:
        orders = [ShardOrder(shard, f"{i:08x}") for i, shard in enumerate(plan.shards)]
        list(pool.map(runner.run, orders))
    found, spent = runner.cpu_s(), time.process_time() - before
    assert list(in_order(found)) == list(monitoring.PARTS)
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) - earlier == pytest.approx(spent, rel=0.02, abs=0.01)
    # What nobody claims: threads that wake and wait, and this test's own.
    assert found["other"] < 0.2 * spent
    # The commit records share all of it that was spent before they were written.
    records = [record.info["cpu_s"] for record in commits(Layout.open(spec.output.uri)).values()]
    for part in set(monitoring.PARTS) - {"other", "commit"}:
        told = sum(record[part] for record in records)
        assert 0 < told <= found[part] + CLOCKS_S, part
    assert sum(record["model"] for record in records) == pytest.approx(found["model"], abs=0.01)
    for record in commits(Layout.open(spec.output.uri)).values():
        by_model, of_all = record.info["model_cpu_s"], record.info["cpu_s"]["model"]
        assert list(by_model) == ["dau1997", "melspectrogram"] and min(by_model.values()) > 0
        assert 0.9 * of_all < sum(by_model.values()) <= of_all + 1e-5


def worker(pid: int, threads: int) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(pid=pid, threads=threads), came_s=0.0, left_s=math.inf
    )


def test_cores_count_while_they_are_there() -> None:
    """A node that came late and one that left: neither had its cores idle the whole time."""
    made_s = time.monotonic()
    account = CpuAccount([gone := worker(-1, 1000), late := worker(-2, 1000)], time.monotonic)
    began_s = time.monotonic()
    gone.left_s, late.came_s = began_s, began_s + 0.2
    spend(0.25)
    found, passed_s = account.seconds(), time.monotonic() - began_s
    of_gone_s, of_late_s = began_s - made_s, passed_s - 0.2
    assert 0.0 < found["idle"] <= 1000 * (of_gone_s + of_late_s) + 1e-3


def test_a_run_adds_up_the_last_words_of_its_workers() -> None:
    account = CpuAccount([worker(-1, 500), worker(-2, 500)], time.monotonic)
    account.heard((0, 1), {"model": 1.0, "fetch": 0.5})
    account.heard((0, 1), {"model": 3.0, "fetch": 1.0})
    account.heard((0, 1), {})
    account.heard((0, 2), {"model": 0.25})
    account.heard((1, 1), {"model": 2.0, "hash": 0.5})
    spend(0.01)
    found = account.seconds()
    assert {part: found[part] for part in ("fetch", "model", "hash")} == {
        "fetch": 1.0, "model": 5.25, "hash": 0.5,
    }  # fmt: skip
    assert found["driver"] >= 0.01
    # A thousand cores for a hundredth of a second, less what the workers say.
    assert found["idle"] > 1.0
