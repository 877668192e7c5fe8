"""Paulick2024 against the stored reference arrays, and its new stages by a second route."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch

from amtcore import (
    AdaptLoop,
    DRNLFilterbank,
    IHCPaulick2024,
    ModulationFilterbank,
    Paulick2024,
    Resampler,
)
from amtcore.errors import ParameterError
from amtcore.models.paulick2024 import adaptation_min_level
from amtcore.scales import erb_space
from amtcore.stages.basilar_membrane import MODELS, SUBJECTS

from ..compare import FLOAT64, KERNEL64, Tolerance, assert_close
from .golden_files import DTYPES, load, names, stage_tolerance

FILES = names("paulick2024")
STAGES = {"outerear": "outerear", "drnl": "drnl", "ihc": "ihc", "ad": "adaptation",
          "resampled": "resampled"}  # fmt: skip
FS = 16000
DIRECT_FORM = Tolerance(1e-8, "scipy's direct forms")
SINGLE = Tolerance(1e-4, "float32 near the threshold of the adaptation")


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    golden = load(name)
    model = Paulick2024(float(golden["fs"]), return_stages=True, dtype=dtype)
    out, stages = model(torch.from_numpy(golden["input"].ravel()).to(dtype))
    wide = ModulationFilterbank(
        model.fs_resampled, model.fc.double(), preset="paulick2024", max_mfc=1000.0, dtype=dtype
    )
    return out, wide(stages["resampled"]), stages


CASES = [(name, key) for name in FILES for key in load(name) if "@" in key]


def test_files_are_there() -> None:
    assert len(FILES) == 4 and len(CASES) == 15 * len(FILES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{n[13:]}-{k}" for n, k in CASES])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden = load(name)
    out, wide, stages = _outputs(name, DTYPES[dtype])
    stage, _, step = key.partition("@")
    if stage.startswith("mod"):
        bank, channel = stage.split("_")
        output = (out if bank == "mod150" else wide)[int(channel)]
    else:
        output = stages[STAGES[stage]]
        if output.ndim == 2:
            output = output[golden["sel"].ravel().astype(int)]
    got = np.moveaxis(output.double().numpy(), -1, 0)[:: int(step)]
    expected = golden[key].reshape(got.shape)
    assert_close(got, expected, stage_tolerance(key, dtype), f"{name} {key} {dtype}")


@pytest.mark.parametrize("name", FILES)
def test_stored_frequencies_and_thresholds(name: str) -> None:
    golden = load(name)
    fc_hz = erb_space(125.0, 8000.0, 50)
    np.testing.assert_allclose(fc_hz, golden["fc"].ravel(), rtol=1e-12)
    np.testing.assert_allclose(adaptation_min_level(fc_hz.tolist()), golden["minlvl"].ravel())


# --- dual-resonance filters ---


def _noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _gammatone(x: np.ndarray, f_hz: float, bw_hz: float, order: int) -> np.ndarray:
    theta, phi = 2 * math.pi * f_hz / FS, 2 * math.pi * bw_hz / FS
    pole, turn = np.exp(-phi - 1j * theta), np.exp(-1j * theta)
    zero = -np.exp(-phi) * math.cos(theta)
    a0 = abs(1 + 2 * zero * turn + (np.exp(-phi) * turn) ** 2) / abs(1 + zero * turn)
    b = a0**order * np.poly([pole.real] * order)
    return scipy.signal.lfilter(b, np.poly([pole, pole.conj()] * order).real, x)


def _low_pass(x: np.ndarray, f_hz: float, times: int) -> np.ndarray:
    for _ in range(times):
        x = scipy.signal.sosfilt(scipy.signal.butter(2, f_hz, fs=FS, output="sos"), x)
    return x


def _drnl(x: np.ndarray, cf: float, model: str, subject: str) -> np.ndarray:
    """One channel as the specification writes it, with scipy's filters."""
    order, low_passes = (2, 1) if model == "paulick2024" else (3, 3)
    log_cf, shared = math.log10(cf), math.log10(cf if cf <= 1000 else 1500.0)
    linear = _gammatone(
        10 ** (4.20405 - 0.47909 * log_cf) * x,
        10 ** (-0.06762 + 1.01679 * log_cf), 10 ** (0.03728 + 0.75 * log_cf), order,
    )  # fmt: skip
    linear = _low_pass(linear, 10 ** (-0.06762 + 1.01 * log_cf), 4)
    centre, width = 10 ** (-0.05252 + 1.0165 * log_cf), 10 ** (-0.03193 + 0.77 * log_cf)
    y = _gammatone(x, centre, width, order)
    a, b, c = 10 ** (1.40298 + 0.81916 * shared), 10 ** (1.61912 - 0.81867 * shared), 10**-0.60206
    if subject == "HIx":
        a, b, c = 0.0, 10 ** (1.61912 - 0.81867 * log_cf), 0.25
    y = np.sign(y) * np.minimum(a * np.abs(y), b * np.abs(y) ** c)
    return linear + _low_pass(_gammatone(y, centre, width, order), centre, low_passes)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("model", MODELS)
def test_drnl_is_the_published_circuit(model: str, subject: str) -> None:
    fc_hz = [250.0, 1000.0, 3000.0]
    x = _noise(1200, scale=1e-5)
    bank = DRNLFilterbank(fc_hz, FS, model, subject, dtype=torch.float64)
    expected = np.stack([_drnl(x.numpy(), cf, model, subject) for cf in fc_hz])
    assert_close(bank(x), expected, DIRECT_FORM)


def _drnl_at_1_khz(**constants: float) -> DRNLFilterbank:
    bank = DRNLFilterbank([1000.0], FS, dtype=torch.float64)
    for name, value in constants.items():
        getattr(bank, name).fill_(value)
    return bank


def _growth_db_per_db(bank: DRNLFilterbank, velocity_db: float) -> float:
    """Growth of the steady output at 1 kHz around a velocity in dB re 1 m/s."""
    t = torch.arange(4000, dtype=torch.float64) / FS
    tone = torch.sin(2 * math.pi * 1000 * t)
    peaks = [bank(10 ** (db / 20) * tone)[0, 2000:].abs().max() for db in (velocity_db - 1,
             velocity_db + 1)]  # fmt: skip
    return float(20 * torch.log10(peaks[1] / peaks[0])) / 2


def test_drnl_is_linear_then_compressive_then_linear() -> None:
    """The knee is where a v = b v^c, at -125 dB for 1 kHz; at about -95 dB, and not far above the
    knee, the linear path is as loud as the compressive one, so the sum never gets to c dB per dB.
    """
    both, compressive = _drnl_at_1_khz(), _drnl_at_1_khz(lin_gain=0.0)
    a, b, c = (float(getattr(both, name)) for name in "abc")
    knee_db = 20 * math.log10(b / a) / (1 - c)
    assert knee_db == pytest.approx(-125.3, abs=0.1)
    for bank in (both, compressive):
        assert _growth_db_per_db(bank, knee_db - 10) == pytest.approx(1.0, abs=1e-3)
    for velocity_db in (knee_db + 25, -60.0, -30.0):
        growth = _growth_db_per_db(compressive, velocity_db)
        assert growth == pytest.approx(c, abs=1e-3) and c == pytest.approx(0.25, abs=1e-4)
    assert c < _growth_db_per_db(both, knee_db + 20) < 0.3
    assert _growth_db_per_db(both, -30.0) > 0.99


def test_drnl_is_the_sum_of_its_paths() -> None:
    x = _noise(500, scale=1e-5)
    linear, compressive = _drnl_at_1_khz(a=0.0, b=0.0), _drnl_at_1_khz(lin_gain=0.0)
    assert_close(_drnl_at_1_khz()(x), linear(x) + compressive(x), KERNEL64)
    assert_close(linear(100 * x), 100 * linear(x), KERNEL64)
    assert linear(x).norm() > 0.1 * compressive(x).norm() > 0


def test_impaired_cochlea_is_linear() -> None:
    bank = DRNLFilterbank([500.0, 4000.0], FS, subject="HIx", dtype=torch.float64)
    x = _noise(500, scale=1e-6)
    assert_close(bank(1000 * x), 1000 * bank(x), KERNEL64)


@pytest.mark.parametrize("model", MODELS)
def test_one_pass_is_the_single_operators_bit_for_bit(model: str) -> None:
    bank = DRNLFilterbank([300.0, 900.0, 2500.0], FS, model)
    x = _noise(2, 400, scale=1e-5).float()
    fused = bank(x)
    apart = bank(x.clone().requires_grad_())
    assert apart.requires_grad and torch.equal(fused, apart.detach())


# --- hair cell ---


def _membrane(v: np.ndarray, fs: float) -> np.ndarray:
    """Forward Euler on the potential itself, as the specification writes it."""
    d = 10 ** (-105 / 20) * v
    opened = 30e-9 / (
        1 + np.exp((20e-9 - d) / 35e-9) * (1 + np.exp(np.minimum((20e-9 - d) / 16e-9, 700)))
    )
    step = 1 / (fs * 12.5e-12)

    def change(potential: np.ndarray, conductance: np.ndarray) -> np.ndarray:
        leak = 19.8e-9 * (potential + 71e-3) + 19.8e-9 * (potential + 78e-3)
        return -step * (conductance * (potential - 90e-3) + leak)

    rest = np.array(-57.03e-3)
    for _ in range(round(0.05 * fs)):
        rest = rest + change(rest, np.array(3.3514e-9))
    potential, samples = np.full(v.shape[:-1], rest), []
    for conductance in np.moveaxis(opened, -1, 0):
        potential = potential + change(potential, conductance)
        samples.append(potential - rest)
    return np.stack(samples, -1)


@pytest.mark.parametrize("fs", [FS, 44100])
@pytest.mark.parametrize("scale", [1e-5, 3e-3, 0.3])
def test_membrane_is_forward_euler_on_the_potential(scale: float, fs: int) -> None:
    v = _noise(2, 3, 400, scale=scale)
    expected = _membrane(v.numpy(), fs)
    assert_close(IHCPaulick2024(fs, dtype=torch.float64)(v), expected, DIRECT_FORM)
    assert_close(IHCPaulick2024(fs)(v.float()), expected, SINGLE)


def test_membrane_rests_in_silence_and_stays_in_its_range() -> None:
    cell = IHCPaulick2024(44100)
    assert torch.equal(cell(vel=torch.ones(1, 1, 3)), cell(torch.ones(1, 1, 3)))
    assert cell(torch.zeros(1, 2, 4000)).abs().max() < 1e-6
    loud = torch.tensor([[1e6, -1e6, 1e30, -1e30]]).repeat_interleave(500, -1)
    potential = cell(loud)
    assert torch.isfinite(potential).all()
    assert -12.9e-3 < float(potential.min()) < -12.7e-3
    assert 58.0e-3 < float(potential.max()) < 58.1e-3


def test_membrane_depolarises_more_than_it_hyperpolarises() -> None:
    tone = torch.sin(torch.arange(4000, dtype=torch.float64) * 0.3)
    potential = IHCPaulick2024(FS, dtype=torch.float64)((3e-3 * tone).view(1, 1, -1))
    assert float(potential.max()) > -2 * float(potential.min())


# --- the chain ---


def test_jepsen2008_chain() -> None:
    """Rectifier with a 1 kHz low-pass, 50 dB, a square, and the loops of 1997."""
    x = _noise(1, 1600, scale=0.02)
    model = Paulick2024(
        FS, 200.0, 6000.0, 4, model="jepsen2008", return_stages=True, dtype=torch.float64
    )
    out, stages = model(x)
    assert model.drnl.model == "jepsen2008"
    b, a = scipy.signal.butter(2, 1000.0, fs=FS)
    envelope = scipy.signal.lfilter(b, a, np.maximum(stages["drnl"].numpy(), 0))
    squared = (10**2.5 * envelope) ** 2
    assert_close(stages["ihc"], squared, FLOAT64)
    loops = AdaptLoop(FS, preset="dau1997", min_level=1e-5, dtype=torch.float64)
    adapted = loops(torch.from_numpy(squared))
    assert_close(stages["adaptation"], adapted, FLOAT64)
    lower = scipy.signal.resample_poly(adapted.numpy(), 1, 4, axis=-1)[..., :400]
    assert_close(stages["resampled"], lower, FLOAT64)
    bank = ModulationFilterbank(FS / 4, model.fc, preset="jepsen2008", dtype=torch.float64)
    assert_close(torch.cat(out, 1), torch.cat(bank(torch.from_numpy(lower)), 1), FLOAT64)


def test_every_channel_has_its_own_threshold() -> None:
    """A velocity that a channel's threshold hides leaves its adaptation at rest."""
    model = Paulick2024(FS, 200.0, 6000.0, 4, return_stages=True, dtype=torch.float64)
    _, stages = model(torch.zeros(1, 800))
    assert stages["adaptation"].abs().max() < 1e-6
    assert len(set(model.adaptation.min_level.tolist())) == 4


def test_without_ears_the_input_is_stapes_velocity() -> None:
    x = _noise(2, 900, scale=0.02).float()
    model = Paulick2024(FS, 200.0, 6000.0, 4, return_stages=True)
    bare = Paulick2024(FS, 200.0, 6000.0, 4, use_outerear=False)
    out, stages = model(x)
    assert bare.outer_middle_ear is None
    assert torch.equal(torch.cat(bare(stages["outerear"]), 1), torch.cat(out, 1))
    assert torch.equal(model.outer_middle_ear(x), stages["outerear"])


def test_arguments_reach_their_stages() -> None:
    model = Paulick2024(
        FS,
        flow=200.0,
        fhigh=2000.0,
        n_channels=6,
        filter_type="butterworth",
        outerear_kwargs={"order": 128, "filter_type": "jepsen2008"},
        drnl_kwargs={"subject": "HIx"},
        adaptation_kwargs={"preset": "dau1997"},
        modulation_kwargs={"max_mfc": 60.0},
    )
    assert model.outer_middle_ear.headphone.order == 128
    assert model.outer_middle_ear.middleear.filter_type == "jepsen2008"
    assert model.drnl.subject == "HIx" and model.modulation.filter_type == "butterworth"
    assert max(float(mfc[-1]) for mfc in model.modulation.mfc) <= 60.0
    assert float(model.adaptation.tau[0]) == pytest.approx(0.005)
    assert model.num_channels == model.n_channels == 6
    assert (float(model.fc[0]), float(model.fc[-1])) == (200.0, 2000.0)
    assert model.resample_factor == 4 and model.fs_resampled == 4000.0
    assert "model=paulick2024" in repr(model)


@pytest.mark.parametrize("samples", [0, 3, 4, 40, 41, 443])
def test_decimation_keeps_the_first_quarter_of_the_samples(samples: int) -> None:
    x = _noise(2, samples)
    got = Resampler(FS, FS / 4, dtype=torch.float64)(x)
    assert got.shape == (2, samples // 4)
    if samples:
        expected = scipy.signal.resample_poly(x.numpy(), 1, 4, axis=-1)[:, : samples // 4]
        assert_close(got, expected, Tolerance(1e-12, "two orders of summation", 1e-15))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Paulick2024(16400.0), "the highest filter's frequency"),
        (lambda: Paulick2024(model="dau1997"), "model must be one of"),
        (lambda: DRNLFilterbank([100.0], FS, subject="HI1"), "subject must be one of"),
        (lambda: DRNLFilterbank([100.0], FS, model="casp"), "model must be one of"),
        (lambda: DRNLFilterbank([], FS), "non-empty"),
        (lambda: IHCPaulick2024(5000), "above 5568 Hz"),
        (lambda: Resampler(FS, 8000.123), "rounder rate"),
        (lambda: Resampler(16000, 24000).block_ops(2), "by whole factors"),
    ],
)
def test_bad_arguments(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        build()
