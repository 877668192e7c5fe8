"""A job with two listeners beside normal hearing, and what a listener does to a job's hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import earmill
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.audio_factory import encode, speech_like

MILD = {250: 10, 500: 15, 1000: 20, 2000: 35, 4000: 50, 8000: 60}
ENTRY: dict[str, Any] = {
    "model": "paulick2024",
    "fs_hz": 22050,
    "params": {"n_channels": 5},
    "streams": {"envelope": {}},
}


def heard(name: str | None, audiogram: dict[Any, float], **more: Any) -> dict[str, Any]:
    """An entry of the job with a listener."""
    return ENTRY | {"listener": {"name": name, "audiogram": audiogram, **more}}


def job(folder: Path, *extract: dict[str, Any], output: str = "out") -> dict[str, Any]:
    """A job on one clip of a second."""
    (folder / "audio").mkdir(exist_ok=True)
    (folder / "audio" / "a.wav").write_bytes(encode(speech_like(1.0, 16000), rate_hz=16000))
    return {
        "source": {"kind": "files", "uri": str(folder / "audio")},
        "extract": [*extract],
        "output": {"uri": str(folder / output), "formats": ["parquet"], "dtype": "float32"},
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
    }


def test_two_listeners_beside_normal_hearing(tmp_path: Path) -> None:
    carfac = {"model": "carfac", "listener": {"name": "mild", "audiogram": MILD}}
    entries = [ENTRY, heard("mild", MILD), heard("none", {1000: 0}), carfac]
    with shards_run_here():
        end = earmill.extract(job(tmp_path, *entries))
        alone = earmill.extract(job(tmp_path, ENTRY, output="alone"))
    assert (end.rows_ok, alone.rows_ok) == (1, 1)
    features = earmill.open_features(tmp_path / "out")[0].features
    assert [*features] == ["envelope", "envelope_mild", "envelope_none", "nap_mild"]
    normal = earmill.open_features(tmp_path / "alone")[0].features["envelope"]
    assert np.array_equal(features["envelope"], normal)
    assert np.array_equal(features["envelope_none"], normal)
    level_db = [20 * np.log10(each[20:].mean(0)) for each in (normal, features["envelope_mild"])]
    assert (level_db[0] - level_db[1] > [5, 5, 8, 15, 20]).all()
    assert earmill.verify_deep(tmp_path / "out", 1).equal == 1
    provenance = json.loads((tmp_path / "out" / "dataset.json").read_text())["provenance"]
    params = [record["params"] for record in provenance["models"]]
    stored = {str(hz): loss for hz, loss in MILD.items()}
    assert [each.get("audiogram") for each in params] == [None, stored, {"1000": 0}, stored]


def test_the_hash_is_of_the_listener(tmp_path: Path) -> None:
    def sha256(*extract: dict[str, Any]) -> str:
        return JobSpec.load(job(tmp_path, *extract)).sha256()

    assert sha256(ENTRY) == sha256(ENTRY | {"listener": None})
    as_text = {f"{hz}": float(loss) for hz, loss in reversed(MILD.items())}
    assert sha256(heard("mild", MILD)) == sha256(heard("mild", as_text))
    others = [
        ENTRY, heard("mild", MILD), heard("a", MILD), heard(None, MILD), heard("a", {250: 10}),
        heard("a", MILD, ohc_share=0.5),
    ]  # fmt: skip
    assert len({sha256(each) for each in others}) == len(others)
    spec = JobSpec.load(job(tmp_path, heard("mild", MILD)))
    assert JobSpec.load(spec) == spec
    changed = JobSpec.load(spec, overrides=["extract.0.listener.audiogram.250=20"])
    assert changed.sha256() == sha256(heard("mild", MILD | {250: 20}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (heard("mild", {}), "listener.audiogram: the audiogram must be dB HL by frequency in Hz"),
    (heard("mild", {0: 10}), "each above 0"),
    (heard("mild", {250: 140}), "losses between -20 and 130 dB"),
    (heard("Mild one", MILD), "listener.name: string should match pattern"),
    (heard("mild", MILD, age=70), "listener.age: unknown key"),
    (heard("mild", MILD, ohc_share=2), "listener.ohc_share: input should be less than"),
    (ENTRY | {"listener": {"name": "mild"}}, "listener.audiogram: missing"),
    (ENTRY | {"listener": "mild"}, "listener: expected a mapping"),
    (
        {"model": "dau1997", "listener": {"audiogram": MILD}},
        "extract.0: model 'dau1997' takes no listener: expected one of paulick2024, carfac",
    ),
    (
        heard("mild", MILD) | {"params": {"drnl_kwargs": {"subject": "HIx"}}},
        "expected subject NH with an audiogram",
    ),
]


@pytest.mark.parametrize(("entry", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_refusals(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        describe_models(JobSpec.load(job(tmp_path, entry)))
    assert message in str(caught.value)


def test_streams_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = job(tmp_path, heard("mild", MILD), heard("mild", {250: 10}))
    with pytest.raises(SpecError, match="stream 'envelope_mild' comes from both"):
        JobSpec.load(twice)
    by_default = {"model": "carfac", "listener": {"audiogram": MILD}}
    with pytest.raises(SpecError, match="stream 'nap' comes from both"):
        describe_models(JobSpec.load(job(tmp_path, {"model": "carfac"}, by_default)))
