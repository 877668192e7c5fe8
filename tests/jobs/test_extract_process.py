"""A real `earmill extract` process: asked to stop, resumed, looked at, damaged.

Nothing that it started outlives it. A private Ray listens on loopback, and says nothing.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from earmill.jobs.cli import run
from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_whole, driver, write_corpus, write_job
from tests.listeners import LOOPBACK, listening_addresses
from tests.pipeline.again_jobs import shards_run_here
from tests.waiting import processes_end

# A worker has two shards in flight when two are done; it must not be through when the job stops.
CLIPS = 18


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job that was asked to stop after its first commits."""
    folder = tmp_path_factory.mktemp("stopped")
    corpus = write_corpus(folder / "corpus", CLIPS)
    job = write_job(folder / "job.yaml", corpus, folder / "out", formats=["parquet"])
    metrics = folder / "metrics-{pid}.prom"
    options = ["--set", "run.workers=1", "--metrics", str(metrics)]
    with driver(str(job), *options, ray_address=None) as running:
        assert "metrics are written to" in running.wait_for("note")["text"]
        # The job leaves the device open, and this machine has no GPU.
        assert "the models run on CPU" in running.wait_for("note")["text"]
        assert running.wait_for("workers_ready")["device"] == "cpu"
        started = psutil.Process(running.process.pid).children(recursive=True)
        # A driver needs no torch, which takes half a gigabyte.
        assert any(has_torch(child.pid) for child in started)
        assert not has_torch(running.process.pid)
        running.wait_for("shard_done", 2)
        running.process.send_signal(signal.SIGTERM)
        code, summary = running.finish()
        errors = running.errors()
    assert (code, summary["status"], summary["exit_code"]) == (1, "stopped", 1)
    assert "--resume" in summary["message"]
    assert errors == ""
    assert_metrics(folder, summary)
    assert started
    processes_end(started)
    return folder


def has_torch(pid: int) -> bool:
    """Return True if a process has loaded torch's library."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def assert_metrics(folder: Path, summary: dict[str, Any]) -> None:
    """The driver's last metrics are those of its run."""
    (path,) = folder.glob("metrics-*.prom")
    found = {
        (sample.name, sample.labels.get("state") or sample.labels.get("part")): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert found["earmill_job_shards", "done"] == summary["shards"] > 0
    assert found["earmill_job_rows", "ok"] == summary["rows_ok"]
    assert found["earmill_commit_seconds_count", None] == summary["shards"]
    model_s = found["earmill_cpu_seconds_total", "model"]
    assert round(model_s, 6) == summary["cpu_s"]["model"] > 0
    assert found["earmill_job_exit_code", None] == summary["exit_code"]


@pytest.mark.long  # tests/jobs/test_doctor.py looks at a private Ray that runs one task
def test_a_ray_of_its_own_listens_on_loopback_and_ends_with_it(
    stopped: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", stopped / "corpus", tmp_path / "out")
    with driver(str(job), "--set", "run.executor=ray", ray_address=None) as running:
        running.wait_for("shard_done", 2)
        root = psutil.Process(running.process.pid)
        started = root.children(recursive=True)
        listening = listening_addresses([root, *started])
        running.process.send_signal(signal.SIGTERM)
        code, _ = running.finish()
        assert (code, running.errors()) == (1, "")
    assert listening and listening <= LOOPBACK
    processes_end(started)


def test_a_stopped_job_keeps_its_commits_and_lets_go_of_the_lock(stopped: Path) -> None:
    layout = Layout.open(str(stopped / "out"))
    assert 2 <= len(committed_shards(layout)) < CLIPS
    assert not layout.exists("driver.json")
    assert layout.list("index") == []


def test_it_is_not_continued_unasked(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["extract", str(stopped / "job.yaml")]) == 2
    assert "add --resume" in capsys.readouterr().err
    # Nor by a job that would write something else.
    other = ["extract", str(stopped / "job.yaml"), "--resume", "--set", "output.dtype=float32"]
    assert run(other) == 2
    assert "output.dtype" in capsys.readouterr().err


def test_it_can_be_looked_at_before_it_is_complete(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(stopped / "out"), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["shards_planned"] == CLIPS and not seen["finalised"]
    assert seen["rows_ok"] == seen["shards"] == len(committed_shards(Layout.open(seen["uri"])))
    assert run(["verify", str(stopped / "out")]) == 1
    assert "have no commit" in capsys.readouterr().out


def test_resume_completes_it_then_verify_finds_any_damage(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = committed_shards(Layout.open(str(stopped / "out")))
    with shards_run_here():
        assert run(["extract", str(stopped / "job.yaml"), "--resume"]) == 0
    assert f"{len(before)} already committed" in capsys.readouterr().err
    assert_whole(stopped / "out")

    assert run(["inspect", str(stopped / "out"), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["finalised"] and seen["rows_ok"] == CLIPS and seen["rows_bad"] == 0
    assert seen["audio_s"] == pytest.approx(CLIPS, rel=0.01)
    assert run(["inspect", str(stopped / "out")]) == 0
    assert "dau1997" in capsys.readouterr().out

    assert run(["verify", str(stopped / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hashed"] is True
    victim = sorted((stopped / "out" / "data").glob("*.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert run(["verify", str(stopped / "out"), "--no-hashes"]) == 0
    capsys.readouterr()
    assert run(["verify", str(stopped / "out")]) == 1
    assert victim.name in capsys.readouterr().out

    assert run(["extract", str(stopped / "job.yaml"), "--repair"]) == 2
    assert "add --resume" in capsys.readouterr().err
    with shards_run_here():
        assert run(["extract", str(stopped / "job.yaml"), "--resume", "--repair"]) == 0
    assert f"{CLIPS - 1} already committed" in capsys.readouterr().err
    assert_whole(stopped / "out")


def test_a_finished_job_resumed_does_nothing(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = {path: path.stat().st_mtime_ns for path in (stopped / "out" / "commits").iterdir()}
    assert run(["extract", str(stopped / "job.yaml"), "--resume", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[-1]["status"] == "nothing_to_do"
    assert not any(event["event"] == "workers_ready" for event in said)
    assert commits == {
        path: path.stat().st_mtime_ns for path in (stopped / "out" / "commits").iterdir()
    }
