"""Osses2021 against the stored reference arrays, and what sets it apart from Dau1997."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Dau1997, HeadphoneFilter, MiddleEarFilter, Osses2021

from ..compare import FLOAT32, FLOAT64, assert_close
from .golden_files import DTYPES, load, names, stage_tolerance

FILES = names("osses2021")
STAGES = {"headphone": "headphone", "middleear": "middleear", "ihc": "ihc", "ad": "adaptation"}
FS = 16000


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    golden = load(name)
    fs, flow, fhigh = (float(golden[key]) for key in ("fs", "flow", "fhigh"))
    model = Osses2021(fs, flow, fhigh, return_stages=True, dtype=dtype)
    return model((torch.from_numpy(golden["input"].ravel()) / 2).to(dtype))


CASES = [(name, key) for name in FILES for key in load(name) if "@" in key]


def test_files_are_there() -> None:
    assert len(FILES) == 5 and len(CASES) == 9 * len(FILES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{n[11:]}-{k}" for n, k in CASES])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden = load(name)
    out, stages = _outputs(name, DTYPES[dtype])
    stage, _, step = key.partition("@")
    if stage.startswith("mod_"):
        output = out[int(stage.split("_")[1])]
    else:
        output = stages[STAGES[stage]]
        if output.ndim == 2:
            output = output[golden["sel"].ravel().astype(int)]
    got = np.moveaxis(output.double().numpy(), -1, 0)[:: int(step)]
    expected = golden[key].reshape(got.shape)
    assert_close(got, expected, stage_tolerance(key, dtype), f"{name} {key} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILES)
def test_stored_taps_and_gain(name: str, dtype: str) -> None:
    golden, kind = load(name), DTYPES[dtype]
    fs = float(golden["fs"])
    middle = MiddleEarFilter(fs, phase_type="amt", dtype=kind)
    linear = MiddleEarFilter(fs, "jepsen2008", phase_type="zero", dtype=kind)
    tolerance = FLOAT64 if dtype == "float64" else FLOAT32
    for key, taps in (
        ("headphone_fir", HeadphoneFilter(fs, phase_type="amt", dtype=kind).fir_coeffs),
        ("middleear_fir", middle.fir_coeffs),
        ("middleear_jepsen_fir", linear.fir_coeffs),
    ):
        assert_close(taps, golden[key].ravel(), tolerance, key)
    assert -float(middle.gain_normalization) == pytest.approx(
        golden["middleear_gain_db"].item(), rel=1e-6
    )


def test_ears_are_advanced_by_half_their_length_each() -> None:
    """A click keeps its place to within the middle ear's own short delay."""
    click = torch.zeros(3000)
    click[1500] = 1.0
    peaks = {}
    for phase_type in ("amt", "minimum", "zero"):
        _, stages = Osses2021(FS, fhigh=7000.0, phase_type=phase_type, return_stages=True)(click)
        peaks[phase_type] = int(stages["middleear"].abs().argmax())
    assert peaks["zero"] == 1500 and peaks["minimum"] > 1500
    # Linear-phase headphone (256) and minimum-phase middle ear, each advanced by 257 samples.
    assert 1500 - 257 <= peaks["amt"] <= 1500 - 240


def test_it_is_dau1997_with_other_presets_behind_the_ears() -> None:
    x = 0.05 * torch.randn(2, 1600, generator=torch.Generator().manual_seed(0))
    model = Osses2021(FS, fhigh=7000.0, return_stages=True)
    out, stages = model(x)
    twin = Dau1997(
        FS,
        fhigh=7000.0,
        ihc_kwargs={"method": "breebaart2001"},
        adaptation_kwargs={"preset": "osses2021"},
        modulation_kwargs={"preset": "jepsen2008"},
    )
    assert torch.equal(torch.cat(twin(stages["middleear"]), 1), torch.cat(out, 1))
    assert torch.equal(model.middleear(model.headphone(x)), stages["middleear"])
    assert list(stages) == ["headphone", "middleear", "filterbank", "ihc", "adaptation"]


def test_arguments_reach_their_stages() -> None:
    model = Osses2021(
        FS,
        flow=200.0,
        fhigh=4000.0,
        phase_type="minimum",
        headphone_kwargs={"order": 128},
        middleear_kwargs={"filter_type": "jepsen2008", "normalize_gain": False},
        filterbank_kwargs={"n": 3},
        ihc_kwargs={"method": "dau1996"},
        adaptation_kwargs={"limit": 10.0},
        modulation_kwargs={"preset": "dau1997", "max_mfc": 60.0},
    )
    assert model.headphone.order == 128 and model.middleear.filter_type == "jepsen2008"
    assert float(model.middleear.gain_normalization) == 0.0 and model.filterbank.n == 3
    assert model.ihc.method == "dau1996" and float(model.adaptation.limit) == 10.0
    assert max(float(mfc[-1]) for mfc in model.modulation.mfc) <= 60.0
    assert 200.0 <= float(model.fc[0]) and float(model.fc[-1]) <= 4000.0
    assert "phase_type=minimum" in repr(model)
