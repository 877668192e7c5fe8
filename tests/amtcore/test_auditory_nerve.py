"""AuditoryNerve against the stored reference arrays, closed forms and its own other routes."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import scipy.signal
import scipy.special
import torch

from amtcore import AuditoryNerve
from amtcore.errors import ParameterError, ShapeError
from amtcore.models.auditory_nerve import FIBRES, gammatone_taps, lowpass_taps
from amtcore.models.nerve_rates import FAINTEST_PA, fibre_rates
from amtcore.scales import erb_space
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = [name for name in names("anm") if not name.endswith("design")]
STAGES = {"subbands": "subbands", "lowpass": "ihc", "envelope": "envelope", "rates": "rates"}
EXACT = Tolerance(1e-9, "float64 transforms in another order", 1e-12)
SINGLE = Tolerance(1e-5, "float32 transforms", 1e-9)
SINGLE_RATES = Tolerance(1e-4, "float32 transforms, levels near the threshold", 1e-6)
DESIGN = Tolerance(1e-10, "float64 recursions in another order", 1e-12)


def _keys(name: str) -> list[str]:
    stored = (key.partition("@")[0] for key in load(name) if "@" in key)
    return [key for key in stored if key.partition("_ear")[0] in STAGES]


CASES = [(name, key) for name in FILES for key in _keys(name)]


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """(frame, ear, .., cf) of every stream but the spikes."""
    golden = load(name)
    signal = torch.from_numpy(golden["input"].T)
    ears = signal.shape[0] if signal.ndim > 1 else 1
    model = AuditoryNerve(
        golden["fs"].item(), golden["fs_out"].item(), golden["param_min_cf"].item(),
        golden["param_max_cf"].item(), golden["param_num_cf"].item(),
        golden["param_cutoff"].item(), n_ears=ears, dtype=dtype,
        envelope_mode=golden["param_envelope_mode"].item(),
    )  # fmt: skip
    found = model.outputs(signal, ("rates", "envelope", "ihc", "subbands"))
    return {
        key: each.double().numpy().reshape(len(each), ears, -1, model.num_cf)
        for key, each in found.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden = load(name)
    stage, _, ear = key.partition("_ear")
    got = _outputs(name, DTYPES[dtype])[STAGES[stage]][:, int(ear or 0)]
    stored = next(k for k in golden if k.partition("@")[0] == key)
    every = int(stored.partition("@")[2])
    tolerance = SINGLE if stage != "rates" else SINGLE_RATES
    tolerance = EXACT if dtype == "float64" else tolerance
    picked = got[::every][..., golden["sel"]].transpose(1, 0, 2)
    expected = golden[stored]
    assert_close(picked if stage == "rates" else picked[0], expected, tolerance, f"{name} {key}")
    if stage == "rates":
        assert_close(got.mean(0), golden[f"{key}_mean"], tolerance, f"{name} {key} mean")
    else:
        rms = np.sqrt(np.square(got[:, 0]).mean(0))
        assert_close(rms, golden[f"{key}_rms"], tolerance, f"{name} {key} rms")
    assert stage == "subbands" or len(got) == golden["n_out"]


@pytest.mark.parametrize(("fs", "max_cf"), [(20000, 8000), (50000, 16000)])
def test_stored_gammatone_filters(fs: int, max_cf: float) -> None:
    golden = load("anm__design")
    cf_hz = erb_space(60.0, max_cf, 50)
    np.testing.assert_allclose(cf_hz, golden[f"cfs_{fs}"], rtol=1e-12)
    taps, stored = gammatone_taps(cf_hz, fs), golden[f"gammatone_fir_{fs}"]
    assert taps.shape[1] == golden[f"gammatone_ntaps_{fs}"]
    assert_close(taps[golden["sel"], : stored.shape[1]], stored, DESIGN, "gammatone")
    assert_close(np.linalg.norm(taps, axis=1), golden[f"gammatone_norm_{fs}"], DESIGN, "norm")


@pytest.mark.parametrize(
    ("fs", "limit_hz"),
    [*((20000, fc) for fc in (50, 320, 1000, 3000)), (50000, 3000), (16000, 3000), (44100, 1000)],
)
def test_stored_lowpass(fs: int, limit_hz: int) -> None:
    golden = load("anm__design")
    taps, stored = lowpass_taps(limit_hz, fs), golden[f"lowpass_fir_{fs}_{limit_hz}"]
    assert len(taps) == golden[f"lowpass_ntaps_{fs}"]
    assert_close(taps[: len(stored)], stored, DESIGN, f"{fs} {limit_hz}")


@pytest.mark.parametrize(
    ("fs", "limit_hz", "half_power_hz"),
    [(20000, 50, 31.1), (20000, 320, 182.4), (20000, 1000, 594.0), (20000, 3000, 3785.9),
     (50000, 50, 31.3), (50000, 320, 181.8), (50000, 1000, 570.5), (50000, 3000, 1821.1)],
)  # fmt: skip
def test_measured_half_power_points(fs: int, limit_hz: int, half_power_hz: float) -> None:
    _, gain = scipy.signal.freqz(lowpass_taps(limit_hz, fs), worN=[half_power_hz], fs=fs)
    assert abs(20 * math.log10(abs(gain[0])) + 10 * math.log10(2)) < 0.05


class TestConformance(ModelConformance):
    model = "auditory_nerve"
    params = {"num_cf": 4}  # noqa: RUF012
    other_params = {"num_cf": 4, "seed": 1}  # noqa: RUF012


class TestStreamConformance(ModelConformance):
    """Several blocks, chunk by chunk, two ears."""

    model = "auditory_nerve"
    params = {"num_cf": 3, "envelope_mode": False, "n_ears": 1}  # noqa: RUF012
    other_params = {"num_cf": 3, "phase_locking_limit": 320.0}  # noqa: RUF012
    seconds = 0.5


class TestOnePoleConformance(ModelConformance):
    model = "auditory_nerve"
    params = {"num_cf": 3, "envelope_mode": False, "lowpass": "onepole",  # noqa: RUF012
              "spikes": "exact", "fs_out": 8000.0, "max_cf": 7000.0}  # fmt: skip
    other_params = {"num_cf": 3, "compression": 0.5, "fs_out": 8000.0, "max_cf": 7000.0}  # noqa: RUF012
    fs_hz = 16000.0
    seconds = 0.4


SMALL: dict[str, Any] = {"num_cf": 5, "dtype": torch.float64}


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_subbands_and_lowpass_are_plain_convolutions() -> None:
    model, signal = AuditoryNerve(**SMALL, envelope_mode=False), _noise(7001)
    made = model.outputs(signal, ("subbands", "ihc"))
    taps, low = gammatone_taps(model.fc.numpy(), 20000.0), lowpass_taps(3000.0, 20000.0)
    for channel in range(5):
        subband = np.convolve(signal, taps[channel])[:7001]
        assert_close(made["subbands"][:, channel], subband, EXACT, "subband")
        slow = np.convolve(np.maximum(subband, 0), low)[:7001:2]
        assert_close(made["ihc"][:, channel], slow, EXACT, "low-pass")


def test_one_pole_filters_are_7_times_3_db_down_at_their_corner() -> None:
    model = AuditoryNerve(**SMALL, lowpass="onepole", phase_locking_limit=1000.0)
    gain: Any = 1.0
    for each in model.one_poles:
        impulse = torch.zeros(1, 1, 4000, dtype=torch.float64)
        impulse[..., 0] = 1.0
        z = torch.exp(-2j * math.pi * 1000.0 / 20000.0 * torch.arange(4000, dtype=torch.float64))
        gain = gain * complex((each(impulse)[0, 0] * z).sum())
    assert abs(20 * math.log10(abs(gain)) + 70 * math.log10(2)) < 1e-9


def test_one_pole_lowpass_is_the_recursion() -> None:
    options = {**SMALL, "envelope_mode": False, "phase_locking_limit": 500.0}
    made = AuditoryNerve(**options, lowpass="onepole").outputs(_noise(5000), ("ihc", "subbands"))
    w = math.tan(math.pi * 500 / 20000)
    slow = np.maximum(made["subbands"].numpy(), 0)
    for _ in range(7):
        slow = scipy.signal.lfilter([w, w], [1 + w, w - 1], slow, axis=0)
    assert_close(made["ihc"], slow[::2], EXACT, "one-pole")


def _sigmoid(p: np.ndarray, threshold: float, dynamic_range: float) -> np.ndarray:
    level = 20 * np.log10(np.maximum(p, 1e-300) / 20e-6)
    k = math.log(1 / 0.025 - 1) / (dynamic_range / 2)
    return np.asarray(scipy.special.expit(k * (level - threshold - dynamic_range / 2)))


@pytest.mark.parametrize("envelope_mode", [True, False])
@pytest.mark.parametrize("samples", [3001, 3002])  # an odd number of frames, too
def test_rates_follow_the_level(envelope_mode: bool, samples: int) -> None:
    spont, most = (60.0, 10.0, 0.5), (250.0, 200.0, 150.0)
    model = AuditoryNerve(**SMALL, envelope_mode=envelope_mode, rate_spont=spont, rate_max=most)
    made = {k: v.numpy() for k, v in model.outputs(_noise(samples)).items()}
    x, p = made["ihc"], made["envelope"]
    if envelope_mode:
        np.testing.assert_allclose(p, np.abs(scipy.signal.hilbert(x, axis=0)), rtol=1e-9)
    else:
        np.testing.assert_array_equal(p, np.maximum(x, 0))
    for kind, (r0, r1) in enumerate(zip(spont, most, strict=True)):
        sigma = _sigmoid(p, (0, 12, 28)[kind], (20, 40, 80)[kind]) * (x / p if envelope_mode else 1)
        rates = made["rates"].reshape(-1, 3, 5)[:, kind]
        np.testing.assert_allclose(rates, r0 + (r1 - r0) * sigma, rtol=1e-9, atol=1e-9)


def test_power_law_changes_pressure_and_thresholds() -> None:
    options = {**SMALL, "envelope_mode": False}
    model = AuditoryNerve(**options, power_law=[0.3, 0.4, 0.5, 0.6, 0.7], power_law_default=0.4)
    fixed = AuditoryNerve(**options, power_law=0.3, power_law_default=None)
    for each, e, d in ((model, np.linspace(0.3, 0.7, 5), 0.4), (fixed, 0.3, None)):
        made = {k: v.numpy() for k, v in each.outputs(_noise(3000)).items()}
        rates = made["rates"].reshape(-1, 3, 5)
        for kind in range(3):
            threshold, width = float((0, 12, 28)[kind]), float((20, 40, 80)[kind])
            if d is not None:
                threshold = threshold * d + 20 * math.log10(20e-6 ** (d - 1))
                width *= d
            sigma = _sigmoid(made["envelope"] ** e, threshold, width)
            heard = made["envelope"] > FAINTEST_PA
            np.testing.assert_allclose(rates[:, kind][heard], 250 * sigma[heard], atol=1e-8)


def test_compression_is_a_broken_stick() -> None:
    options = {**SMALL, "envelope_mode": False}
    low_db, high_db, c = 20.0, 60.0, torch.linspace(0.2, 0.6, 5, dtype=torch.float64)
    model = AuditoryNerve(**options, compression=c.tolist(), compression_db_min=low_db,
                          compression_db_max=high_db)  # fmt: skip
    x = torch.logspace(-6, 0, 50, dtype=torch.float64) * torch.ones(5, 1)
    low, high = (20e-6 * 10 ** (db / 20) for db in (low_db, high_db))
    e = c[:, None]
    expected = torch.where(x < low, x * low ** (e - 1), torch.where(x < high, x**e, x))
    torch.testing.assert_close(model._transduced(x[None])[0], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model._transduced(-x[None])[0], 0 * x, rtol=0, atol=0)
    plain = AuditoryNerve(**options, compression=0.5)
    torch.testing.assert_close(plain._transduced(x[None])[0], x**0.5, rtol=1e-12, atol=0)


@pytest.mark.parametrize("envelope_mode", [True, False])
@pytest.mark.parametrize("frames", [1, 127, 128, 300])
def test_the_kernel_has_the_rates_of_the_plain_form(envelope_mode: bool, frames: int) -> None:
    model = AuditoryNerve(
        num_cf=5, rate_spont=(60.0, 10.0, 0.5), power_law=[1.0, 0.9, 0.8, 0.7, 0.6]
    )
    x = (torch.logspace(-36, 2, frames) * _noise(2, 5, frames).sign().float()).contiguous()
    x[..., ::7] = 0.0
    y = x.roll(1, -1) if envelope_mode else None
    found = fibre_rates(x, y, model.law, model.power_law)
    wanted = fibre_rates(x.clone().requires_grad_(), y, model.law, model.power_law)
    assert wanted.requires_grad and not found.requires_grad
    np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-4)


def _spikes(model: AuditoryNerve, draws: int) -> torch.Tensor:
    """(draw, fibre, cf, frame) of the stored rates."""
    rates = torch.from_numpy(load("anm__tone1k_60_20000_3000")["spike_rates"])
    columns = rates.flatten(0, 1).T[None]
    counts = torch.stack([model._spikes(columns, draw)[0] for draw in range(draws)])
    return counts.mT.unflatten(1, rates.shape[:2])


@pytest.mark.parametrize(("spikes", "draws"), [("approx", 600), ("exact", 600)])
def test_spike_counts_have_the_stated_distribution(spikes: str, draws: int) -> None:
    golden = load("anm__tone1k_60_20000_3000")
    model = AuditoryNerve(**SMALL, spikes=spikes, seed=3)
    counts = _spikes(model, draws)
    n, share = np.array([384.0, 160.0, 96.0])[:, None, None], golden["spike_rates"] / 10000
    mean, variance = n * share, n * share * (1 - share)
    if spikes == "approx":
        k = np.arange(1, 80)[:, None, None, None]
        spread = np.maximum(np.sqrt(variance), 1e-12)
        cdf = scipy.special.ndtr
        chance = cdf((k + 0.5 - mean) / spread) - cdf((k - 0.5 - mean) / spread)
        mean, square = (chance * k).sum(0), (chance * k**2).sum(0)
        variance = square - mean**2
    shown = draws * mean >= 1
    z = (counts.mean(0).numpy() - mean)[shown] / np.sqrt(variance[shown] / draws)
    assert 0.8 < np.sqrt(np.square(z).mean()) < 1.2 and np.abs(z).max() < 5
    total = counts.var(0, correction=0).numpy()[shown].sum() / variance[shown].sum()
    assert abs(total - 1) < 0.05
    stored, several = golden[f"spike_{spikes}_mean"], golden[f"spike_{spikes}_draws"].item()
    shown &= several * mean >= 1
    both = np.sqrt(variance[shown] * (1 / draws + 1 / several))
    assert np.abs((counts.mean(0).numpy() - stored)[shown] / both).max() < 5


def test_spikes_depend_on_the_seed_alone() -> None:
    model, signals = AuditoryNerve(**SMALL), _noise(3, 2000)
    together = model.outputs(signals, ("spikes",))["spikes"]
    for row, signal in zip(together, signals, strict=True):
        torch.testing.assert_close(row, model.outputs(signal, ("spikes",))["spikes"])
    other = AuditoryNerve(**SMALL, seed=1).outputs(signals, ("spikes",))["spikes"]
    assert (other != together).any() and (together == together.round()).all()
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    model.outputs(signals)
    assert torch.rand(1) == before


def test_two_ears_are_two_signals() -> None:
    left_right = _noise(2, 3000)
    both = AuditoryNerve(**SMALL, n_ears=2)
    made, one = both.outputs(left_right), AuditoryNerve(**SMALL)
    assert len(both.grids["rates"].columns) == both.grids["rates"].width == 30
    for ear, signal in enumerate(left_right):
        for name, frames in one.outputs(signal, ("rates", "ihc", "subbands")).items():
            found = made[name].reshape(len(frames), 2, -1)[:, ear]
            assert_close(found, frames, EXACT, name)
    spikes = made["spikes"].reshape(-1, 2, 15)
    assert (spikes[:, 0] != spikes[:, 1]).any()
    batch = both.outputs(left_right.expand(4, 2, 3000), ("rates",))["rates"]
    assert batch.shape == (4, 1500, 30)
    with pytest.raises(ShapeError, match=r"expected a signal \(.., 2, time\)"):
        both.outputs(left_right[0])


def test_silence_and_levels_to_140_db() -> None:
    for mode in (True, False):
        model = AuditoryNerve(num_cf=5, envelope_mode=mode)
        assert (model.outputs(torch.zeros(2000), ("rates",))["rates"] == 0).all()
        for gain in (1e-12, 1e4):
            rates = model.outputs(gain * _noise(2000), ("rates",))["rates"]
            assert torch.isfinite(rates).all() and (rates <= 250.01).all()
        assert model.outputs(torch.zeros(0))["rates"].shape == (0, 15)
        assert model.outputs(torch.zeros(0, 100))["rates"].shape == (0, 50, 15)


@pytest.mark.parametrize(
    "options", [{}, {"envelope_mode": False, "compression": 0.6, "compression_db_min": 40.0}]
)
def test_gradient(options: dict[str, Any]) -> None:
    """Finite differences; thresholds are low, and no frame lies before the first sound."""
    model = AuditoryNerve(8000, 4000, max_cf=3000, num_cf=2, phase_locking_limit=500.0,
                          dtype=torch.float64, threshold=(0.0, 12.0, 60.0), **options)  # fmt: skip
    signal = (0.02 + 0.2 * _noise(40)).requires_grad_()
    wanted = ("rates", "envelope", "ihc", "subbands")
    assert torch.autograd.gradcheck(
        lambda x: tuple(model.outputs(x, wanted).values()), (signal,), atol=1e-4, eps=1e-8,
        fast_mode=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fs": 44100.0}, "fs a whole multiple of fs_out"),
        ({"max_cf": 10000.0}, "max_cf and phase_locking_limit below fs/2"),
        ({"min_cf": 9000.0}, "min_cf < max_cf"),
        ({"rate_spont": (300.0, 0.0, 0.0)}, "rate_spont <= rate_max"),
        ({"threshold": (1.0, 2.0)}, "3 values"),
        ({"rate_max": (20000.0,) * 3}, "rate_max must be at most fs_out"),
        ({"compression": [0.3, 0.4]}, "expected 1 or 50 values of compression, got 2"),
        ({"lowpass": "fir"}, "lowpass must be one of phaselocknet, onepole"),
        ({"n_ears": 3}, "n_ears must be a whole number between 1 and 2"),
    ],
)
def test_refused_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        AuditoryNerve(**options)


def test_spikes_of_a_lowpass_with_negative_values_are_refused() -> None:
    model = AuditoryNerve(16000, 8000, max_cf=7000, num_cf=5)
    assert (model.outputs(_noise(2000), ("rates",))["rates"] < 0).any()
    with pytest.raises(ParameterError, match="above it the program's low-pass has negative rates"):
        model.outputs(_noise(2000), ("spikes",))
    assert len(FIBRES) == 3
