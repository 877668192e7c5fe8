"""Sharpness against stored values, the test of DIN 45692, and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Sharpness, ZwickerLoudness
from amtcore.errors import ParameterError, ShapeError
from amtcore.models.sharpness import WEIGHTINGS, divided

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load
from .test_zwicker import built, over_time

STEADY = ("sharpness__din45692", "zwicker__spectra_free", "zwicker__spectra_diffuse",
          "zwicker__iso_b2_signal1", "zwicker__iso_b3_tone1000_60")  # fmt: skip
OVER_TIME = ("zwicker_tv__am_noise_diffuse", "zwicker_tv__iso_b4_signal10",
             "zwicker_tv__iso_b4_signal13")  # fmt: skip
BOUNDS = {"float64": Tolerance(1e-6, "arrays stored in float32"),
          "float32": Tolerance(1e-5, "float32 after the filters")}  # fmt: skip
CASES = [(name, f"sharpness_{key}") for name in STEADY + OVER_TIME for key in WEIGHTINGS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{n}-{k}" for n, k in CASES])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    stored, kind, weighting = load(name), DTYPES[dtype], key.removeprefix("sharpness_")
    if name in OVER_TIME:
        got = over_time(name, dtype)["sharpness"][:, WEIGHTINGS.index(weighting)]
    else:
        zwicker = built(field=str(stored["field"]), dtype=kind)
        n, specific = zwicker.of_levels(torch.from_numpy(stored["levels"]))
        got = Sharpness(weighting, dtype=kind)(specific, n)
    assert_close(got, stored[key], BOUNDS[dtype], f"{name} {key}")


def test_noises_of_din_45692() -> None:
    """41 noises of 4 sone, within 5 % or 0.05 acum."""
    stored = load("sharpness__din45692")
    n, specific = built(dtype=torch.float64).of_levels(torch.from_numpy(stored["levels"]))
    apart = np.abs(Sharpness(dtype=torch.float64)(specific, n).numpy() - stored["s_din45692"])
    assert len(apart) == 41
    assert (apart <= np.maximum(0.05 * stored["s_din45692"], 0.05)).all()


def test_closed_forms() -> None:
    """One point of specific loudness has the weight of its own place."""
    one, n = torch.eye(240, dtype=torch.float64), torch.full((240,), 2.0, dtype=torch.float64)
    found = {name: Sharpness(name, dtype=torch.float64)(one, n) for name in WEIGHTINGS}
    for z in (1.0, 10.0, 15.5, 16.0, 20.0, 24.0):
        at, share = round(10 * z) - 1, 0.11 * 0.1 * z / 2.0
        din = 0.15 * math.exp(0.42 * (z - 15.8)) + 0.85 if z > 15.8 else 1.0
        bismarck = 0.2 * math.exp(0.308 * (z - 15)) + 0.8 if z > 15 else 1.0
        aures = 0.078 * math.exp(0.171 * z) / z * 2.0 / math.log(0.1 + 1)
        expected = {"din": din, "bismarck": bismarck, "aures": aures}
        for name, g in expected.items():
            np.testing.assert_allclose(float(found[name][at]), share * g, rtol=1e-12)
    assert not Sharpness()(torch.ones(3, 240), torch.tensor([0.0, 0.05, 0.0999])).any()


def test_skipped_frames_and_stored_frames() -> None:
    specific = torch.rand(2, 100, 240, generator=torch.Generator().manual_seed(1))
    n = 0.1 * specific.sum(-1)
    whole = Sharpness()(specific, n)
    same = Tolerance(1e-6, "float32")
    assert_close(Sharpness(skip=0.1)(specific, n), whole[:, 50:], same)
    assert Sharpness(skip=1.0)(specific, n).shape == (2, 0)
    stored = torch.from_numpy(specific.double().numpy()), torch.from_numpy(n.double().numpy())
    assert_close(Sharpness()(*stored), whole, same)


def test_instantaneous_loudness_removes_the_overshoot() -> None:
    """After the end of a tone the smoothed loudness outlasts the specific loudness."""
    t = torch.arange(24000, dtype=torch.float64) / 48000
    tone = 0.02 * torch.sin(2 * torch.pi * 4000 * t) * (t > 0.1)
    made = {
        kind: ZwickerLoudness(denominator=kind)(tone)["sharpness"][:, 0]
        for kind in ("weighted", "instantaneous")
    }
    steady = float(made["instantaneous"][-1])
    assert float(made["weighted"].max()) > 1.2 * steady
    assert float(made["instantaneous"][60:].max()) < 1.02 * steady


def test_gradients_are_finite_differences() -> None:
    """One spectrum of specific loudness beside three loudnesses; frames do not meet."""
    generator = torch.Generator().manual_seed(2)
    specific = torch.rand(240, generator=generator, dtype=torch.float64, requires_grad=True)
    n = torch.tensor([0.05, 1.0, 20.0], dtype=torch.float64, requires_grad=True)
    for name in WEIGHTINGS:
        module: Any = Sharpness(name, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda s, n: module(s.expand(3, 240), n), (specific, n))  # noqa: B023


def test_refusals() -> None:
    with pytest.raises(ParameterError, match="weighting"):
        Sharpness("bark")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="skip"):
        Sharpness(skip=-0.1)
    with pytest.raises(ShapeError, match="expected specific loudness"):
        Sharpness()(torch.ones(3, 240), torch.ones(2))


def test_loudness_that_is_no_number_has_no_sharpness() -> None:
    """Pressure beyond all sound overflows; 0 acum would be an answer."""
    found = divided(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([math.nan, 0.0, 4.0]), "din")
    assert math.isnan(found[0]) and found[1:].tolist() == [0.0, 0.25]
