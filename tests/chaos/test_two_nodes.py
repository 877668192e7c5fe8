"""Two Ray nodes on one machine share a job; the result equals that of one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import assert_equal_datasets, run_script, write_job

pytestmark = [pytest.mark.chaos, pytest.mark.long]


def test_two_nodes_give_the_one_node_result(tmp_path: Path, reference: Reference) -> None:
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    said = run_script("tests.chaos.two_nodes", str(job), str(meeting))
    (ready,) = (event for event in said if event["event"] == "workers_ready")
    assert ready["workers"] == 2
    records = commits(Layout.open(str(tmp_path / "out"))).values()
    assert len({record.info["worker"]["ray_node"] for record in records}) == 2
    assert_equal_datasets(tmp_path / "out", reference.output)
