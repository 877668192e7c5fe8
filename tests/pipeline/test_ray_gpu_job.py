"""A whole job on the GPU worker, its kernels interpreted: killed, resumed, and equal to the CPU's.

Everything but the chip and its driver is what a machine with a GPU runs. The run that is killed has
real processes and a Ray of its own, which is told of one GPU that the interpreter stands in for.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.dataset.commit_record import commits, committed_shards
from earmill.pipeline.driver import events
from earmill.pipeline.driver.executors import ray as ray_executor
from earmill.pipeline.driver.executors.ray import RayWorkers
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.operations import run_job as driver_module
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import FEW, assert_equal_datasets, driver, write_corpus, write_job
from tests.pipeline.again_jobs import NoWorkers, OneByOne

CLIPS = 8
ON_GPU = ("run.device=cuda", f"audio.resampler={ON_DEVICES}")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of short clips, one a shard, resampled where the models run."""
    monkeypatch.setenv("AMTCORE_GPU", "interpreted")
    corpus = write_corpus(tmp_path / "corpus", CLIPS, seconds=0.12)
    options = {"params": FEW, "formats": ["parquet"], "shard_rows": 1}
    return write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **options)


@pytest.fixture
def a_gpu_in_the_session_s_ray(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's Ray was started without GPUs: none is asked of it."""
    import ray

    nodes = [Node(ray.get_runtime_context().get_node_id(), cpus=2, gpus=1)]
    monkeypatch.setattr(ray_executor, "live_nodes", lambda: nodes)
    monkeypatch.setattr(ray_executor, "wait_for_nodes", lambda *_, **__: nodes)

    class OnCpu(RayWorkers):
        def start(self, index: int) -> Any:
            request = self._request_of(index)
            request = replace(request, place=replace(request.place, num_gpus=0.0))
            return RayWorkers(lambda _: request).start(index)

    monkeypatch.setattr(ray_executor, "RayWorkers", OnCpu)


def run_and_kill(job: Path) -> None:
    sets = [part for override in ON_GPU for part in ("--set", override)]
    with driver(str(job), *sets, ray_address=None) as running:
        assert running.wait_for("workers_ready")["device"] == "interpreted"
        running.wait_for("shard_done")
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()


def run_on_cpu(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a job that no GPU has seen, its shards one after another in this process."""
    with monkeypatch.context() as here:
        here.chdir(Path.cwd())
        here.setattr(driver_module, "executor_of", lambda *_: NoWorkers())
        here.setattr(driver_module.Run, "scheduler", lambda _, job, *__: OneByOne(job, None))
        return run_job(spec).rows_ok


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("a_gpu_in_the_session_s_ray")
def test_a_job_on_the_gpu_also_a_killed_one_equals_the_job_on_the_cpu(
    killed: bool, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if killed:
        run_and_kill(job)
        assert 0 < len(committed_shards(Layout.open(str(tmp_path / "out")))) < CLIPS
    seen: list[events.Event] = []
    end = run_job(JobSpec.load(job, ON_GPU), resume=killed, sink=seen.append)
    assert (end.exit_code, end.rows_ok) == (0, CLIPS)
    (started,) = [event for event in seen if isinstance(event, events.JobStarted)]
    assert bool(started.shards_done) == killed

    on_cpu = [f"audio.resampler={ON_DEVICES}", "run.device=cpu", f"output.uri={tmp_path / 'cpu'}"]
    assert run_on_cpu(JobSpec.load(job, on_cpu), monkeypatch) == CLIPS
    assert_equal_datasets(tmp_path / "out", tmp_path / "cpu")
    for record in commits(Layout.open(str(tmp_path / "out"))).values():
        assert record.info["device"]["backends"] == {"dau1997": "interpreted"}
        assert record.info["device"]["self_check"] == {"modulation": 0.0, "resampler": 0.0}
