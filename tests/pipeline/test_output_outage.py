"""An output that fails under the driver's own small files: one line, exit code 1, and --resume.

Every shard of the jobs is committed before the fault, or none is wanted, so that no Ray is needed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from earmill.jobs.cli import run
from earmill.pipeline.common.errors import OutputError, StorageError
from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage import local_store, retrying
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.messages import ShardOrder
from earmill.pipeline.worker.shard_runner import ShardRunner
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline.outages import Clock, FaultyStore, s3_error, s3_store
from tests.pipeline.workers_here import worker_job

CLIPS = 2
OUTPUT: dict[str, Any] = {"params": FEW, "formats": ["parquet"], "shard_seconds": 0.2}
SMALL_FILES = [
    *("plan/", "dataset.json", "driver.json", "index/", "README.md", "croissant.json"),
    "provenance.jsonld",
]


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner changes into its job's folder; this process comes back after each test."""
    monkeypatch.chdir(Path.cwd())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("output") / "corpus", CLIPS, seconds=0.3)


def commit_all(job: Path) -> Path:
    """Commit every shard as workers do; nothing else of the dataset is there."""
    spec = JobSpec.load(job)
    plan = make_plan(open_source(spec.source), spec)
    runner = ShardRunner(worker_job(spec, plan, 1, job.parent))
    runner.warm_up()
    for number, shard in enumerate(plan.shards):
        runner.run(ShardOrder(shard, f"{number:08x}"))
    runner.close()
    return job


def fail(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, on: Callable[[], bool]
) -> None:
    """Let the disk refuse to write files of a name."""
    write = local_store._write_new

    def failing(path: str, data: bytes) -> None:
        if name.rstrip("/") in path.rsplit("/out/", 1)[-1] and on():
            raise OSError(number, "injected", path)
        write(path, data)

    monkeypatch.setattr(local_store, "_write_new", failing)


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        *[(name, errno.ENOSPC, "no space left on the device") for name in SMALL_FILES],
        ("index/", errno.EDQUOT, "quota"),
        ("index/", errno.EROFS, "read-only"),
        ("index/", errno.EIO, "the device failed"),
    ],
)
def test_a_disk_that_fails_under_a_small_file_is_one_line(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    number: int,
    said: str,
) -> None:
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **OUTPUT)
    # A dataset of its own plan and commits that was never begun is not continued: begin it first.
    full = {"now": False}
    begun = name not in ("plan/", "dataset.json", "driver.json")
    if begun:
        prepare(job)
    fail(monkeypatch, name, number, on=lambda: full["now"])
    full["now"] = True
    assert run(["extract", str(job), "--resume", "--quiet"]) == 1
    err = capsys.readouterr().err.strip()
    assert "\n" not in err and said in err and "--resume" in err and "Traceback" not in err
    assert name.rstrip("/") in err
    full["now"] = False
    if begun:
        assert run(["extract", str(job), "--resume"]) == 0
        assert verify(Layout.open(str(tmp_path / "out"))).problems == []


def prepare(job: Path) -> None:
    """Begin the dataset as the driver does, then commit every shard."""
    spec = JobSpec.load(job)
    layout = Layout.open(spec.output.uri, spec.output.storage_options)
    plan = make_plan(open_source(spec.source), spec)
    plan.write(layout)
    open_dataset(layout, worker_job(spec, plan, 1, job.parent).dataset)
    commit_all(job)


def test_an_output_that_cannot_be_written_at_all_is_still_an_error_of_the_job(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **OUTPUT)
    fail(monkeypatch, ".probe", errno.EACCES, on=lambda: True)
    with pytest.raises(OutputError, match=r"cannot write to .* permission denied") as caught:
        run_job(JobSpec.load(job))
    assert caught.value.exit_code == 2


def test_an_error_of_the_disk_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    layout = Layout.open(str(tmp_path / "file"))
    with pytest.raises(StorageError) as caught:
        layout.read_bytes("dataset.json")
    assert caught.value.errno == errno.ENOTDIR and not caught.value.transient
    with pytest.raises(FileNotFoundError):
        Layout.open(str(tmp_path)).read_bytes("dataset.json")


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[FaultyStore, dict[str, Any]]]:
    with s3_store() as (store, options):
        yield store, options


@pytest.mark.parametrize(
    "answer",
    [
        s3_error("503 Service Unavailable", "ServiceUnavailable"),
        pytest.param(
            s3_error("500 Internal Server Error", "InternalError"), marks=pytest.mark.long
        ),
        pytest.param(s3_error("429 Too Many Requests", "TooManyRequests"), marks=pytest.mark.long),
    ],
    ids=["503", "500", "429"],
)
def test_a_bucket_that_says_not_now_is_asked_again_then_it_is_one_line(
    tmp_path: Path,
    corpus: Path,
    bucket: tuple[FaultyStore, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: tuple[str, bytes],
) -> None:
    store, options = bucket
    clock = Clock()
    monkeypatch.setattr(retrying, "RETRIES", clock.retries(75.0))
    path = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **OUTPUT)
    job = yaml.safe_load(path.read_text())
    job["output"] |= {"uri": f"s3://corpus/{answer[0][:3]}", "storage_options": options}
    path.write_text(yaml.safe_dump(job))
    store.fault = lambda path: None
    prepare(path)
    # A minute of it while opening, planning and closing costs nothing but the minute.
    store.fault = lambda path: answer if clock() < 60.0 else None
    assert run(["extract", str(path), "--resume"]) == 0
    assert clock() >= 60.0
    layout = Layout.open(job["output"]["uri"], options)
    assert len(committed_shards(layout)) == CLIPS and verify(layout).problems == []
    capsys.readouterr()
    # For good it is one line.
    store.fault = lambda path: answer
    assert run(["extract", str(path), "--resume", "--quiet"]) == 1
    err = capsys.readouterr().err.strip()
    assert "\n" not in err and "--resume" in err and "hush" not in err
    store.fault = lambda path: None


def test_an_output_that_dies_in_the_middle_is_one_line_whatever_fails_after_it(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lock cannot be given back either; that must not hide the reason."""
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **OUTPUT)
    prepare(job)
    dead = {"now": False}
    read = Layout.read_bytes.__wrapped__  # type: ignore[attr-defined]

    def reading(self: Layout, rel: str) -> bytes:
        dead["now"] = dead["now"] or rel.startswith("commits/")
        if dead["now"]:
            raise OSError(errno.ESTALE, "injected")
        return read(self, rel)

    monkeypatch.setattr(Layout, "read_bytes", retrying.store_call("read")(reading))
    assert run(["extract", str(job), "--resume", "--quiet"]) == 1
    err = capsys.readouterr().err.strip()
    assert "commits/" in err and "the mount is stale" in err and "--resume" in err
    assert "\n" not in err
