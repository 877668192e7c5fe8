"""What is known of a job's models without computing: descriptions and speeds that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.planning import speeds
from earmill.pipeline.planning.speeds import (
    JOB,
    REFERENCE,
    TIMING,
    Speed,
    find_speed,
    keep_job,
    keep_timing,
    reference,
)
from earmill.pipeline.spec import models
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models, validate_models

DAU = {"model": "dau1997", "fs_hz": 16000}
MEL = {"model": "melspectrogram"}
CPU_S = {"model": 3.0, "decode": 1.0, "idle": 9.0}


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


def found(spec: JobSpec) -> Speed | None:
    return find_speed(spec, describe_models(spec))


def built(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs whose models are built from now on."""
    calls: list[JobSpec] = []

    def noting(spec: JobSpec) -> Any:
        calls.append(spec)
        return validate_models(spec)

    monkeypatch.setattr(models, "validate_models", noting)
    return calls


class TestDescriptions:
    def test_what_is_kept_is_what_the_model_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = job(DAU, MEL)
        extractors = validate_models(spec)
        calls = built(monkeypatch)
        described = describe_models(spec)
        assert not calls
        assert [each.streams for each in described] == [each.streams for each in extractors]
        assert [each.fs_hz for each in described] == [16000, 16000]
        assert [each.input_channels for each in described] == [(1,), (1,)]

    def test_another_entry_and_a_damaged_file_are_built(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
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
        self, monkeypatch: pytest.MonkeyPatch
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

    def test_a_model_of_the_users_code_is_built_every_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = {
            "model": "torch_module",
            "params": {"module": f"{__name__}:Columns"},
            "streams": {"same": {"width": 1, "frame_rate_hz": 16000}},
        }
        describe_models(job(entry))
        calls = built(monkeypatch)
        describe_models(job(entry))
        assert len(calls) == 1


class TestSpeeds:
    def test_a_reference_says_so_and_follows_the_rate(self) -> None:
        dau, mel = (reference()["models"][name] for name in ("dau1997", "melspectrogram"))
        expected = dau["core_s"] * 16000 / dau["fs_hz"] + mel["core_s"] * 16000 / mel["fs_hz"]
        assert found(job(DAU, MEL)) == Speed(pytest.approx(expected), REFERENCE)

    def test_two_ears_cost_twice_one(self) -> None:
        one, two = (found(job({"model": "moore2016"}, channels=c)) for c in ("mean", "binaural"))
        assert one is not None and two is not None and two.core_s == 2 * one.core_s

    def test_a_model_without_reference_has_no_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(speeds, "reference", lambda: {"models": {}})
        assert found(job(DAU)) is None

    def test_a_timing_counts_alone_and_beside_others(self) -> None:
        keep_timing(job(DAU), 0.02)
        assert found(job(DAU)) == Speed(0.02, TIMING)
        assert found(job(DAU, MEL)) != Speed(0.02, TIMING)
        keep_timing(job(MEL), 0.01)
        assert found(job(DAU, MEL)) == Speed(pytest.approx(0.03), TIMING)

    def test_a_job_counts_with_all_but_waiting(self) -> None:
        keep_job(job(DAU), 100.0, CPU_S, 7.04)
        assert found(job(DAU)) == Speed(0.04, JOB, 7.0)

    def test_a_short_job_says_nothing(self) -> None:
        keep_job(job(DAU), 10.0, CPU_S, 7.0)
        keep_job(job(DAU), 100.0, {}, 7.0)
        speed = found(job(DAU))
        assert speed is not None and speed.origin == REFERENCE

    @pytest.mark.parametrize(
        ("name", "value"), [("processor_name", lambda: "Z80"), ("cores", lambda: 999)]
    )
    def test_another_machine_knows_nothing_of_it(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
    ) -> None:
        keep_timing(job(DAU), 0.02)
        monkeypatch.setattr(speeds, name, value)
        speed = found(job(DAU))
        assert speed is not None and speed.origin == REFERENCE
