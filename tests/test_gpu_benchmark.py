"""`python -m benchmarks.gpu`: one line and exit code 2 without a device; its sums."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from amtcore.features.registry import BUILT_IN
from benchmarks import gpu, kernel, loudness
from tests.short import but

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", but(["gpu_job"], ["gpu", "gpu_job"]))
def test_without_a_device_it_says_so_and_measures_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_bytes()
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"benchmarks.{name}: no GPU: ")
    assert (ROOT / "benchmarks" / "RESULTS.md").read_bytes() == results


def test_every_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(_rng: object, fs_hz: float, seconds: float) -> np.ndarray:
        return np.ones(round(fs_hz * seconds))

    monkeypatch.setattr(kernel, "speech", even)
    monkeypatch.setattr(loudness, "speech", even)
    cases = gpu.cases()
    assert {case.model for case in cases} == set(BUILT_IN)
    assert [case.batches for case in cases if case.model == "dau1997"] == [gpu.BATCHES]
    assert sum(case.batches == gpu.IN_WAVES for case in cases) == 3
    for case in cases:
        ears = 2 if case.model == "moore2016" else 1
        assert all(clip.ndim == ears for clip in case.clips)


def test_shares_of_a_call_add_up() -> None:
    times = {
        "Memcpy HtoD (Pinned -> Device)": 20.0,
        "Memcpy DtoH (Device -> Pinned)": 5.0,
        "Memset (Device)": 1.0,
        "forward_0123456789ab": 74.0,
    }
    assert gpu.shares_of(times) == pytest.approx((0.75, 0.2, 0.05))
    assert gpu.shares_of({}) == (1.0, 0.0, 0.0)
