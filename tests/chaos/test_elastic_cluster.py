"""Nodes join a running job and die, and the result equals the result of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, run_script, write_corpus, write_job
from tests.pipeline.again_jobs import shards_run_here

pytestmark = [pytest.mark.chaos, pytest.mark.long]


def test_nodes_come_and_go_and_nothing_is_lost(tmp_path: Path, reference: Reference) -> None:
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    (gates := tmp_path / "gates").mkdir()
    said = run_script("tests.chaos.elastic_cluster", str(job), str(gates), "1")
    second, third = (event["id"] for event in said if event["event"] == "node")
    notes = [event["text"] for event in said if event["event"] == "note"]
    assert [note for note in notes if note.startswith("worker ")] == [
        f"worker 1: node {second[:8]} has joined: it works there",
        f"worker 1: node {second[:8]} is gone: given up",
        f"worker 2: node {third[:8]} has joined: it works there",
        f"worker 2: node {third[:8]} is gone: given up",
    ]
    records = commits(Layout.open(str(tmp_path / "out"))).values()
    by_node = [record.info["worker"]["ray_node"] for record in records]
    assert by_node.count(second) == 1 and by_node.count(third) == 1
    assert not [event for event in said if event["event"] == "bisect_started"]
    assert_equal_datasets(tmp_path / "out", reference.output)


def test_two_workers_share_the_gpu_of_each_node_and_nodes_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is told of a GPU on each node; the interpreter stands in for it."""
    corpus = write_corpus(tmp_path / "corpus", 10, seconds=0.12)
    run = {"device": "cuda", "gpus_per_worker": 0.5, "threads_per_worker": 1}
    common = {"audio": {"resampler": ON_DEVICES}}
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", shard_rows=1)
    written = yaml.safe_load(job.read_text())
    job.write_text(yaml.safe_dump(written | common | {"run": run}))
    (gates := tmp_path / "gates").mkdir()
    with monkeypatch.context() as there:
        there.setenv("AMTCORE_GPU", "interpreted")
        said = run_script("tests.chaos.elastic_cluster", str(job), str(gates), "2")
    (ready,) = (event for event in said if event["event"] == "workers_ready")
    assert (ready["workers"], ready["device"]) == (2, "interpreted")
    second, third = (event["id"] for event in said if event["event"] == "node")
    notes = [event["text"] for event in said if event["event"] == "note"]
    assert sorted(note for note in notes if note.startswith("worker ")) == sorted(
        f"worker {number}: node {node[:8]} {what}"
        for node, numbers in ((second, (2, 3)), (third, (4, 5)))
        for number in numbers
        for what in ("has joined: it works there", "is gone: given up")
    )
    records = commits(Layout.open(str(tmp_path / "out"))).values()
    by_node = [record.info["worker"]["ray_node"] for record in records]
    assert by_node.count(second) >= 1 and by_node.count(third) >= 1
    assert {record.info["device"]["device"] for record in records} == {"cuda"}

    alone = ["run.device=cpu", "run.gpus_per_worker=null", f"output.uri={tmp_path / 'alone'}"]
    with shards_run_here():
        assert run_job(JobSpec.load(job, alone)).exit_code == 0
    assert_equal_datasets(tmp_path / "out", tmp_path / "alone")
