"""One recording, its spans in the hands of two workers at the same time: a worker is killed, then
the driver; gone on with, the bytes are those of an undisturbed job, and the values the recording's.
"""

from __future__ import annotations

import signal
from datetime import datetime
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml

from earmill import Recordings, open_features
from earmill.pipeline.dataset.commit_record import CommitRecord, commits, committed_shards
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_equal_datasets, driver
from tests.chaos.test_local import workers_of
from tests.pipeline import audio_factory
from tests.waiting import processes_end

pytestmark = [pytest.mark.chaos, pytest.mark.long]

SPAN_S, SPANS, WORKERS = 30, 16, 2


def write_job(path: Path, corpus: Path, out: Path, *, spans: bool = True) -> JobSpec:
    job = {
        "name": "job",
        "source": {"kind": "files", "uri": str(corpus)},
        "audio": {"spans": {"seconds": SPAN_S} if spans else None},
        "extract": [{"model": "dau1997", "fs_hz": 16000}],
        "output": {"uri": str(out), "shard_seconds": SPAN_S},
        "run": {"executor": "local", "workers": WORKERS, "threads_per_worker": 1},
    }
    path.write_text(yaml.safe_dump(job))
    return JobSpec.load(path)


def were_at_it_together(records: list[CommitRecord]) -> bool:
    """Whether two workers had a span each at one time."""
    held = []
    for record in records:
        end_s = datetime.fromisoformat(record.info["created"]).timestamp()
        # Without the publishing: while the models, or the wait for them, had it.
        begin_s = end_s - sum(record.info["timings_s"].values())
        held.append((record.info["worker"]["pid"], begin_s, end_s))
    return any(
        one[0] != two[0] and max(one[1], two[1]) < min(one[2], two[2])
        for one, two in combinations(held, 2)
    )


def test_two_workers_share_a_recording_and_a_kill_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    data = audio_factory.clip("flac", SPAN_S * SPANS - 4.25, seed=14)
    (tmp_path / "in" / "day.flac").write_bytes(data)
    calm = write_job(tmp_path / "calm.yaml", tmp_path / "in", tmp_path / "calm")
    assert run_job(calm).rows_ok == SPANS
    assert were_at_it_together(list(commits(Layout.open(str(tmp_path / "calm"))).values()))

    spec = write_job(tmp_path / "job.yaml", tmp_path / "in", tmp_path / "out")
    layout = Layout.open(str(tmp_path / "out"))
    with driver(str(tmp_path / "job.yaml"), ray_address=None) as running:
        running.wait_for("shard_done", 2)
        workers = workers_of(running.process.pid)
        assert len(workers) == WORKERS
        workers[0].kill()
        running.wait_for("shard_done", 2)
        left = workers_of(running.process.pid)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        processes_end(left)
    assert 4 <= len(committed_shards(layout)) < SPANS
    end = run_job(spec, resume=True)
    assert (end.status, end.rows_ok, end.rows_bad) == ("done", SPANS, 0)
    assert_equal_datasets(tmp_path / "out", tmp_path / "calm")

    whole = write_job(tmp_path / "whole.yaml", tmp_path / "in", tmp_path / "whole", spans=False)
    assert run_job(whole).rows_ok == 1
    wanted = open_features(tmp_path / "whole")[0].features["modulation"]
    got = Recordings(open_features(tmp_path / "out")).by_id("day.flac").features["modulation"]
    assert got.shape == wanted.shape
    # Within what the models leave, and float16, whose halves may be rounded either way.
    apart = np.abs(got.astype(np.float64) - wanted)
    assert (apart <= np.spacing(np.abs(wanted)) + 2e-7 * np.abs(wanted).max()).all()
