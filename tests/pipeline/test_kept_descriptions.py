"""Descriptions of models that were kept, so that no model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec import models
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models, validate_models

DAU = {"model": "dau1997", "fs_hz": 16000}
MEL = {"model": "melspectrogram"}


class Columns(torch.nn.Module):
    """(batch, time) as frames of one column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "earmill"


def job(*entries: dict[str, Any], **audio: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": "clips"},
            "audio": audio,
            "extract": list(entries),
            "output": {"uri": "out", "dtype": "float32"},
        }
    )


def built(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs whose models are built from now on."""
    calls: list[JobSpec] = []

    def noting(spec: JobSpec) -> Any:
        calls.append(spec)
        return validate_models(spec)

    monkeypatch.setattr(models, "validate_models", noting)
    return calls


def test_what_is_kept_is_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(DAU, MEL)
    extractors = validate_models(spec)
    calls = built(monkeypatch)
    described = describe_models(spec)
    assert not calls
    assert [each.streams for each in described] == [each.streams for each in extractors]
    assert [each.fs_hz for each in described] == [16000, 16000]
    assert [each.input_channels for each in described] == [(1,), (1,)]


def test_another_entry_and_a_damaged_file_are_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(DAU)
    made = describe_models(spec)
    calls = built(monkeypatch)
    describe_models(job(DAU | {"fs_hz": 20000}))
    assert len(calls) == 1
    for text in ("{", "[]", '{"fs_hz": 1}', "null"):
        for path in cache.iterdir():
            path.write_text(text)
        assert describe_models(spec) == made
    assert len(calls) == 5


def test_a_job_is_checked_by_what_is_kept_as_by_what_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe_models(job(DAU))
    calls = built(monkeypatch)
    for wrong, says in (
        (job(DAU, DAU), "comes from both"),
        (job(DAU, channels="binaural"), "model of two ears"),
    ):
        with pytest.raises(SpecError, match=says) as kept:
            describe_models(wrong)
        with pytest.raises(SpecError) as fresh:
            validate_models(wrong)
        assert str(kept.value) == str(fresh.value) and not calls


def test_a_model_of_the_users_code_is_built_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "model": "torch_module",
        "params": {"module": f"{__name__}:Columns"},
        "streams": {"same": {"width": 1, "frame_rate_hz": 16000}},
    }
    describe_models(job(entry))
    calls = built(monkeypatch)
    describe_models(job(entry))
    assert len(calls) == 1
