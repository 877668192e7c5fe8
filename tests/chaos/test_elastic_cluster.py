"""Nodes join a running job and die; the result equals that of one node left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, run_script, write_job

pytestmark = [pytest.mark.chaos, pytest.mark.long]


def test_nodes_come_and_go_and_nothing_is_lost(tmp_path: Path, reference: Reference) -> None:
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    (gates := tmp_path / "gates").mkdir()
    said = run_script("tests.chaos.elastic_cluster", str(job), str(gates))
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
