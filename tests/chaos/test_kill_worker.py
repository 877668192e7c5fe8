"""Workers die and the job ends complete by itself: a kill from outside, and a row that kills."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill.pipeline.driver import events
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker.prepare import Clip, LongClip
from earmill.pipeline.worker.row_pipeline import RowProcessor
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob
from tests.chaos.conftest import Reference
from tests.chaos.jobs import (
    assert_equal_datasets,
    assert_whole,
    worker_pids,
    write_corpus,
    write_job,
)

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_session")]


@pytest.mark.long
def test_a_worker_killed_mid_shard_costs_nothing_but_time(
    tmp_path: Path, reference: Reference
) -> None:
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    seen: list[events.Event] = []

    def kill_after_the_second_commit(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.ShardDone) and count(seen, events.ShardDone) == 2:
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)

    end = run_job(JobSpec.load(job), sink=kill_after_the_second_commit)
    assert (end.status, end.exit_code) == ("done", 0)
    assert (end.rows_ok, end.rows_bad) == (reference.clips, 0)
    assert count(seen, events.WorkerLost) == 1
    assert count(seen, events.BisectStarted) == 0
    assert_equal_datasets(tmp_path / "out", reference.output)


class PoisonedRows(RowProcessor):
    """The real row pipeline, with a decoder that dies of one file."""

    def prepare(self, item: Item, stream: Any) -> list[Clip] | LongClip:
        if item.row_id.startswith("001"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(item, stream)


@dataclass(frozen=True)
class MakePoisoned:
    """Builds the real runner around it."""

    job: WorkerJob

    def __call__(self) -> ShardRunner:
        return ShardRunner(self.job, make_rows=PoisonedRows)


@pytest.mark.long
def test_a_row_that_kills_its_worker_is_found_and_the_rest_commits(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 2)
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", shard_seconds=100)
    spec = JobSpec.load(job, overrides=["run.max_attempts=1", "run.max_bad_fraction=0.5"])
    seen: list[events.Event] = []
    end = run_job(spec, sink=seen.append, make_runner=MakePoisoned)
    assert (end.exit_code, end.rows_ok, end.rows_bad) == (0, 1, 1)
    assert end.bad_by_class == {"worker_crash": 1}
    assert_whole(tmp_path / "out")
    (path,) = (tmp_path / "out" / "quarantine").iterdir()
    (bad,) = pq.read_table(path).to_pylist()
    assert (bad["row_id"], bad["stage"]) == ("001.wav", "worker")
    assert "the worker process died" in bad["message"] and bad["attempts"] >= 2
    assert [event.row_id for event in seen if isinstance(event, events.CulpritFound)] == ["001.wav"]


def count(seen: list[events.Event], kind: type[events.Event]) -> int:
    return sum(isinstance(event, kind) for event in seen)
