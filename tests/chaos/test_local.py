"""Jobs whose workers are plain processes: asked to stop, killed, and gone on with by another
executor; the result equals an undisturbed job in one process."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, driver, write_job
from tests.waiting import processes_end

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.usefixtures("ray_session")]

LOCAL = "run.executor=local"


def test_a_local_job_is_asked_to_stop_killed_and_gone_on_with_on_ray(
    tmp_path: Path, reference: Reference
) -> None:
    job, layout = tmp_path / "job.yaml", Layout.open(str(tmp_path / "out"))
    write_job(job, reference.corpus, tmp_path / "out")
    local = (str(job), "--resume", "--set", LOCAL)
    with driver(*local, ray_address=None) as running:
        running.wait_for("shard_done")
        # A batch system sends it to every process of the job.
        for process in (*workers_of(running.process.pid), psutil.Process(running.process.pid)):
            process.send_signal(signal.SIGTERM)
        code, last = running.finish()
    assert (code, last["status"]) == (1, "stopped"), last
    stopped_at = committed_shards(layout)
    assert last["shards"] == len(stopped_at) < reference.clips
    # What was in flight is committed, not thrown away: no attempt left files behind.
    assert len(list((tmp_path / "out" / "rows").iterdir())) == len(stopped_at)

    with driver(*local, ray_address=None) as running:
        running.wait_for("shard_done")
        workers = workers_of(running.process.pid)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        assert workers
        processes_end(workers)
    assert stopped_at < committed_shards(layout)

    end = run_job(JobSpec.load(job), resume=True)
    assert (end.status, end.exit_code, end.rows_ok) == ("done", 0, reference.clips)
    assert_equal_datasets(tmp_path / "out", reference.output)


def workers_of(pid: int) -> list[psutil.Process]:
    """A local driver's workers."""
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if any("pipeline.worker.worker_process" in part for part in child.cmdline())
    ]
