"""Finished jobs with bad rows, to be run again: real files, real commits, no Ray.

Ray is the only part left out: shards run one after another in this process, by the real books and
the real runner. A kill is an exception between two steps, as nothing but the output survives one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from amtcore.features import registry
from earmill import open_features
from earmill.pipeline.common import extension_points
from earmill.pipeline.common.errors import OvertakenError
from earmill.pipeline.common.text import named_line
from earmill.pipeline.common.user_cache import models_key
from earmill.pipeline.dataset import provenance
from earmill.pipeline.dataset.commit_record import Committed, commits, read_commit
from earmill.pipeline.dataset.snapshot import current_index
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import Result, ShardLedger
from earmill.pipeline.operations import run_job as driver
from earmill.pipeline.operations.retry import Chooser
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec import models
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob
from tests.chaos.jobs import FEW, write_corpus, write_job

CLIPS = 4


BAD = "001.wav"


ALSO_BAD = "002.flac"


class Killed(BaseException):
    """The driver ends here, without a chance to clear up."""


class NoWorkers:
    """An executor of jobs whose shards are run otherwise."""

    def check(self, run: Any) -> None:
        pass

    def session(self, *_: Any) -> Any:
        return nullcontext(self)


class OneByOne:
    """Runs the pending shards in this process."""

    def __init__(self, job: Any, kill_after: int | None) -> None:
        self._job, self._kill_after = job, kill_after

    def run(self) -> Result:
        job = self._job
        work_of = WorkerJob(
            job.spec,
            job.dataset,
            2,
            str(Path.cwd()),
            again=job.again,
            fence=job.fence,
        )
        runner = ShardRunner(work_of)

        def committed(shard_id: str) -> Any:
            generation = job.again[shard_id].generation if shard_id in job.again else 0
            record = read_commit(job.layout, shard_id, generation)
            return None if record is None else Committed.of(record)

        ledger = ShardLedger(job.pending, committed, max_attempts=1)
        done = 0
        while not ledger.all_settled:
            assignment = ledger.next(idle=True)
            assert assignment is not None
            if done == self._kill_after:
                raise Killed
            try:
                runner.run(assignment.work.order())
                outcome = Outcome(ok=True)
            except Exception as error:
                cause = error.__cause__ or error
                if isinstance(cause, OvertakenError):
                    raise cause from error
                outcome = Outcome(ok=False, stage="publish", message=named_line(cause))
            ledger.shard_ended(assignment.work, outcome)
            done += 1
        return ledger.result


_git_state, _code_sha256 = cache(provenance.git_state), cache(provenance.code_sha256)
_owner_of, _build = extension_points._owner, registry.build_extractor
_encode = ShardRunner._encode
_built: dict[str, Any] = {}


@cache
def _models_key(_path: tuple[str, ...]) -> str | None:
    return models_key()


@cache
def _owner(_path: tuple[str, ...], point: Any) -> str:
    return _owner_of(point)


@contextmanager
def code_stays_as_it_is() -> Iterator[None]:
    """Jobs look once at git, at the sources and at the metadata of distributions.

    It took a quarter of a small job. Tests of it are test_provenance.py, test_extension_points.py
    and tests/jobs/test_light_commands.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "git_state", _git_state)
        patch.setattr(provenance, "code_sha256", _code_sha256)
        patch.setattr(models, "models_key", lambda: _models_key(tuple(sys.path)))
        patch.setattr(extension_points, "_owner", lambda point: _owner(tuple(sys.path), point))
        yield


def _built_once(model: str, *, threads: int | None = None, **options: Any) -> Any:
    """Build a model of this package once for each set of options.

    Extractors keep nothing between clips, and no two shards run at once here.
    """
    if model not in registry.BUILT_IN or model == "torch_module":
        return _build(model, threads=threads, **options)
    if threads is not None:
        registry.set_num_threads(threads)
    key = json.dumps([model, options], sort_keys=True)
    if key not in _built:
        _built[key] = _build(model, **options)
    return _built[key]


def _encode_warm(runner: ShardRunner, rows: Any, *where: Any) -> None:
    """Encode rows. The row of a warm-up makes a new process import the writers; it is left out."""
    if [row.row_id for row in rows] != ["warm-up"]:
        _encode(runner, rows, *where)


@contextmanager
def process_stays_warm() -> Iterator[None]:
    """Jobs share their models, and write no file to warm up: both took a third of a small job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "build_extractor", _built_once)
        patch.setattr(ShardRunner, "_encode", _encode_warm)
        yield


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(driver, "executor_of", lambda *_: NoWorkers())
    with process_stays_warm():
        yield


@contextmanager
def shards_run_here() -> Iterator[None]:
    """Jobs run in this process, shard by shard."""
    with (
        code_stays_as_it_is(),
        process_stays_warm(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(Path.cwd())
        patch.setattr(driver, "executor_of", lambda *_: NoWorkers())
        patch.setattr(driver.Run, "scheduler", lambda _, job, *__: OneByOne(job, None))
        yield


@pytest.fixture(name="no_ray", scope="module")
def module_without_ray() -> Iterator[None]:
    """The same for all tests of a module."""
    with shards_run_here():
        yield


@pytest.fixture(name="go")
def run_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job here; `kill_after` so many shards."""

    def run(
        spec: JobSpec, again: Chooser | None = None, kill_after: int | None = None, **more: Any
    ) -> tuple[events.JobFinished, list[events.Event]]:
        monkeypatch.setattr(driver.Run, "scheduler", lambda _, job, *__: OneByOne(job, kill_after))
        seen: list[events.Event] = []
        end = run_job(spec, again=again, sink=seen.append, **{"resume": True, **more})
        return end, seen

    return run


class Job:
    """A finished job with two bad rows beside good ones in its shards, and its restored corpus."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus, self.out = folder, folder / "corpus", folder / "out"
        options = {"shard_rows": 2, "formats": ["parquet"]}
        self.file = write_job(folder / "job.yaml", self.corpus, self.out, params=FEW, **options)
        self.spec = JobSpec.load(
            self.file, overrides=("output.shard_seconds=100", "run.max_bad_fraction=1")
        )
        self.layout = Layout.open(str(self.out))

    def bad(self) -> dict[str, str]:
        """Rows in quarantine by the index that counts."""
        table = pq.read_table(self.layout.path(str(current_index(self.layout))))
        return {
            row["row_id"]: row["error_class"] for row in table.to_pylist() if row["status"] != "ok"
        }

    def restore(self, *names: str) -> None:
        """The planned file comes back, as after an outage: same size, same time."""
        for name in names:
            time_ns = (self.corpus / name).stat().st_mtime_ns
            shutil.copy(self.folder / "whole" / name, self.corpus / name)
            os.utime(self.corpus / name, ns=(time_ns, time_ns))

    def generations(self) -> dict[str, int]:
        return {shard: record.generation for shard, record in commits(self.layout).items()}


@pytest.fixture(name="made", scope="module")
def corpus_made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four clips in two shards; one row of each is bad."""
    folder = tmp_path_factory.mktemp("again")
    write_corpus(folder / "whole", CLIPS, seconds=0.5)
    shutil.copytree(folder / "whole", folder / "corpus")
    # Of the planned size: a file of another is never taken for the planned one.
    size = (folder / "whole" / BAD).stat().st_size
    (folder / "corpus" / BAD).write_bytes(b"not audio at all".ljust(size))
    data = (folder / "whole" / ALSO_BAD).read_bytes()
    (folder / "corpus" / ALSO_BAD).write_bytes(data[: len(data) // 2].ljust(len(data)))
    with shards_run_here():
        end = run_job(Job(folder).spec)
    assert (end.rows_ok, end.rows_bad, end.shards) == (2, 2, 2)
    yield folder


@pytest.fixture(name="job")
def finished_job(made: Path, tmp_path: Path) -> Job:
    """A copy of the output; the corpus is named by its path, so it is the shared one."""
    shutil.copytree(made / "out", tmp_path / "out")
    shutil.copytree(made / "corpus", tmp_path / "before")
    here = Job(made)
    here.out, here.layout = tmp_path / "out", Layout.open(str(tmp_path / "out"))
    here.spec = here.spec.model_copy(
        update={"output": here.spec.output.model_copy(update={"uri": str(here.out)})}
    )
    return here


@pytest.fixture(autouse=True)
def _corpus_as_it_was(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    yield
    if "job" in request.fixturenames:
        corpus = request.getfixturevalue("made") / "corpus"
        shutil.rmtree(corpus)
        shutil.copytree(tmp_path / "before", corpus)


def good_values(job: Job) -> dict[str, dict[str, bytes]]:
    return {
        row.row_id: {name: values.tobytes() for name, values in row.features.items()}
        for row in open_features(job.out)
    }
