"""The driver is killed with SIGKILL at three random moments; the result is as if it never was.

The moments are drawn from a fixed seed: the first falls into start-up, the others so many commits
into a run and then so long after. What must hold does not depend on where exactly a kill lands.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, driver, session_address, write_job

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_session")]

SEED = 7


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 3])
def test_kills_and_a_resume_equal_an_undisturbed_run(
    kills: int, tmp_path: Path, reference: Reference
) -> None:
    rng = random.Random(SEED)
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    moments = [
        ("job_started", 1, rng.uniform(0.0, 3.0)),
        ("shard_done", rng.randint(1, 3), rng.uniform(0.0, 0.3)),
        ("shard_done", rng.randint(1, 3), rng.uniform(0.0, 0.3)),
    ]
    done: list[set[str]] = [set()]
    for kind, times, pause_s in moments[-kills:]:
        with driver(str(job), "--resume", ray_address=session_address()) as running:
            running.wait_for(kind, times)
            time.sleep(pause_s)
            running.process.send_signal(signal.SIGKILL)
            assert running.process.wait() == -signal.SIGKILL
        done.append(committed_shards(Layout.open(str(tmp_path / "out"))))
        # Each run went on from the commits before it and lost none of them.
        assert done[-2] <= done[-1] and len(done[-1]) < reference.clips
    assert [len(each) for each in done[1:]] == sorted({len(each) for each in done[1:]})

    end = run_job(JobSpec.load(job), resume=True)
    assert (end.status, end.exit_code, end.rows_ok) == ("done", 0, reference.clips)
    assert_equal_datasets(tmp_path / "out", reference.output)
