"""Scales and units against their definitions and published anchors."""

from __future__ import annotations

import numpy as np
import pytest

from amtcore.errors import ParameterError
from amtcore.scales import (
    audfiltbw,
    erb2fc,
    erb_bandwidth,
    erb_frequency,
    erb_number,
    erb_space,
    erb_space_bw,
    erbspace,
    erbspacebw,
    fc2erb,
)
from amtcore.units import Calibration, db_to_pa, pa_to_db, rms


def test_erb_number_is_the_integral_of_one_over_the_bandwidth() -> None:
    f = np.linspace(50.0, 15000.0, 200001)
    middle = (f[:-1] + f[1:]) / 2
    integral = np.cumsum(np.diff(f) / erb_bandwidth(middle))
    assert np.allclose(erb_number(f[1:]) - erb_number(50.0), integral, rtol=1e-3)
    assert np.allclose(erb_frequency(erb_number(f)), f, rtol=1e-12)


def test_spacings() -> None:
    steps = np.diff(erb_number(erb_space_bw(80.0, 8000.0)))
    assert np.allclose(steps, 1.0)
    ends = erb_number(erb_space_bw(80.0, 8000.0))[[0, -1]]
    low, high = erb_number([80.0, 8000.0])
    assert ends[0] - low == pytest.approx(high - ends[1])
    spaced = erb_space(125.0, 8000.0, 50)
    assert spaced[0] == 125.0 and spaced[-1] == 8000.0 and len(spaced) == 50
    assert np.allclose(np.diff(erb_number(spaced), 2), 0.0, atol=1e-12)


def test_names_of_torch_amt() -> None:
    """Names and order of arguments; five channels within 2 ERB of 1 kHz, as its King2019 says."""
    middle = fc2erb(1000.0)
    assert np.allclose(erb2fc([middle - 2, middle + 2]), [761.4021, 1296.0883])
    assert np.allclose(erbspacebw(761.4, 1296.1, 1.0, 1000.0)[[0, 2]], [761.4021, 1000.0])
    assert np.allclose(erbspace(80.0, 2000.0, 3)[[0, 2]], [80.0, 2000.0])
    assert audfiltbw(926.5) == pytest.approx(124.7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: erb_space_bw(8000, 80), "flow <= fhigh"),
        (lambda: erb_space_bw(80, 8000, 0), "above 0 ERB"),
        (lambda: erb_space_bw(80, 8000, 1, 9000), "base frequency"),
        (lambda: erb_space(80, 8000, 0), "1 or more"),
    ],
)
def test_scale_errors(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        call()


def test_94_db_is_one_pascal() -> None:
    assert db_to_pa(93.9794) == pytest.approx(1.0, rel=1e-5)
    assert pa_to_db(db_to_pa(40.0)) == pytest.approx(40.0)
    assert pa_to_db(0.0) == -np.inf


def test_full_scale_calibration() -> None:
    clip = np.full(10, 0.1, np.float32)
    assert Calibration(rms1_db_spl=100.0).gain(clip, "rms1=100dB") == pytest.approx(1.0)
    assert Calibration(rms1_db_spl=100.0).gain(clip, "pa") == pytest.approx(2.0)
    assert Calibration(rms1_db_spl=120.0).gain(clip, "rms1=100dB") == pytest.approx(10.0)


def test_level_normalisation_reaches_the_level() -> None:
    clip = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    calibration = Calibration(level_db_spl=65.0)
    assert calibration.needs_whole_clip
    pascals = clip * calibration.gain(clip, "pa")
    assert pa_to_db(rms(pascals)) == pytest.approx(65.0, abs=1e-4)
    assert calibration.gain(np.zeros(10, np.float32), "pa") == 0.0


@pytest.mark.parametrize(
    "values", [{}, {"rms1_db_spl": 100.0, "level_db_spl": 65.0}, {"rms1_db_spl": float("nan")},
               {"volume": 3}]
)  # fmt: skip
def test_bad_calibrations(values: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        Calibration.from_dict(values)


def test_unknown_unit() -> None:
    with pytest.raises(ParameterError, match="unknown input unit"):
        Calibration(rms1_db_spl=100.0).gain(np.zeros(1), "volts")
