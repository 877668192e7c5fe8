"""Eight models of all kinds in one pass over a corpus: killed and resumed, and on a GPU."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from amtcore.features.feature_model import Extractor
from earmill import open_features
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import assert_equal_datasets, assert_whole, driver, write_corpus

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(900)]

CLIPS = 6
MODELS: list[dict[str, Any]] = [
    {"model": "dau1997", "fs_hz": 16000},
    {"model": "zwicker", "streams": {"n": {}, "statistics": {}}},
    {"model": "roughness", "streams": {"r": {}}},
    {"model": "programme_loudness", "streams": {"integrated": {}, "true_peak": {}}},
    {"model": "srmr", "params": {"fast": True}, "streams": {"score": {}}},
    {"model": "carfac", "streams": {"nap": {}}},
    {"model": "auditory_nerve", "streams": {"rates": {}}},
    {"model": "rate_scale", "streams": {"rate_scale_mean": {}}},
]


def job(place: Path, corpus: Path) -> Path:
    """A job of all models, a clip a shard."""
    spec = {
        "source": {"kind": "files", "uri": str(corpus)},
        "extract": MODELS,
        "output": {"uri": str(place), "shard_seconds": 1.2, "formats": ["zarr", "parquet"]},
        "run": {"executor": "local", "workers": 1},
    }
    path = place.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(spec))
    return path


def test_killed_and_resumed_they_give_the_same_bytes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", CLIPS)
    end = run_job(JobSpec.load(job(tmp_path / "whole", corpus)))
    assert (end.status, end.rows_ok) == ("done", CLIPS)

    killed = job(tmp_path / "killed", corpus)
    with driver(str(killed), ray_address=None) as running:
        running.wait_for("shard_done", 2)
        running.process.send_signal(signal.SIGKILL)
        assert running.process.wait() == -signal.SIGKILL
    end = run_job(JobSpec.load(killed), resume=True)
    assert (end.status, end.rows_ok) == ("done", CLIPS)
    assert_equal_datasets(tmp_path / "killed", tmp_path / "whole")
    assert_whole(tmp_path / "killed")
    table = open_features(tmp_path / "killed").table
    assert {"integrated_integrated", "score_score"} <= set(table.column_names)


def test_on_a_gpu_they_run_or_stay_on_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is interpreted. Models of frames stay on the processor, and say so."""
    corpus = write_corpus(tmp_path / "corpus", 2, seconds=0.6)
    overrides = ["output.dtype=float32", "output.shard_seconds=60"]
    end = run_job(JobSpec.load(job(tmp_path / "here", corpus), overrides))
    assert (end.status, end.rows_ok) == ("done", 2)
    monkeypatch.setenv("AMTCORE_GPU", "interpreted")
    end = run_job(JobSpec.load(job(tmp_path / "there", corpus), [*overrides, "run.device=cuda"]))
    assert (end.status, end.rows_ok) == ("done", 2)

    (record,) = commits(Layout.open(str(tmp_path / "there"))).values()
    on = dict.fromkeys((entry["model"] for entry in MODELS), "cpu") | {"dau1997": "interpreted"}
    assert record.info["device"]["backends"] == on
    rows = zip(open_features(tmp_path / "here"), open_features(tmp_path / "there"), strict=True)
    for here, there in rows:
        for name, wanted in here.features.items():
            most = Extractor.gpu_tolerance * np.abs(wanted).max()
            np.testing.assert_allclose(there.features[name], wanted, 0, most, err_msg=name)
