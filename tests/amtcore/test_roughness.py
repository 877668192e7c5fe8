"""Roughness against stored values, published figures, and closed forms."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import RoughnessDanielWeber
from amtcore.errors import NonFiniteError, ParameterError, ShapeError
from amtcore.features.frame_models import ROUGHNESS
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from ..short import spread
from .golden_files import DTYPES, load

FILES = ("roughness__am1000_70_60", "roughness__am_noise_65", "roughness__fm1600_32000")
CASES = [(name, key) for name in FILES for key in ("r", "r_spec", "depth", "k", "h0")]
BOUNDS = {"float64": Tolerance(1e-9, "order of sums"),
          "float32": Tolerance(1e-5, "float32 transforms")}  # fmt: skip
MOSQITO = Tolerance(1e-6, "another program")
#: Asper: MoSQITo correlates envelopes that are rounding noise.
NOISE_ASPER = 5e-3
#: Asper: the model against measurements of listeners.
FIGURES_ASPER = 0.18


def of_array(name: str, key: str, dtype: str) -> Tensor:
    """Return an array of the model, (frame,) or (frame, column)."""
    return _arrays(name, dtype)[key]


@functools.cache
def _arrays(name: str, dtype: str) -> dict[str, Tensor]:
    """Return all arrays of the model for a stored signal."""
    stored, kind = load(name), DTYPES[dtype]
    model = RoughnessDanielWeber(float(stored["fs"]), float(stored["overlap"]), dtype=kind)
    signal = torch.from_numpy(stored["input"]).to(kind)
    found = model(signal)
    frames = signal.unfold(0, model.samples, model.hop_length)
    depth, k, h0 = (each[0] for each in model.depth_and_correlation(frames.unsqueeze(0)))
    k = torch.nn.functional.pad(k, (0, 2))
    return {"r": found["r"][:, 0], "r_spec": found["r_spec"], "depth": depth, "k": k, "h0": h0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{n}-{k}" for n, k in CASES])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    assert_close(of_array(name, key, dtype), load(name)[key], BOUNDS[dtype], f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_mosqito(name: str) -> None:
    stored = load(name)
    model = RoughnessDanielWeber(float(stored["fs"]), bin_offset=1, dtype=torch.float64)
    found = model(torch.from_numpy(stored["input"]))
    if name == "roughness__am1000_70_60":
        assert np.abs(found["r"][:, 0].numpy() - stored["r_mosqito"]).max() < NOISE_ASPER
        return
    assert_close(found["r"][:, 0], stored["r_mosqito"], MOSQITO)
    assert_close(found["r_spec"], stored["r_spec_mosqito"], MOSQITO)


def modulated(fc_hz: float, fm_hz: float, fs: float, seconds: float = 0.2) -> Tensor:
    """A tone of 60 dB with full amplitude modulation."""
    t = torch.arange(round(seconds * fs), dtype=torch.float64) / fs
    x = (1 + torch.sin(2 * torch.pi * fm_hz * t)) * torch.sin(2 * torch.pi * fc_hz * t)
    return x * (2e-5 * 1000 / x.square().mean().sqrt())


def test_grid_of_published_figures() -> None:
    stored = load("roughness__grid")
    fs, fcs, fms = float(stored["fs"]), stored["fc"], stored["fm"]
    signals = torch.stack([modulated(fc, fm, fs) for fc in fcs for fm in fms])
    model = RoughnessDanielWeber(fs, dtype=torch.float64)
    found = model(signals)["r"].reshape(len(fcs), len(fms)).numpy()
    assert_close(found, stored["r"], BOUNDS["float64"])
    for key in ("fastl_zwicker", "daniel_weber"):
        assert np.abs(found - stored[key]).max() < FIGURES_ASPER
    offset = RoughnessDanielWeber(fs, bin_offset=1, dtype=torch.float64)(signals)["r"]
    assert np.abs(offset.reshape(found.shape).numpy() - stored["r_mosqito"]).max() < NOISE_ASPER


def test_an_asper() -> None:
    """The unit is 1 kHz, 60 dB, full modulation at 70 Hz; a steady tone and silence have none."""
    for fs in (16000, 24000, 44100, 48000):
        rough = float(RoughnessDanielWeber(fs)(modulated(1000.0, 70.0, fs))["r"])
        assert abs(rough - 1.0) < 0.02
    steady = modulated(1000.0, 0.0, 48000)
    assert float(RoughnessDanielWeber(dtype=torch.float64)(steady)["r"]) < 1e-3
    silent = RoughnessDanielWeber()(torch.zeros(9600))
    assert not silent["r"].any() and not silent["r_spec"].any()
    loud = RoughnessDanielWeber()(1e3 * modulated(1000.0, 70.0, 48000))
    soft = RoughnessDanielWeber()(1e-3 * modulated(1000.0, 70.0, 48000))
    assert bool(loud["r"].isfinite().all()) and float(soft["r"]) == 0.0


def test_frames_batches_and_lengths() -> None:
    generator = torch.Generator().manual_seed(4)
    x = 0.02 * torch.randn(2, 3, 8000, generator=generator)
    for overlap, frames in ((0.0, 2), (0.5, 4), (0.75, 7)):
        model = RoughnessDanielWeber(16000, overlap)
        together = model(x)
        assert together["r_spec"].shape == (2, 3, frames, 47)
        assert_close(together["r"][1, 2], model(x[1, 2])["r"], Tolerance(1e-5, "float32"))
        np.testing.assert_allclose(
            together["r"][..., 0], 0.25 * together["r_spec"].sum(-1), rtol=1e-5
        )
    model = RoughnessDanielWeber(22050)
    for samples in (0, 1, model.samples - 1, model.samples, model.samples + model.hop_length):
        found = model(torch.zeros(samples))
        for name, grid in model.grids.items():
            assert found[name].shape == (grid.n_frames(samples), grid.width)


@pytest.mark.parametrize(("dtype", "fs"), spread(2, DTYPES, (16000, 22050, 48001)))
def test_kernels_and_plain_form(dtype: str, fs: int) -> None:
    """The plain form, with gradients, has the values of the kernels at any level."""
    model = RoughnessDanielWeber(fs, dtype=DTYPES[dtype])
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(model.samples, generator=generator, dtype=torch.float64)
    for level in (1e-4, 1e-2, 1.0):
        x = (level * noise + modulated(1000.0, 70.0, fs)[: len(noise)]).to(DTYPES[dtype])
        plain, found = model(x.clone().requires_grad_()), model(x)
        for name, values in plain.items():
            assert_close(found[name], values.detach(), BOUNDS[dtype], name)


def test_refusals() -> None:
    for wrong in ({"fs": 8000.0}, {"overlap": 1.0}, {"bin_offset": 2}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            RoughnessDanielWeber(**wrong)
    with pytest.raises(NonFiniteError, match="finite"):
        RoughnessDanielWeber()(torch.full((9600,), torch.inf))
    with pytest.raises(ShapeError, match="floating-point"):
        RoughnessDanielWeber()(torch.zeros(9600, dtype=torch.int16))
    with pytest.raises(ParameterError, match="no output"):
        RoughnessDanielWeber().outputs(torch.zeros(4), ("asper",))


def test_gradients_are_finite_differences() -> None:
    model = RoughnessDanielWeber(16000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(6)
    x = modulated(1000.0, 70.0, 16000)
    x = x + 1e-3 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    along = torch.randn(len(x), generator=generator, dtype=torch.float64)
    leaf, step = x.clone().requires_grad_(), 1e-10
    model(leaf)["r"].sum().backward()
    difference = (model(x + step * along)["r"] - model(x - step * along)["r"]) / (2 * step)
    np.testing.assert_allclose(float(leaf.grad @ along), float(difference), rtol=1e-3)


class TestRoughness(ModelConformance):
    """Both streams; the frame of 0.2 s needs longer clips."""

    model = ROUGHNESS
    other_params = {"bin_offset": 1}  # noqa: RUF012
    fs_hz = 16000.0
    seconds = 0.5
