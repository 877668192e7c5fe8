"""One undisturbed run that the disturbed ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.jobs import write_corpus, write_job
from tests.pipeline.again_jobs import shards_run_here

CLIPS = 14


@dataclass(frozen=True)
class Reference:
    """A corpus of `clips` one-clip shards and its undisturbed output."""

    corpus: Path
    output: Path
    clips: int = CLIPS


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    corpus = write_corpus(folder / "corpus", CLIPS)
    with shards_run_here():
        end = run_job(JobSpec.load(write_job(folder / "job.yaml", corpus, folder / "out")))
    assert (end.exit_code, end.rows_ok, end.shards) == (0, CLIPS, CLIPS)
    return Reference(corpus, folder / "out")
