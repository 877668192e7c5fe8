"""The resampler: what passes, what dies, where it lands in time, and chunked equals whole."""

from __future__ import annotations

import doctest
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import soxr
from hypothesis import given
from hypothesis import strategies as st

import earmill.pipeline.audio.resample as resample_module
from earmill.pipeline.audio.resample import (
    DEFAULT_QUALITY,
    QUALITIES,
    ResampleStream,
    resample,
)
from earmill.pipeline.audio.time_span import resampled_length
from tests.short import drawn

PAIRS = [(16000, 44100), (44100, 16000), (48000, 44100), (22050, 44100), (8000, 16000.5)]

# Level of all that is not the tone, against the tone: rounding of float32 or of soxr itself.
RESIDUE_DB = {"soxr_vhq": -148.0, "soxr_hq": -128.0}
# Where soxr interpolates its filter: a ratio of large whole numbers.
ODD_RATIO, ODD_RESIDUE_DB = (8000, 16000.5), -120.0
PHASE_RAD = 5e-6
# Level of a tone above the new Nyquist frequency, against the same tone below it.
KILL_DB = {"soxr_vhq": -148.0, "soxr_hq": -128.0}
# (fraction of the lower rate, dB): soxr rolls off by up to a hundredth of a dB, on purpose.
FLATNESS = [(0.01, 1e-4), (0.1, 1e-4), (0.3, 1e-3), (0.42, 5e-3), (0.46, 0.012)]

Floats = npt.NDArray[np.float64]


def tone(hz: float, rate_hz: float, n: int) -> Floats:
    """Unit-amplitude sine by exact phase."""
    return np.sin(2 * np.pi * hz * np.arange(n) / rate_hz)


def rms_db(x: npt.NDArray[np.floating]) -> float:
    return float(10 * np.log10(np.mean(np.square(x, dtype=np.float64)) + 1e-30))


def fit(y: npt.NDArray[np.float32], hz: float, rate_hz: float) -> tuple[float, float, Floats]:
    """Amplitude and phase of the tone `hz` in `y`, absolute in time, and what is left of `y`.

    Only the middle half is looked at: the edges see the zeros around the clip.
    """
    time_s = np.arange(len(y) // 4, 3 * len(y) // 4) / rate_hz
    parts = np.stack([np.sin(2 * np.pi * hz * time_s), np.cos(2 * np.pi * hz * time_s)], axis=1)
    middle = y[len(y) // 4 : 3 * len(y) // 4].astype(np.float64)
    weights, *_ = np.linalg.lstsq(parts, middle, rcond=None)
    amplitude, phase = float(np.hypot(*weights)), float(np.arctan2(weights[1], weights[0]))
    return amplitude, phase, middle - parts @ weights


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(("from_hz", "to_hz"), PAIRS)
def test_a_tone_in_the_pass_band_keeps_level_and_time(
    quality: str, from_hz: float, to_hz: float
) -> None:
    residue_db = ODD_RESIDUE_DB if (from_hz, to_hz) == ODD_RATIO else RESIDUE_DB[quality]
    for fraction, flat_db in FLATNESS:
        hz = fraction * min(from_hz, to_hz)
        x = tone(hz, from_hz, int(from_hz)).astype(np.float32)
        y = resample(x, from_hz, to_hz, quality)
        amplitude, phase, residue = fit(y, hz, to_hz)
        assert abs(20 * np.log10(amplitude)) < flat_db
        assert abs(phase) < PHASE_RAD
        assert rms_db(residue) - rms_db(tone(hz, to_hz, len(y))) < residue_db


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("fraction", [0.501, 0.52, 0.6, 1.2])
def test_a_tone_above_the_new_nyquist_dies(quality: str, fraction: float) -> None:
    x = tone(fraction * 16000, 44100, 44100).astype(np.float32)
    y = resample(x, 44100, 16000, quality)
    assert rms_db(y[4000:-4000]) - rms_db(x) < KILL_DB[quality]


def test_an_impulse_stays_where_it_is() -> None:
    """Delay zero, in both directions, to a hundredth of an input sample."""
    for from_hz, to_hz in PAIRS:
        x = np.zeros(4000, np.float32)
        x[2000] = 1.0
        y = resample(x, from_hz, to_hz).astype(np.float64)
        centre_s = np.sum(np.arange(len(y)) * y) / y.sum() / to_hz
        assert centre_s == pytest.approx(2000 / from_hz, abs=0.01 / from_hz)


def test_constants_and_energy_survive() -> None:
    y = resample(np.full(16000, 0.25, np.float32), 16000, 44100)
    np.testing.assert_allclose(y[2000:-2000], 0.25, rtol=1e-6)
    rng = np.random.default_rng(0)
    spectrum = np.fft.rfft(rng.standard_normal(16000))
    spectrum[6000:] = 0  # band-limited to 6 kHz, so nothing is lost
    x = np.fft.irfft(spectrum).astype(np.float32)
    assert rms_db(resample(x, 16000, 44100)) == pytest.approx(rms_db(x), abs=0.01)


def test_down_and_up_again_is_the_band_limited_signal() -> None:
    spectrum = np.fft.rfft(np.random.default_rng(1).standard_normal(44100))
    spectrum[4000:] = 0  # where both directions are flat
    x = np.fft.irfft(spectrum).astype(np.float32)
    there = resample(x, 44100, 16000)
    back = resample(there, 16000, 44100)
    error = back.astype(np.float64) - x
    assert rms_db(error[8000:-8000]) - rms_db(x) < -100.0


@drawn(40)
@given(
    pair=st.sampled_from([*PAIRS, (96000, 1000), (44100, 44100)]),
    n=st.integers(0, 9000),
    cuts=st.lists(st.integers(0, 9000), max_size=6),
    quality=st.sampled_from(sorted(QUALITIES)),
)
def test_chunked_equals_whole(
    pair: tuple[float, float], n: int, cuts: list[int], quality: str
) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    stream = ResampleStream(*pair, quality)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    parts = [stream.push(x[a:b]) for a, b in pairwise(edges)]
    chunked = np.concatenate([*parts, stream.finish()])
    np.testing.assert_array_equal(chunked, resample(x, *pair, quality))


@pytest.mark.parametrize("quality", QUALITIES)
def test_whole_equals_one_call_of_soxr(quality: str) -> None:
    """Feeding in pieces is not another algorithm."""
    x = np.random.default_rng(2).standard_normal(200_000).astype(np.float32)
    ours = resample(x, 16000, 44100, quality)
    theirs = soxr.resample(x, 16000, 44100, quality=QUALITIES[quality])
    np.testing.assert_array_equal(ours, theirs[: len(ours)])
    assert len(theirs) - len(ours) in (0, 1)


@pytest.mark.parametrize(("from_hz", "to_hz"), [*PAIRS, (44100, 22050), (192000, 44100)])
def test_length_is_the_formula_for_every_n(from_hz: float, to_hz: float) -> None:
    for n in [*range(200), 320, 1000, 4410, 65536, 65537]:
        produced = len(resample(np.zeros(n, np.float32), from_hz, to_hz))
        assert produced == resampled_length(n, from_hz, to_hz)
        # Second route: nearest whole number of the exact quotient, halves down.
        exact = Fraction(n) * Fraction(to_hz) / Fraction(from_hz)
        assert abs(produced - exact) <= Fraction(1, 2)
        assert produced - exact != Fraction(1, 2)


@pytest.mark.parametrize("pair", [(16000, 44100), (44100, 44100)])
def test_output_goes_where_it_is_wanted(pair: tuple[float, float]) -> None:
    x = np.random.default_rng(3).standard_normal(40_000).astype(np.float32)
    wanted = resample(x, *pair)
    rows = np.full((3, len(wanted)), np.nan, np.float32)
    resample(x, *pair, into=rows[1])
    np.testing.assert_array_equal(rows[1], wanted)
    assert np.isnan(rows[[0, 2]]).all()
    for room in (len(wanted) - 1, len(wanted) + 1):
        with pytest.raises(ValueError):
            resample(x, *pair, into=np.empty(room, np.float32))


def test_length_at_an_exact_half() -> None:
    assert resampled_length(80, 16000, 44100) == 220  # 220.5
    assert resampled_length(1, 44100, 22050) == 0  # 0.5
    assert resampled_length(10**12, 16000, 44100) == 2756250000000


def test_equal_rates_pass_through_untouched() -> None:
    x = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    assert resample(x, 16000, 16000.0) is x
    assert resample(x, 16000, 16000.5) is not x


def test_default_is_a_named_quality() -> None:
    assert DEFAULT_QUALITY == "soxr_vhq"
    x = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    np.testing.assert_array_equal(resample(x, 8000, 16000), resample(x, 8000, 16000, "soxr_vhq"))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="expected rates above 0 Hz"):
        ResampleStream(0, 16000)
    with pytest.raises(
        ValueError, match="expected one of soxr_vhq, soxr_hq, torchaudio_kaiser_best, got 'best'"
    ):
        ResampleStream(8000, 16000, "best")
    with pytest.raises(ValueError, match="expected a 1-D float32 array, got 2-D float32"):
        resample(np.zeros((1, 10), np.float32), 8000, 16000)
    with pytest.raises(ValueError, match="got 1-D float64"):
        ResampleStream(8000, 16000).push(np.zeros(10))  # type: ignore[arg-type]
    stream = ResampleStream(8000, 16000)
    stream.finish()
    with pytest.raises(ValueError, match="push after finish"):
        stream.push(np.zeros(10, np.float32))
    with pytest.raises(ValueError, match="finish was called twice"):
        stream.finish()


def test_examples_in_the_docstrings() -> None:
    results = doctest.testmod(resample_module)
    assert results.attempted > 0
    assert results.failed == 0
