"""Drivers of two kinds on one output: one is preempted, the other goes on with what it had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from earmill.pipeline.driver import events
from earmill.pipeline.driver.events import StopRequest
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, write_job
from tests.pipeline.workers_here import workers_here

pytestmark = pytest.mark.chaos


def test_two_drivers_share_an_output_and_one_is_preempted(
    tmp_path: Path, reference: Reference
) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    write_job(job, reference.corpus, out)
    stop, preempting = StopRequest(), Event()
    done: dict[str, list[str]] = {"array": [], "local": []}

    def run(executor: str, **options: object) -> events.JobFinished:
        def sink(event: events.Event) -> None:
            if isinstance(event, events.ShardDone):
                done[executor.partition("-")[2] or executor].append(event.shard_id)
                if executor == "slurm-array":
                    stop("SIGTERM")
                    preempting.set()
                # Else the other one could do all shards before this one has done its first.
                assert preempting.wait(120)

        overrides = [f"run.executor={executor}", "run.workers=1", "run.threads_per_worker=1"]
        return run_job(JobSpec.load(job, overrides), sink=sink, **options)

    with workers_here(), ThreadPoolExecutor(2) as drivers:
        task = drivers.submit(run, "slurm-array", stop=stop)
        other = drivers.submit(run, "local", join=True)
        preempted, end = task.result(), other.result()
    assert (preempted.status, preempted.exit_code) == ("stopped", 1)
    assert (end.status, end.exit_code, end.rows_ok) == ("done", 0, reference.clips)
    # Every shard is done by one of them: none has files of a second attempt.
    assert done["array"] and done["local"]
    assert len(done["array"]) + len(done["local"]) == reference.clips
    assert len(list((out / "rows").iterdir())) == reference.clips
    assert not any((out / name).exists() for name in ("claims", "crew", "driver.json"))
    assert_equal_datasets(out, reference.output)

    again = run_job(JobSpec.load(job), finish=True)
    assert (again.status, again.exit_code) == ("nothing_to_do", 0)
