"""Outages through real sources, a real worker and real commits: nothing of them becomes a row.

Each job must end with every row read, or stopped with one line and nothing in quarantine, so that
the same job goes on later. Time is the clock's of `outages`.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from earmill.pipeline.common.errors import SourceOutage
from earmill.pipeline.dataset.commit_record import Committed, read_commit
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import Result
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import base as sources_base
from earmill.pipeline.sources import fetch as fetch_module
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.shard_runner import ShardRunner
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline.audio_factory import clip
from tests.pipeline.outages import Clock, FaultyStore, drive, s3_error, s3_store
from tests.pipeline.workers_here import worker_job

CLIPS = 4
OUTPUT: dict[str, Any] = {"params": FEW, "formats": ["parquet"], "shard_seconds": 0.2}
AWAY = s3_error("503 Service Unavailable", "ServiceUnavailable")
DENIED = s3_error("403 Forbidden", "AccessDenied")


_opened: list[Job] = []


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runner changes into its job's folder; this process comes back, and its threads end."""
    monkeypatch.chdir(Path.cwd())
    yield
    while _opened:
        _opened.pop().runner.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sources_base, "FETCH_RETRIES", clock.retries())
    return clock


class Job:
    """A planned job of one-clip shards and its worker."""

    def __init__(self, job: Path) -> None:
        self.spec = JobSpec.load(job)
        self.plan = make_plan(open_source(self.spec.source), self.spec)
        self.layout = Layout.open(self.spec.output.uri)
        self.runner = ShardRunner(worker_job(self.spec, self.plan, 1, job.parent))
        self.runner.warm_up()
        _opened.append(self)

    def committed(self, shard_id: str) -> Committed | None:
        record = read_commit(self.layout, shard_id)
        return None if record is None else Committed(record.rows_ok, record.rows_bad, 0, 0.0)

    def run(self, clock: Clock, **more: Any) -> tuple[Result, list[events.Event]]:
        pending = [s for s in self.plan.shards if self.committed(s.shard_id) is None]
        return drive(pending, self.runner, self.committed, clock, **more)

    def rows(self) -> tuple[int, int]:
        """Good and bad rows of all commits."""
        found = [self.committed(shard.shard_id) for shard in self.plan.shards]
        return (sum(c.rows_ok for c in found if c), sum(c.rows_bad for c in found if c))


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[FaultyStore, dict[str, Any]]]:
    with s3_store() as (store, options):
        fs = fsspec.filesystem("s3", **options)
        for index in range(CLIPS):
            fs.pipe_file(f"corpus/speech/{index}.wav", clip("wav", 0.3, seed=index))
        yield store, options


@pytest.fixture
def store(bucket: tuple[FaultyStore, dict[str, Any]]) -> Iterator[FaultyStore]:
    yield bucket[0]
    bucket[0].fault = lambda path: None


def s3_job(folder: Path, options: dict[str, Any]) -> Job:
    path = write_job(folder / "job.yaml", folder, folder / "out", **OUTPUT)
    job = yaml.safe_load(path.read_text())
    job["source"] = {"kind": "files", "uri": "s3://corpus/speech", "storage_options": options}
    path.write_text(yaml.safe_dump(job))
    return Job(path)


def local_job(folder: Path) -> Job:
    corpus = write_corpus(folder / "corpus", CLIPS, seconds=0.3)
    return Job(write_job(folder / "job.yaml", corpus, folder / "out", **OUTPUT))


def test_a_minute_of_503_costs_no_row(
    tmp_path: Path, bucket: tuple[FaultyStore, dict[str, Any]], store: FaultyStore, clock: Clock
) -> None:
    job = s3_job(tmp_path, bucket[1])
    store.fault = lambda path: AWAY if 0.0 <= clock() < 60.0 and "speech/" in path else None
    result, said = job.run(clock)
    assert job.rows() == (CLIPS, 0) and len(result.done) == CLIPS and not result.fatal
    assert 60.0 <= clock() < 120.0
    assert any(isinstance(event, events.ShardWaits) for event in said)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(AWAY, "the source cannot be read"), (DENIED, "nor can s3://corpus/speech")],
    ids=["503", "403 after success"],
)
def test_a_lasting_outage_stops_the_run_and_resume_reads_every_row(
    tmp_path: Path,
    bucket: tuple[FaultyStore, dict[str, Any]],
    store: FaultyStore,
    clock: Clock,
    answer: tuple[str, bytes],
    text: str,
) -> None:
    job = s3_job(tmp_path, bucket[1])

    def cut(shard_id: str) -> None:
        store.fault = lambda path: answer if "speech/" in path else None

    result, said = job.run(clock, after=cut)
    assert job.rows() == (1, 0) and len(result.done) == 1 and result.failed == {}
    assert text in result.fatal and "attempts in a row" in result.fatal
    assert "\n" not in result.fatal and "hush" not in result.fatal
    assert not any(isinstance(event, events.BisectStarted) for event in said)
    store.fault = lambda path: None
    assert not job.run(clock)[0].fatal
    assert job.rows() == (CLIPS, 0)


def test_one_object_that_is_gone_is_one_bad_row_though_every_shard_is_one_row(
    tmp_path: Path, bucket: tuple[FaultyStore, dict[str, Any]], store: FaultyStore, clock: Clock
) -> None:
    job = s3_job(tmp_path, bucket[1])
    gone = s3_error("404 Not Found", "NoSuchKey")
    # The very first shard: it waits until another one shows that the bucket is there.
    store.fault = lambda path: gone if path.endswith("0.wav") else None
    result, said = job.run(clock)
    assert job.rows() == (CLIPS - 1, 1) and not result.fatal
    (waits,) = [event for event in said if isinstance(event, events.ShardWaits)]
    assert "no row of this source was read so far" in waits.reason


def test_a_row_missing_after_a_resume_is_judged_by_rows_of_the_run_before(
    tmp_path: Path, clock: Clock
) -> None:
    job = local_job(tmp_path)
    first, *others = job.plan.shards
    Path(others[0].items[0].uri).unlink()
    given = (first.items[0],)
    result, _ = drive([others[0]], job.runner, job.committed, clock, witnesses=given)
    assert job.rows() == (0, 1) and not result.fatal


def test_when_nothing_is_there_the_run_stops_instead_of_quarantining_it_all(
    tmp_path: Path, clock: Clock
) -> None:
    job = local_job(tmp_path)
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    result, _ = job.run(clock)
    assert job.rows() == (0, 0)
    assert "every row that was tried is missing from the source" in result.fatal
    assert clock() < 60.0
    (tmp_path / "elsewhere").rename(tmp_path / "corpus")
    assert not job.run(clock)[0].fatal and job.rows() == (CLIPS, 0)


def test_a_folder_that_goes_away_and_comes_back_costs_no_row(tmp_path: Path, clock: Clock) -> None:
    job = local_job(tmp_path)
    tried: list[str] = []

    def move(shard_id: str) -> None:
        tried.append(shard_id)
        if len(tried) == 1:
            (tmp_path / "corpus").rename(tmp_path / "elsewhere")
        elif len(tried) == 3:
            (tmp_path / "elsewhere").rename(tmp_path / "corpus")

    result, _ = job.run(clock, after=move)
    assert job.rows() == (CLIPS, 0) and not result.fatal and len(tried) > CLIPS


@pytest.mark.parametrize(
    "number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOTCONN]
)
def test_what_the_system_says_of_itself_is_no_property_of_a_row(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    job, load = local_job(tmp_path), fetch_module.open_regular

    def failing(path: str, *more: Any) -> Any:
        if clock() < 60.0:
            raise OSError(number, "injected", path)
        return load(path, *more)

    monkeypatch.setattr(fetch_module, "open_regular", failing)
    result, _ = job.run(clock)
    assert job.rows() == (CLIPS, 0) and not result.fatal


def test_a_read_that_fails_below_the_decoder_is_no_short_file(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files are read in place: the decoder sees the failure, and takes it for the end."""
    monkeypatch.setattr(fetch_module, "MEMORY_BYTES", 100)
    job = local_job(tmp_path)
    reads = iter(range(10**6))

    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            if next(reads) == 2:
                raise OSError(errno.EIO, "injected")
            return super().readinto(buffer)

    monkeypatch.setattr(fetch_module, "open_regular", lambda path: io.BufferedReader(Failing(path)))

    result, said = job.run(clock)
    assert job.rows() == (CLIPS, 0) and not result.fatal
    (waits,) = [event for event in said if isinstance(event, events.ShardWaits)]
    assert "injected" in waits.reason


def test_a_full_temporary_folder_is_no_property_of_a_row(
    tmp_path: Path,
    bucket: tuple[FaultyStore, dict[str, Any]],
    store: FaultyStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = s3_job(tmp_path, bucket[1])
    monkeypatch.setattr(fetch_module, "MEMORY_BYTES", 100)
    make: Callable[..., Any] = fetch_module.temporary_file

    def full() -> str:
        if clock() < 60.0:
            raise OSError(errno.ENOSPC, "No space left on device", "/tmp")
        return str(make())

    monkeypatch.setattr(fetch_module, "temporary_file", full)
    result, _ = job.run(clock)
    assert job.rows() == (CLIPS, 0) and not result.fatal


def test_a_bucket_that_says_slow_down_while_it_is_listed_is_asked_again(
    tmp_path: Path,
    bucket: tuple[FaultyStore, dict[str, Any]],
    store: FaultyStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources_base, "LISTING_RETRIES", clock.retries(75.0))
    store.fault = lambda path: AWAY if clock() < 60.0 else None
    job = s3_job(tmp_path, bucket[1])
    assert job.plan.rows == CLIPS and clock() >= 60.0
    store.fault = lambda path: AWAY
    with pytest.raises(SourceOutage, match="source s3://corpus/speech: cannot be read") as caught:
        s3_job(tmp_path, bucket[1])
    assert "\n" not in str(caught.value) and clock() < 240.0
