"""Every stored array of the Dau1997 reference, stage by stage and end to end from the waveform."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Dau1997, ModulationFilterbank
from amtcore.scales import erb_space_bw

from ..compare import assert_close
from .golden_files import DTYPES, load, names, stage_tolerance

FILES = names("dau1997")
_NOT_OUTPUTS = {"fs", "flow", "fhigh", "fc", "sel", "fc_basef1000", "input"}


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    golden = load(name)
    fs, flow, fhigh = (float(golden[key]) for key in ("fs", "flow", "fhigh"))
    model = Dau1997(fs, flow, fhigh, return_stages=True, dtype=dtype)
    pressure = torch.from_numpy(golden["input"].ravel())
    dau, stages = model((pressure / 2).to(dtype))
    jepsen = ModulationFilterbank(fs, model.fc.double(), preset="jepsen2008", dtype=dtype)
    return dau, jepsen(stages["adaptation"]), stages


CASES = [(name, key) for name in FILES for key in load(name) if key not in _NOT_OUTPUTS]


def test_files_are_there() -> None:
    assert {name.rsplit("_", 1)[1] for name in FILES} == {"16000", "44100"}
    assert len(CASES) == 13 * len(FILES) == 65


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{n[9:]}-{k}" for n, k in CASES])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    assert_close(
        output_of(name, key, dtype), stored(name, key), stage_tolerance(key, dtype), f"{name} {key}"
    )


def stored(name: str, key: str) -> np.ndarray:
    """A reference array, (time, channel)."""
    return load(name)[key]


def output_of(name: str, key: str, dtype: str) -> np.ndarray:
    """What the model gives in the place of a reference array."""
    golden = load(name)
    dau, jepsen, stages = _outputs(name, DTYPES[dtype])
    stage, _, step = key.partition("@")
    if stage.startswith("mod_"):
        _, bank, channel = stage.split("_")
        output = (dau if bank == "dau" else jepsen)[int(channel)]
    else:
        which = {"gt": "filterbank", "ihc": "ihc", "ad": "adaptation"}[stage]
        output = stages[which][golden["sel"].ravel().astype(int)]
    return output.double().numpy().T[:: int(step or 1)]


@pytest.mark.parametrize("name", FILES)
def test_centre_frequencies(name: str) -> None:
    golden = load(name)
    flow, fhigh = float(golden["flow"]), float(golden["fhigh"])
    np.testing.assert_allclose(erb_space_bw(flow, fhigh), golden["fc"].ravel(), rtol=1e-12)
    np.testing.assert_allclose(
        erb_space_bw(flow, fhigh, 1.0, 1000.0), golden["fc_basef1000"].ravel(), rtol=1e-12
    )


def test_default_has_31_channels_of_8_filters() -> None:
    model = Dau1997(44100)
    assert model.num_channels == 31
    assert [len(mfc) for mfc in model.modulation.mfc] == [8] * 31
    assert Dau1997(44100, basef=1000).num_channels == 30
    assert 1000.0 in Dau1997(44100, basef=1000).fc.tolist()
