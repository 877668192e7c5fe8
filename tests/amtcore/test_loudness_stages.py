"""Stages of the loudness models against the published formulas, written out again in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from amtcore import (
    ERBIntegration,
    ExcitationPattern,
    LoudnessEar,
    Moore2016BinauralLoudness,
    Moore2016ExcitationPattern,
    Moore2016SpecificLoudness,
    Moore2016Spectrum,
    MultiResolutionFFT,
    SpecificLoudness,
)
from amtcore.errors import ParameterError, ShapeError
from amtcore.scales import (
    PhonTable,
    cam_bandwidth,
    cam_frequency,
    cam_number,
    cam_space,
    phon_by,
)
from amtcore.stages.ears import fft_length
from amtcore.tables import load_table, table_names

from ..compare import KERNEL64, Tolerance, assert_close

FS = 32000
FORMULA = Tolerance(1e-10, "the same formula in another order of operations", 1e-12)
F64 = torch.float64


def _tone(f_hz: float, level_db: float, samples: int = 6400) -> np.ndarray:
    peak = 20e-6 * 10 ** (level_db / 20) * np.sqrt(2)
    return peak * np.sin(2 * np.pi * f_hz * np.arange(samples) / FS)


def _roex(p: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.where(g <= 4, (1 + p * np.abs(g)) * np.exp(-p * np.abs(g)), 0)


def test_cam_scale_goes_there_and_back() -> None:
    f_hz = np.geomspace(20, 16000, 50)
    np.testing.assert_allclose(cam_frequency(cam_number(f_hz)), f_hz, rtol=1e-12)
    channels = cam_space(1.75, 39.0, 0.25)
    assert len(channels) == 150 and float(cam_number(channels[-1])) == pytest.approx(39.0)
    # One Cam is one bandwidth wide.
    width = np.diff(cam_frequency(cam_number(1000.0) + np.array([-0.005, 0.005])))[0] / 0.01
    assert width == pytest.approx(float(cam_bandwidth(1000.0)), rel=2e-4)


def test_tables_have_equal_columns_and_cannot_be_changed() -> None:
    for name in ("outer_ear_ansi_s3_4_2007", "moore2016_A_of_gain"):
        columns = load_table(name)
        assert name in table_names() and len({len(values) for values in columns.values()}) == 1
        with pytest.raises(ValueError, match="read-only"):
            next(iter(columns.values()))[0] = 1.0
    with pytest.raises(ParameterError, match="no table 'moore'"):
        load_table("moore")


@pytest.mark.parametrize("field", ["free", "diffuse", "eardrum"])
@pytest.mark.parametrize("kind", ["tfOuterMiddle1997", "tfOuterMiddle2007"])
def test_ear_has_the_gain_of_its_tables_and_no_delay(kind: str, field: str) -> None:
    ear = LoudnessEar(FS, kind, field, dtype=F64)
    middle = load_table(
        "middle_ear_moore_1997" if kind.endswith("1997") else "middle_ear_ansi_s3_4_2007"
    )
    outer = load_table("outer_ear_ansi_s3_4_2007")
    for f_hz in (100.0, 500.0, 1250.0, 3000.0, 8000.0):
        gain_db = float(np.interp(f_hz, middle["frequency_hz"], middle["gain_db"]))
        if field != "eardrum":
            gain_db += float(np.interp(f_hz, outer["frequency_hz"], outer[f"{field}_field_db"]))
        x = torch.from_numpy(_tone(f_hz, 90.0, 16000))
        y = ear(x)[4000:-4000]
        expected = x[4000:-4000] * 10 ** (gain_db / 20)
        assert_close(y, expected, Tolerance(0.02, "0.17 dB: the window rounds off corners"))


def test_ear_is_linear_phase_and_equals_plain_convolution() -> None:
    ear, x = LoudnessEar(FS, order=256, dtype=F64), np.random.default_rng(0).standard_normal(700)
    taps = ear.taps().numpy()
    np.testing.assert_allclose(taps, taps[::-1], atol=1e-15)
    expected = np.convolve(x, taps)[128 : 128 + 700]
    assert_close(ear(torch.from_numpy(x)), expected, KERNEL64)


@pytest.mark.parametrize("samples", [1, 5, 6144, 10208, 10241])
def test_transform_lengths_are_long_enough_and_not_much_longer(samples: int) -> None:
    assert samples <= fft_length(samples) <= max(4, 1.26 * samples)


def test_spectrum_equals_six_transforms_per_frame() -> None:
    x = np.random.default_rng(0).standard_normal(500)
    stage = Moore2016Spectrum(hop_length=50, dtype=F64)
    got = stage.intensities(stage.padded(torch.from_numpy(x)))
    padded = np.pad(x, 1024)
    limits = (20, 80, 500, 1250, 2540, 4050, 15000)
    frames = []
    for i in range(500 // 50 + 1):
        frame, parts = padded[50 * i : 50 * i + 2048], []
        for k in range(6):
            n = 2048 >> k
            window = np.zeros(2048)
            window[1024 - n // 2 : 1024 + n // 2] = np.hanning(n)
            edges = [int(limit // 15.625) + 1 for limit in limits[k : k + 2]]
            power = np.abs(2 * np.fft.rfft(frame * window)[slice(*edges)] / 2048) ** 2
            parts.append(power * 0.5 / 20e-6**2 * 10**0.332 * 2**k)
        frames.append(np.concatenate(parts))
    assert_close(got, np.array(frames), FORMULA)
    assert stage.frequencies[0] == 31.25 and stage.frequencies[-1] == 15000.0


def test_density_of_a_tone_sums_to_its_mean_square() -> None:
    for f_hz in (250.0, 1000.0, 6000.0):
        x = _tone(f_hz, 70.0)
        stage = MultiResolutionFFT(FS, dtype=F64)
        psd, f = stage(torch.from_numpy(x)[None])
        total = float(psd[0, 100].sum()) * float(f[1] - f[0])
        # The shortest window is symmetric, hence 1/64 less than a periodic one.
        assert total == pytest.approx(np.mean(x**2) * 10 ** (0.364 - 0.426), rel=2e-2)


def test_faint_components_are_dropped_by_the_louder_ear() -> None:
    x = torch.from_numpy(np.stack((_tone(1000.0, 80.0), _tone(1000.0, 15.0))))[None]
    spectrum = Moore2016Spectrum(dtype=F64)
    both, alone = spectrum(x), spectrum(x[:, 1:])
    assert both[0, 0].amax() > 1e7 and both[0, 1].amax() == 0.0
    assert alone.amax() > 1.0
    loudest = both.amax((1, 3), keepdim=True)
    assert bool(((both == 0) | (both > loudest * 1e-6)).all())


def test_excitation_equals_the_formula() -> None:
    generator = np.random.default_rng(0)
    f_hz = np.sort(generator.uniform(40, 12000, 40))
    intensity = 10 ** generator.uniform(0, 8, (3, 40))
    intensity[:, ::7] = 0.0
    stage = Moore2016ExcitationPattern(torch.from_numpy(f_hz), dtype=F64)
    got = stage(torch.from_numpy(intensity))
    fc = cam_space(1.75, 39.0, 0.25)
    p, p_1k = 4 * fc / cam_bandwidth(fc), 4000 / cam_bandwidth(1000.0)
    for row, excitation in zip(intensity, got, strict=True):
        source = 4 * f_hz / cam_bandwidth(f_hz)
        weights = _roex(source[:, None], (f_hz - f_hz[:, None]) / f_hz[:, None])
        level = 10 * np.log10(row @ weights)
        g = (f_hz - fc[:, None]) / fc[:, None]
        lower = p[:, None] * (1 - 0.35 / p_1k * (level - 51))
        e = _roex(np.where(g < 0, lower, p[:, None]), g) @ row
        assert_close(excitation, 10 * np.log10(np.maximum(e, 1e-10)), FORMULA)


def test_levels_between_channels_are_as_good_as_at_components() -> None:
    """Glasberg2002 interpolates the level per ERB; Moore2016 has it at every component."""
    spectrum = MultiResolutionFFT(FS, hop_length=1000, dtype=F64)
    noise = 0.02 * np.random.default_rng(0).standard_normal(4000)
    for x in (noise, _tone(1000.0, 80.0)):
        intensity = spectrum.intensities(spectrum.padded(torch.from_numpy(x)))
        bands = ERBIntegration(spectrum.frequencies, dtype=F64)
        coarse = ExcitationPattern(spectrum.frequencies, bands.fc_erb, dtype=F64)
        fine = Moore2016ExcitationPattern(spectrum.frequencies, dtype=F64)
        expected = fine(intensity)
        difference_db = coarse(intensity, bands(intensity)) - expected
        assert difference_db[expected > 0].abs().max() < 0.15


@pytest.mark.parametrize("stage", [Moore2016ExcitationPattern, ERBIntegration])
def test_one_component_gives_its_level_to_its_channel(stage: type) -> None:
    fc = cam_space(1.75, 39.0, 0.25)
    built = stage(torch.from_numpy(fc[60:61]), dtype=F64)
    got = built(torch.full((1, 1), 1e6, dtype=F64))[0]
    assert float(got[60]) == pytest.approx(60.0) and int(got.argmax()) == 60


def test_slopes_flatten_with_level_and_never_turn_around() -> None:
    stage = Moore2016ExcitationPattern(torch.tensor([1000.0]), dtype=F64)
    levels = torch.tensor([[20.0], [60.0], [100.0], [150.0], [200.0]], dtype=F64)
    e = stage(10 ** (levels / 10))
    above = stage.fc > 1000.0
    spread = e[:, above] - levels
    assert (spread.diff(dim=0) > -1e-9).all() and spread.max() < 1e-9


@pytest.mark.parametrize(
    ("stage", "c", "flat", "high"),
    [
        (Moore2016SpecificLoudness, 0.0631, 3.63, lambda e: (e / 1.0707) ** 0.2),
        (SpecificLoudness, 0.047, 3.73, lambda e: (e / 1.04e6) ** 0.5),
    ],
)
def test_specific_loudness_equals_the_formula_at_high_frequencies(
    stage: type, c: float, flat: float, high: Callable[[float], float]
) -> None:
    """Above 500 Hz: gain 0 dB, alpha 0.2, A 4.72096."""
    law = stage([1000.0], dtype=F64)
    t, alpha, a = 10 ** (flat / 10), 0.2, 4.72096
    for level in (-20.0, 0.0, flat, 10.0, 50.0, 99.0, 101.0, 140.0):
        e = 10 ** (level / 10)
        n = c * ((e + a) ** alpha - a**alpha)
        if level <= flat:
            n *= (2 * e / (e + t)) ** 1.5
        if level > 100:
            n = c * high(e)
        assert float(law(torch.tensor([level], dtype=F64))) == pytest.approx(n, rel=1e-9)


def test_specific_loudness_at_low_frequencies_needs_more_excitation() -> None:
    law = Moore2016SpecificLoudness([60.0, 100.0, 250.0, 1000.0], dtype=F64)
    assert law.threshold_db[1] == 15.68 and (law.threshold_db.diff() < 0).all()
    assert (law.A.diff() < 0).all() and (law.alpha.diff() < 0).all()
    assert (law(torch.full((4,), 20.0, dtype=F64)).diff() > 0).all()


def test_binaural_inhibition_equals_the_formula() -> None:
    generator = np.random.default_rng(0)
    left, right = generator.random((2, 4, 150))
    stage = Moore2016BinauralLoudness(dtype=F64)
    got = stage(torch.from_numpy(left), torch.from_numpy(right))
    kernel = np.exp(-((0.08 * np.arange(-18, 18.1, 0.25)) ** 2))
    kernel /= kernel.sum()
    for n in range(4):
        near, far = (np.convolve(x[n], kernel)[72:222] + 1e-13 for x in (left, right))
        for ear, x, ratio in ((0, left, far / near), (1, right, near / far)):
            inhibition = 2 / (1 + (1 / np.cosh(ratio)) ** 1.5978)
            assert float(got[ear][n]) == pytest.approx((x[n] / inhibition).sum() / 4, rel=1e-10)


def test_binaural_loudness_of_one_ear_of_both_and_of_exchanged_ears() -> None:
    stage = Moore2016BinauralLoudness(dtype=F64)
    x = torch.rand(3, 150, generator=torch.Generator().manual_seed(0), dtype=F64)
    silent = torch.zeros_like(x)
    assert_close(stage(x, silent)[0], x.sum(-1) / 4, KERNEL64)
    assert stage(x, silent)[1].abs().max() == 0
    assert_close(stage(x, x)[0], stage.total(stage.diotic(x)), KERNEL64)
    assert sum(stage(x, x))[0] == pytest.approx(1.5 * float(x[0].sum()) / 4, rel=1e-3)
    y = x.flip(-1)
    assert torch.equal(stage(x, y)[0], stage(y, x)[1])
    assert all(torch.isfinite(ear).all() for ear in stage(silent, silent))


def test_phon_inverts_its_table_and_holds_at_the_ends() -> None:
    table = PhonTable(torch.arange(0.0, 50.0, 10.0), torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0]))
    asked = torch.tensor([0.0, 1e-4, 1e-3, 10**-1.5, 1.0, 10.0, 1e4])
    expected = [0.0, 0.0, 0.0, 15.0, 30.0, 40.0, 40.0]
    assert table.phon(asked).tolist() == pytest.approx(expected, abs=1e-4)
    power = phon_by("power", table, torch.tensor([1.0, 2.0, 8.0]))
    assert power.tolist() == [40.0, 50.0, 70.0]
    assert torch.isfinite(phon_by("power", table, torch.zeros(1))).all()
    with pytest.raises(ParameterError, match="method must be"):
        phon_by("stevens", table, asked)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LoudnessEar(FS, "tf"), "compensation_type must be one of"),
        (lambda: LoudnessEar(FS, field_type="far"), "field_type must be one of"),
        (lambda: LoudnessEar(FS, order=5), "even number"),
        (
            lambda: Moore2016Spectrum(n_windows=7),
            "n_windows must be .* between 1 and 6",
        ),
        (lambda: Moore2016Spectrum(hop_length=0), "hop_length must be"),
        (lambda: MultiResolutionFFT(n_ffts=[64, 128]), "longest first"),
        (lambda: MultiResolutionFFT(n_ffts=[65]), "even window lengths"),
        (lambda: MultiResolutionFFT(fs=30), "no frequency above 20 Hz"),
        (lambda: Moore2016SpecificLoudness([1000.0], C=0.0), "C must be a finite number above 0"),
        (lambda: Moore2016BinauralLoudness(sigma=0.0), "sigma must be a finite number above 0"),
        (
            lambda: Moore2016ExcitationPattern(torch.ones(1), erb_step=0.0),
            "erb_step must be",
        ),
        (lambda: Moore2016ExcitationPattern(torch.ones(1), lower_slope_base=0), "above 0"),
        (lambda: ERBIntegration(torch.ones(1), bandwidth_scale=0), "bandwidth_scale"),
        (lambda: ExcitationPattern(torch.ones(1), [1e3, 2e3], upper_slope_per_db=1), "must be 0"),
        (lambda: ExcitationPattern(torch.ones(1), [1e3]), "2 channels or more"),
    ],
)
def test_impossible_stages_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build()


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ShapeError, match=r"\(batch, ear, time\)"):
        Moore2016Spectrum()(torch.zeros(2, 100))
    with pytest.raises(ShapeError, match="two ears of one shape"):
        Moore2016BinauralLoudness()(torch.zeros(1, 150), torch.zeros(2, 150))
    with pytest.raises(ShapeError, match="floating-point"):
        LoudnessEar(FS)(torch.zeros(10, dtype=torch.int16))
