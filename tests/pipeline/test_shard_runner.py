"""The work behind a worker, in this process: real files in, real commits out, no Ray."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill.pipeline.dataset.commit_record import CommitRecord, committed_shards, read_commit
from earmill.pipeline.formats.format import Format, format_of
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_store import LocalBackend
from earmill.pipeline.worker import shard_runner
from earmill.pipeline.worker.messages import PublishError, ShardOrder
from earmill.pipeline.worker.row_pipeline import RowProcessor
from earmill.pipeline.worker.shard_runner import ShardRunner
from earmill.pipeline.worker.worker_process import is_permanent
from tests.chaos.jobs import committed_files, write_corpus, write_job
from tests.pipeline.workers_here import worker_job

CLIPS = 6


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner changes into its job's folder; this process comes back after each test."""
    monkeypatch.chdir(Path.cwd())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("runner") / "corpus", CLIPS, seconds=0.5)


class Work:
    """A planned job and one warm runner for it."""

    def __init__(self, folder: Path, corpus: Path, **options: Any) -> None:
        self.output = folder / "out"
        spec = JobSpec.load(write_job(folder / "job.yaml", corpus, self.output))
        self.plan: Plan = make_plan(open_source(spec.source), spec)
        self.layout = Layout.open(str(self.output))
        self.runner = ShardRunner(worker_job(spec, self.plan, 2, folder), **options)
        self.runner.warm_up()

    def order(self, number: int, attempt: str, **more: object) -> ShardOrder:
        return ShardOrder(self.plan.shards[number], attempt * 8, **more)  # type: ignore[arg-type]

    def commit(self, number: int) -> CommitRecord | None:
        return read_commit(self.layout, self.plan.shards[number].shard_id)


def test_a_shard_is_published_once_and_says_how(tmp_path: Path, corpus: Path) -> None:
    work = Work(tmp_path, corpus)
    work.runner.run(work.order(0, "a", attempts=2))
    record = work.commit(0)
    assert record is not None and record.attempt == "a" * 8
    assert record.info["attempts"] == 2 and record.info["device"]["device"] == "cpu"
    assert record.info["versions"]["soundfile"] and record.info["worker"]["pid"]
    assert record.spec_sha256 == work.runner._spec.sha256()
    # A later attempt finds the commit and leaves no trace.
    files = sorted(work.output.rglob("*"))
    work.runner.run(work.order(0, "b"))
    assert sorted(work.output.rglob("*")) == files
    assert work.runner.seconds_in_flight() == 0.0


def test_shards_that_overlap_give_the_files_of_shards_one_by_one(
    tmp_path: Path, corpus: Path
) -> None:
    """Also where there is only memory for a clip at a time."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone, together = Work(tmp_path / "one", corpus), Work(tmp_path / "two", corpus)
    numbers = range(len(alone.plan.shards))
    assert len(numbers) >= 3
    for number in numbers:
        alone.runner.run(alone.order(number, "a"))
    with ThreadPoolExecutor(2) as threads:
        orders = [
            together.order(number, "b", memory_share=(1.0, 1e-6)[number % 2]) for number in numbers
        ]
        list(threads.map(together.runner.run, orders))
    assert committed_files(together.output) == committed_files(alone.output)


def test_guilty_rows_go_to_quarantine_unprocessed(tmp_path: Path, corpus: Path) -> None:
    work = Work(tmp_path, corpus)
    culprits = work.plan.shards[0].items[0].row_id
    work.runner.run(work.order(0, "a", attempts=5, culprits={culprits: "signal 11"}))
    record = work.commit(0)
    assert record is not None
    assert (record.rows_ok, record.rows_bad) == (len(work.plan.shards[0].items) - 1, 1)
    (bad,) = pq.read_table(work.output / str(record.path("quarantine"))).to_pylist()
    assert (bad["row_id"], bad["stage"], bad["error_class"]) == (culprits, "worker", "worker_crash")
    assert "signal 11" in bad["message"] and bad["attempts"] == 5


def test_a_probe_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    work = Work(tmp_path, corpus)
    work.runner.probe(work.plan.shards[0].items)
    assert not [*work.output.rglob("*")]


def test_a_probe_meets_what_only_encoding_meets(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(tmp_path, corpus)
    culprits, other = work.plan.shards[0].items[:2]
    written = type(format_of("zarr"))
    real = written.write

    def breaks(self: Format, path: Path, rows: Sequence[FeatureRow], *more: Any) -> None:
        if culprits.row_id in {row.row_id for row in rows}:
            raise MemoryError(culprits.row_id)
        real(self, path, rows, *more)

    monkeypatch.setattr(written, "write", breaks)
    work.runner.probe([other])
    with pytest.raises(MemoryError, match=culprits.row_id):
        work.runner.probe([other, culprits])


def test_no_room_for_a_long_row_is_no_fault_of_the_row(tmp_path: Path, corpus: Path) -> None:
    work = Work(tmp_path, corpus, make_rows=partial(RowProcessor, long_s=0.2))
    for call in (
        lambda: work.runner.run(work.order(0, "a")),
        lambda: work.runner.probe(work.plan.shards[0].items),
    ):
        with largest_file(100), pytest.raises(PublishError) as caught:
            call()
        assert is_permanent(caught.value)
    assert work.commit(0) is None


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """This process can write no larger file, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_that_does_not_fit_is_not_committed_and_goes_through_later(
    tmp_path: Path, corpus: Path
) -> None:
    work = Work(tmp_path, corpus)
    work.runner.run(work.order(0, "a"))
    with largest_file(8000), pytest.raises(PublishError) as error:
        work.runner.run(work.order(1, "b"))
    assert is_permanent(error.value)
    assert "larger than the limit" in str(error.value.__cause__)
    assert committed_shards(work.layout) == {"00000"}
    assert not [path for path in work.output.rglob("*") if "b" * 8 in path.name]
    work.runner.run(work.order(1, "c"))
    assert committed_shards(work.layout) == {"00000", "00001"}


def test_relative_paths_resolve_against_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "driver"
    write_corpus(folder / "corpus", 1, seconds=0.5)
    monkeypatch.chdir(folder)
    spec = JobSpec.load(write_job(folder / "job.yaml", Path("corpus"), Path("out")))
    plan = make_plan(open_source(spec.source), spec)
    monkeypatch.chdir(tmp_path)
    runner = ShardRunner(worker_job(spec, plan, 1, folder))
    runner.run(ShardOrder(plan.shards[0], "a" * 8))
    assert committed_shards(Layout.open(str(folder / "out"))) == {"00000"}
    assert not (tmp_path / "out").exists()


def test_a_worker_whose_output_does_not_answer_says_so(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as hung meanwhile, its shard has met an outage and is not charged with it."""
    spec = JobSpec.load(write_job(tmp_path / "job.yaml", corpus, tmp_path / "out"))
    plan = make_plan(open_source(spec.source), spec)
    runner = ShardRunner(worker_job(spec, plan, 1, tmp_path))
    asked: list[str] = []

    def exists(self: LocalBackend, path: str) -> bool:
        asked.append(runner.waits_for())
        return True

    monkeypatch.setattr(shard_runner, "SLOW_CALL_S", 0.0)
    monkeypatch.setattr(LocalBackend, "exists", exists)
    runner.run(ShardOrder(Shard("00000", ()), "0" * 8))
    assert (asked, runner.waits_for()) == (["output"], "")
