"""Two Ray nodes on one machine share a job; the result equals that of one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from earmill.pipeline.dataset.publish import commits
from earmill.pipeline.storage.layout import Layout
from tests.chaos.conftest import Reference
from tests.chaos.jobs import ROOT, assert_equal_datasets, write_job

pytestmark = [pytest.mark.chaos, pytest.mark.long]


def test_two_nodes_give_the_one_node_result(tmp_path: Path, reference: Reference) -> None:
    job = write_job(tmp_path / "job.yaml", reference.corpus, tmp_path / "out")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.two_nodes", str(job), str(meeting)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (ready,) = (event for event in said if event["event"] == "workers_ready")
    assert ready["workers"] == 2
    records = commits(Layout.open(str(tmp_path / "out"))).values()
    assert len({record.info["worker"]["ray_node"] for record in records}) == 2
    assert_equal_datasets(tmp_path / "out", reference.output)
