"""Modulation spectra against stored periodograms, closed forms, and the power of noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor

from amtcore import AuditoryModulationSpectrum, AuditorySpectrogram, ModulationSpectrum
from amtcore.errors import ParameterError, ShapeError
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = names("modspectrum")
TOLERANCES = {
    "float64": Tolerance(1e-9, "other order of sums"),
    "float32": Tolerance(1e-5, "single-precision transforms"),
}
CASES = [(name, key) for name in FILES for key in ("energy", "mean")]
CENTRES_HZ = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
EDGES_HZ = [0.3535533906, 0.7071067812, 1.414213562, 2.828427125, 5.656854249, 11.3137085,
            22.627417, 45.254834, 90.50966799, 181.019336]  # fmt: skip


def _model(name: str, dtype: str) -> ModulationSpectrum:
    golden = load(name)
    keys = ("fe_hz", "win_s", "hop_s", "f_min_hz", "f_max_hz", "bands_per_octave", "relative")
    return ModulationSpectrum(*(golden[key].item() for key in keys), dtype=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden = load(name)
    got, wanted = _model(name, dtype)(torch.from_numpy(golden["envelope"]))[key], golden[key]
    if key == "energy":
        np.testing.assert_array_equal(got.isnan(), np.isnan(wanted))
        got, wanted = got[..., golden["valid"]], wanted[..., golden["valid"]]
    assert_close(got, wanted, TOLERANCES[dtype], f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_stored_bands(name: str) -> None:
    golden, model = load(name), _model(name, "float64")
    for key, got in (
        ("fc_hz", model.fc),
        ("lower_hz", model.lower_hz),
        ("upper_hz", model.upper_hz),
    ):
        np.testing.assert_allclose(got, golden[key], rtol=1e-12)
    found = model(torch.from_numpy(golden["envelope"]))
    np.testing.assert_array_equal(found["valid"], golden["valid"])


def test_default_bands_are_octaves() -> None:
    model = ModulationSpectrum(512)
    np.testing.assert_allclose(model.fc, CENTRES_HZ, rtol=1e-9)
    np.testing.assert_allclose([*model.lower_hz, model.upper_hz[-1]], EDGES_HZ, rtol=1e-9)


def test_sinusoidal_modulations_have_the_energy_of_their_depth() -> None:
    golden = load("modspectrum__amtones_400")
    energy = _model("modspectrum__amtones_400", "float64")(torch.from_numpy(golden["envelope"]))
    wanted = np.broadcast_to(golden["expected_energy"], energy["energy"].shape)
    np.testing.assert_allclose(energy["energy"], wanted, atol=1e-10)


def test_modulated_noise_has_the_energy_of_its_density() -> None:
    golden = load("modspectrum__amnoise_512")
    found = _model("modspectrum__amnoise_512", "float64")(torch.from_numpy(golden["envelope"]))
    ratio = found["energy"].mean((0, 1)).numpy() / golden["expected_energy"] - 1
    bound = np.where(golden["fc_hz"] > 12, 0.05, 0.3)
    assert (np.abs(ratio) < bound).all()


def _tone(depth: float, f_hz: float, fs: float = 200.0, seconds: float = 6.0) -> Tensor:
    t = torch.arange(round(fs * seconds), dtype=torch.float64) / fs
    return (1 + depth * torch.cos(2 * math.pi * f_hz * t + 0.3))[None]


@pytest.mark.parametrize("f_hz", [2.0, 4.0, 16.0])
def test_depth_of_a_sinusoid(f_hz: float) -> None:
    model = ModulationSpectrum(200, dtype=torch.float64)
    found = model(7.0 * _tone(0.4, f_hz), depth=True)
    band = int((model.fc == f_hz).nonzero())
    # A sixth of a line lies in each neighbour bin, and the band holds all three bins.
    np.testing.assert_allclose(found["depth"][:, 0, band], 0.4, rtol=1e-9)
    others = found["energy"][:, 0][:, found["valid"]].sum(-1) - 0.4**2 / 2
    np.testing.assert_allclose(others, 0.0, atol=1e-12)
    absolute = ModulationSpectrum(200, relative=False, dtype=torch.float64)(7.0 * _tone(0.4, f_hz))
    np.testing.assert_allclose(absolute["energy"][:, 0, band], 49 * 0.08, rtol=1e-9)
    np.testing.assert_allclose(absolute["mean"], 7.0, rtol=1e-12)


def test_sum_of_bands_is_the_periodogram_of_scipy() -> None:
    noise = np.random.default_rng(0).standard_normal((3, 500)) + 2.0
    model = ModulationSpectrum(
        100, win_s=None, f_min=1.0, f_max=16.0, relative=False, dtype=torch.float64
    )
    found = model(torch.from_numpy(noise))
    hann = scipy.signal.get_window("hann", 500)
    centred = noise - ((noise * hann).sum(-1) / hann.sum())[:, None]
    f_hz, density = scipy.signal.periodogram(centred, 100, "hann", detrend=False)
    step = f_hz[1]
    low, high = model.lower_hz.numpy(), model.upper_hz.numpy()
    edges = np.minimum(f_hz[:, None] + step / 2, high) - np.maximum(f_hz[:, None] - step / 2, low)
    wanted = density @ np.clip(edges, 0, None)
    assert_close(found["energy"][0], wanted, TOLERANCES["float64"])


def test_gains_and_constants() -> None:
    model = ModulationSpectrum(200, dtype=torch.float64)
    x = _tone(0.4, 4.0).expand(2, -1) * torch.tensor([[1.0], [1e-6]], dtype=torch.float64)
    energy = model(x)["energy"][..., :7]
    np.testing.assert_allclose(energy[:, 0], energy[:, 1], rtol=1e-9, atol=1e-15)
    for constant in (0.0, 3.0):
        flat = model(torch.full((1, 900), constant, dtype=torch.float64))["energy"][..., :7]
        np.testing.assert_allclose(flat, 0.0, atol=1e-25)


@pytest.mark.parametrize("samples", [0, 1, 2, 99, 399, 400, 401, 500])
def test_short_envelopes(samples: int) -> None:
    x = torch.rand(2, 3, samples) + 1
    windows = max(0, (samples - 400) // 100 + 1)
    whole = ModulationSpectrum(100)(x)
    assert whole["energy"].shape == (2, max(windows, int(samples > 0)), 3, 9)
    assert whole["mean"].isfinite().all()
    assert ModulationSpectrum(100, short="drop")(x)["energy"].shape == (2, windows, 3, 9)
    error = ModulationSpectrum(100, short="error")
    if samples < 400:
        with pytest.raises(ShapeError, match=rf"400 samples \(4 s\) or more, got {samples}"):
            error(x)
    else:
        assert error(x)["energy"].shape == (2, windows, 3, 9)
    if 0 < samples < 400:  # a band must hold a period
        valid = (whole["valid"] & (torch.tensor(EDGES_HZ[:-1]) < 100 / samples)).any()
        assert not valid


def test_a_batch_holds_the_envelopes() -> None:
    x = torch.rand(3, 2, 900) + 1
    model = ModulationSpectrum(200)
    together = model(x)
    for row in range(3):
        alone = model(x[row])
        for key in ("energy", "mean"):
            np.testing.assert_allclose(together[key][row], alone[key], rtol=1e-5)
    half = model(x.double())
    assert half["energy"].dtype == torch.float32


def test_gradients() -> None:
    model = ModulationSpectrum(100, win_s=1.0, f_min=2.0, f_max=16.0, dtype=torch.float64)
    x = (torch.rand(1, 130, dtype=torch.float64) + 1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: (model(x)["energy"], model(x)["mean"]), x, fast_mode=True
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fs": 0}, "sampling rate"),
        ({"win_s": 0}, "win_s"),
        ({"win_s": 1e-4}, "a sample or more"),
        ({"hop_s": -1}, "hop_s"),
        ({"f_min": 8.0, "f_max": 4.0}, "f_max of f_min"),
        ({"bands_per_octave": 0.5}, "whole number"),
        ({"relative": 1}, "True or False"),
        ({"short": "pad"}, "whole, drop, error"),
    ],
)
def test_refused_arguments(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        ModulationSpectrum(**{"fs": 100, **wrong})


@pytest.mark.parametrize("x", [torch.zeros(500), torch.zeros(1, 500, dtype=torch.int32)])
def test_refused_envelopes(x: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"expected .*\(channel, time\), got"):
        ModulationSpectrum(100)(x)


def test_silence_after_a_sound_has_energy() -> None:
    """The spectrogram decays to values whose squares are 0 in float32."""
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(1))
    model = AuditoryModulationSpectrum(fs=16000, win_s=0.25, hop_s=0.1)
    assert model(torch.cat((noise, torch.zeros(48000))))["energy"].isfinite().all()
    spectrum = ModulationSpectrum(100.0, 1.0, 0.5)
    envelope = noise[None, :400].abs() + 1.0
    for gain in (2.0**-90, 2.0**90):
        torch.testing.assert_close(
            spectrum(gain * envelope)["energy"], spectrum(envelope)["energy"], equal_nan=True
        )


def test_spectra_of_a_sound_are_spectra_of_its_spectrogram() -> None:
    x = torch.randn(2, 30000, dtype=torch.float64)
    model = AuditoryModulationSpectrum(16000, win_s=1.0, hop_s=0.25, dtype=torch.float64)
    assert model.bands_hz == (2.0, 4.0, 8.0, 16.0, 32.0)
    frames = AuditorySpectrogram(16000, dtype=torch.float64)(x)["spectrogram"].transpose(1, 2)
    wanted = ModulationSpectrum(125, win_s=1.0, hop_s=0.25, dtype=torch.float64)(frames)
    found = model(x)
    energy = found["energy"].unflatten(-1, (128, 5))
    np.testing.assert_allclose(energy, wanted["energy"][..., 2:7], rtol=1e-9)
    np.testing.assert_allclose(found["mean"], wanted["mean"], rtol=1e-12)
    only = model.outputs(x[0], ("mean",))
    assert list(only) == ["mean"] and torch.equal(only["mean"], model(x[0])["mean"])


def test_a_modulated_tone_peaks_in_its_band() -> None:
    t = torch.arange(48000) / 16000
    model = AuditoryModulationSpectrum(16000, win_s=2.0)
    x = (1 + torch.cos(2 * math.pi * 8 * t)) * torch.sin(2 * math.pi * 1000 * t)
    energy = model(x)["energy"].unflatten(-1, (128, -1))[-1]
    channel = int(model(x)["mean"][-1].argmax())
    assert model.bands_hz[int(energy[channel].argmax())] == 8.0


def test_a_sound_without_bands_is_refused() -> None:
    with pytest.raises(ParameterError, match="expected a band between"):
        AuditoryModulationSpectrum(16000, win_s=0.05, f_max=8.0)


class TestModulationSpectrum(ModelConformance):
    """The job model with windows of 0.3 s."""

    model = "modulation_spectrum"
    params = {"win_s": 0.3, "hop_s": 0.104}  # noqa: RUF012
    other_params = {"win_s": 0.3, "hop_s": 0.104, "relative": False}  # noqa: RUF012
    seconds = 0.7
