"""Auditory spectrograms and rate-scale features: stored arrays, scipy, moving ripples."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor

from amtcore import AuditorySpectrogram, RateScale
from amtcore.errors import ParameterError, ShapeError
from amtcore.models.rate_scale import rate_response, scale_response
from amtcore.models.ripple_moduli import LENGTH, ripple_moduli
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from ..short import spread
from .golden_files import DTYPES, load, names

FILES = [name for name in names("ratescale") if "input" in load(name)]
TOLERANCES = {
    "float64": Tolerance(1e-9, "other order of sums"),
    "float32": Tolerance(1e-4, "single-precision recurrences at 180 Hz"),
}
KEYS = (
    "gammatone_sel@step",
    "hair_cell_sel@step",
    "spectrogram@q",
    "spectrogram_mean",
    "rate_scale@q",
    "rate_scale_mean",
    "cortical_pick",
)
#: Cases of `benchmarks.exactness`.
CASES = [(name, key) for name in FILES for key in KEYS]


@functools.cache
def _stages(name: str, dtype: str) -> dict[str, np.ndarray]:
    golden = load(name)
    x = torch.from_numpy(golden["input"])
    model = RateScale(float(golden["fs"]), dtype=DTYPES[dtype])
    assert model.rates == golden["rates_hz"].tolist()
    assert model.scales == golden["scales_cpo"].tolist()
    found = {}
    for count, key in enumerate(("gammatone_sel", "hair_cell_sel"), 1):
        found[key] = model.spectrogram.ear_outputs(x, count)[golden["sel"]].T
    found |= model(x)
    spectrogram = model.spectrogram(x)["spectrogram"]
    found |= {"spectrogram": spectrogram, "spectrogram_mean": spectrogram.mean(0)}
    found["rate_scale_mean"] = found["rate_scale_mean"][0]
    for key in ("rate_scale", "rate_scale_mean"):
        found[key] = found[key].unflatten(-1, (2, 5, 6))
    picks = (torch.from_numpy(golden[f"cortical_{axis}"]) for axis in ("frames", "channels"))
    frames, channels = picks
    found["cortical_pick"] = model.cortical(spectrogram)[..., frames[:, None], channels]
    return {key: each.numpy() for key, each in found.items()}


def _parts(x: Any) -> np.ndarray:
    """Return complex numbers as pairs."""
    x = np.asarray(x)
    return np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("name", "dtype"), spread(2, FILES, DTYPES))
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden, (array, _, every) = load(name), key.partition("@")
    got = _stages(name, dtype)[array]
    got = got[:: int(golden[every])] if every else got
    assert_close(_parts(got), _parts(golden[key]), TOLERANCES[dtype], f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_stored_channels(name: str) -> None:
    golden = load(name)
    model = AuditorySpectrogram(float(golden["fs"]), dtype=torch.float64)
    np.testing.assert_allclose(model.fc, golden["fc_hz"], rtol=1e-12)
    assert model.grids["spectrogram"].n_frames(len(golden["input"])) == golden["n_frames"]
    assert model.frame_rate_hz == golden["frame_rate_hz"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("boundary", ["zero", "circular"])
def test_stored_responses_to_noise(boundary: str, dtype: str) -> None:
    golden = load("ratescale__noise_125")
    model = RateScale(
        16000, golden["rates_hz"], golden["scales_cpo"], boundary, dtype=DTYPES[dtype]
    )
    x = torch.from_numpy(golden["spectrogram"]).to(DTYPES[dtype])
    frames, channels = (torch.from_numpy(golden[f"cortical_{k}"]) for k in ("frames", "channels"))
    got = model.cortical(x)[..., frames[:, None], channels]
    assert_close(_parts(got), _parts(golden[f"cortical_pick_{boundary}"]), TOLERANCES[dtype])
    features = model.features(x)["rate_scale"][::4].unflatten(-1, (2, 3, 3))
    assert_close(features, golden[f"rate_scale_{boundary}"], TOLERANCES[dtype])


@pytest.mark.parametrize("ripple", range(6))
def test_moving_ripples_have_the_modulus_of_the_filters(ripple: int) -> None:
    golden = load("ratescale__ripples_125")
    a, rate, scale, phase = golden["ripples"][ripple]
    t = np.arange(int(golden["n_frames"]))[:, None] / 125
    x = np.arange(int(golden["n_channels"])) / 24
    spectrogram = 1 + a * np.cos(2 * math.pi * (rate * t + scale * x) + phase)
    model = RateScale(16000, boundary="circular", dtype=torch.float64)
    moduli = model.cortical(torch.from_numpy(spectrogram)).abs()
    wanted = golden["expected_circular"][ripple][..., None, None]
    np.testing.assert_allclose(moduli, np.broadcast_to(wanted, moduli.shape), atol=1e-10)


def test_selectivity_of_the_seeds() -> None:
    """Gains in dB at ratios 1/4 to 4 of ripple to filter, and half-power points."""
    ratio = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    at_one = rate_response(torch.ones(1, dtype=torch.float64)).abs()
    assert float(at_one) == pytest.approx(0.023653450254546862, rel=1e-12)

    def rate_db(u: Tensor) -> Tensor:
        return 20 * torch.log10(rate_response(u).abs() / at_one)

    np.testing.assert_allclose(rate_db(ratio), [-16.9, -8.7, 0.0, -19.1, -46.6], atol=0.06)
    scale_db = 20 * torch.log10(scale_response(ratio, 1.0))
    np.testing.assert_allclose(scale_db, [-15.9, -5.5, 0.0, -14.0, -106.2], atol=0.06)
    edges = torch.tensor([0.730, 1.285, 0.617, 1.442], dtype=torch.float64)
    half = [*rate_db(edges[:2]), *(20 * torch.log10(scale_response(edges[2:], 1.0)))]
    np.testing.assert_allclose(half, -3.0103, atol=0.03)


def test_a_downward_ripple_peaks_in_its_column() -> None:
    """The sound has ripples of 8 Hz and 1 cycle per octave."""
    mean = _stages("ratescale__ripple_down_16000", "float64")["rate_scale_mean"]
    assert np.unravel_index(mean.argmax(), mean.shape) == (0, 2, 2)
    assert 20 * math.log10(mean[0, 2, 2] / mean[1, 2, 2]) == pytest.approx(19, abs=0.6)
    grid = RateScale(16000).grids["rate_scale"]
    column = int(mean.argmax())
    assert grid.columns[column] == "down_8_1" and grid.mfc_hz[column] == 8.0


def _spectrogram_by_scipy(x: np.ndarray, fs: int, compression: str) -> np.ndarray:
    """The early stage, filter by filter."""
    hop, fc = math.floor(0.008 * fs + 0.5), 440 * 2 ** (-31 / 24) * 2 ** (np.arange(129) / 24)
    fc = fc[fc <= 0.46 * fs]
    x = np.concatenate((x, np.zeros(-len(x) % hop)))
    smooth, leak = math.exp(-1 / (0.0005 * fs)), math.exp(-1 / (0.008 * fs))
    channels = []
    for f in fc:
        r = math.exp(-2 * math.pi * 1.0185916357881302 * f / 4 / fs)
        y = x.astype(complex)
        for _ in range(4):
            y = scipy.signal.lfilter([1 - r], [1, -r * np.exp(-2j * math.pi * f / fs)], y)
        channels.append(scipy.signal.lfilter([1 - smooth], [1, -smooth], np.maximum(2 * y.real, 0)))
    inhibited = [np.maximum(low - high, 0) for low, high in pairwise(channels)]
    frames = scipy.signal.lfilter([1 - leak], [1, -leak], inhibited)[:, hop - 1 :: hop].T
    return frames ** (1 / 3) if compression == "cuberoot" else frames


@pytest.mark.parametrize("fs", [8000, 11025, 22050])
@pytest.mark.parametrize("compression", ["none", "cuberoot"])
def test_spectrogram_by_filters_of_scipy(fs: int, compression: str) -> None:
    model = AuditorySpectrogram(fs, compression=compression, dtype=torch.float64)
    for samples in (0, 1, model.hop_length, model.hop_length + 1, 4000):
        x = np.random.default_rng(samples).standard_normal(samples)
        found = model(torch.from_numpy(x))["spectrogram"]
        assert (
            len(found)
            == model.grids["spectrogram"].n_frames(samples)
            == -(-samples // model.hop_length)
        )
        if samples:
            wanted = _spectrogram_by_scipy(x, fs, compression)
            assert_close(found, wanted, Tolerance(1e-9, "order of sums"), f"{samples}")


def test_a_linear_hair_cell_keeps_the_sign() -> None:
    x = torch.randn(3000, dtype=torch.float64)
    model = AuditorySpectrogram(16000, hair_cell="linear", dtype=torch.float64)
    y = model.ear_outputs(x, 1)
    assert float(y.min()) < 0
    inhibited = (y[:-1] - y[1:]).clamp(min=0).numpy()
    leak = math.exp(-1 / 128)
    wanted = scipy.signal.lfilter([1 - leak], [1, -leak], inhibited)[:, 127::128].T
    assert_close(model(x)["spectrogram"][:23], wanted, Tolerance(1e-9, "order of sums"))


def test_spectrograms_scale_with_the_sound() -> None:
    model, x = AuditorySpectrogram(16000, dtype=torch.float64), torch.randn(2, 3000).double()
    for gain in (1e-6, 1e4):
        assert_close(
            model(gain * x)["spectrogram"] / gain, model(x)["spectrogram"], Tolerance(1e-12, "gain")
        )
    np.testing.assert_array_equal(model(0 * x)["spectrogram"], 0.0)


def test_batches_hold_the_sounds() -> None:
    x = torch.randn(2, 3, 2000)
    for model in (AuditorySpectrogram(16000), RateScale(16000, [4.0, 32.0], [0.5, 2.0])):
        together = model(x)
        alone = model(x[1, 2])
        assert set(together) == set(model.grids)
        for name, grid in model.grids.items():
            assert together[name].shape == (2, 3, grid.n_frames(2000), grid.width)
            np.testing.assert_allclose(together[name][1, 2], alone[name], rtol=1e-3, atol=1e-7)


def test_only_wanted_outputs_and_their_means() -> None:
    model = RateScale(16000, [4.0, 8.0, 32.0], [0.5, 2.0], dtype=torch.float64)
    x = torch.randn(3000).double()
    every = model(x)
    moduli = model.cortical(model.spectrogram(x)["spectrogram"]).abs()  # d, rate, scale, t, ch
    wanted = {
        "rate_scale": moduli.mean(-1).permute(3, 0, 1, 2).flatten(1),
        "rate_scale_mean": moduli.mean((-1, -2)).flatten()[None],
        "scale_frequency": moduli.mean((0, 1)).permute(1, 2, 0).flatten(1),
        "rate_frequency": moduli.mean(2).permute(2, 3, 0, 1).flatten(1),
    }
    for name in model.grids:
        np.testing.assert_allclose(every[name], wanted[name], rtol=1e-9, atol=1e-14)
        (found,) = model.outputs(x, (name,)).items()
        assert found[0] == name and torch.equal(found[1], every[name])


@pytest.mark.parametrize(("channels", "frames"), [(128, 70), (65, 1), (127, 32)])
def test_the_kernel_has_the_moduli_of_transforms(channels: int, frames: int) -> None:
    generator = torch.Generator().manual_seed(channels)
    responses = torch.randn(2, LENGTH // 2, frames, generator=generator, dtype=torch.complex64)
    gains = torch.rand(3, LENGTH // 2, generator=generator)
    filtered = (responses.unsqueeze(1) * gains.unsqueeze(-1)).to(torch.complex128)
    wanted = torch.fft.ifft(filtered, LENGTH, dim=-2, norm="forward")[..., :channels, :].abs()
    found = ripple_moduli(responses, gains, channels)
    assert_close(found, wanted, Tolerance(1e-6, "float32 transforms"))


def test_outputs_with_gradients_equal_outputs_of_kernels() -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for model in (AuditorySpectrogram(16000, compression="cuberoot"), RateScale(16000)):
        with_gradient = model.outputs(x.clone().requires_grad_())
        for name, values in model.outputs(x).items():
            assert_close(with_gradient[name].detach(), values, Tolerance(1e-5, "float32"), name)


def test_a_constant_spectrogram_has_no_ripples() -> None:
    model = RateScale(16000, [4.0, 32.0], [0.5, 2.0], "circular", dtype=torch.float64)
    for frames, channels in ((100, 128), (75, 33), (1, 1)):
        flat = torch.ones(frames, channels, dtype=torch.float64)
        for name, values in model.features(flat, ("rate_scale", "rate_frequency")).items():
            np.testing.assert_allclose(values, 0.0, atol=1e-14, err_msg=name)


def test_silence_and_nothing() -> None:
    for boundary in ("zero", "circular"):
        model = RateScale(16000, [4.0, 32.0], [0.5, 2.0], boundary)
        for samples in (0, 1, 300):
            found = model.outputs(torch.zeros(samples))
            for name, grid in model.grids.items():
                assert found[name].shape == (grid.n_frames(samples), grid.width), samples
                np.testing.assert_array_equal(found[name], 0.0)


def test_gradients() -> None:
    """Central differences of both models; in silence the rectifier has gradient 0."""
    x = torch.randn(2500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction = torch.randn_like(x)
    spectrogram = AuditorySpectrogram(16000, dtype=torch.float64)
    cortex = RateScale(16000, [4.0, 16.0], [0.5, 2.0], dtype=torch.float64)
    for model, name in ((spectrogram, "spectrogram"), (cortex, "rate_scale")):

        def total(x: Tensor, model: Any = model, name: str = name) -> Tensor:
            values = model.outputs(x, (name,))[name]
            return (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum()

        at = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(total(at), at)
        slope = (total(x + 1e-8 * direction) - total(x - 1e-8 * direction)) / 2e-8
        assert float(gradient @ direction) == pytest.approx(float(slope), rel=1e-5)
        silence = torch.zeros_like(x).requires_grad_()
        (gradient,) = torch.autograd.grad(total(silence), silence)
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_the_whole(dtype: str) -> None:
    model, x = AuditorySpectrogram(16000, dtype=DTYPES[dtype]), torch.randn(2, 9000)
    whole = model(x)["spectrogram"]
    for size in (1777, 128, 2048, 9000):
        state, parts = None, []
        for chunk in x.split(size, -1):
            found, state = model.stream(chunk, state)
            parts.append(found["spectrogram"])
        found, state = model.stream(x[:, :0], state, last=True)
        assert torch.equal(torch.cat([*parts, found["spectrogram"]], 1), whole)


@pytest.mark.parametrize(
    ("model", "wrong", "says"),
    [
        (AuditorySpectrogram, {"fs": -1}, "sampling rate"),
        (AuditorySpectrogram, {"fs": 16000, "f_min": 7300}, "two filters or more"),
        (AuditorySpectrogram, {"fs": 50, "f_min": 1}, "two filters or more"),
        (AuditorySpectrogram, {"fs": 16000, "hair_cell": "half"}, "halfwave, linear"),
        (AuditorySpectrogram, {"fs": 16000, "compression": 0.3}, "compression"),
        (AuditorySpectrogram, {"fs": 16000, "n_filters": 1}, "n_filters"),
        (RateScale, {"fs": 16000, "rates": [2, 63]}, "rates: expected values below 62.5 Hz"),
        (RateScale, {"fs": 16000, "scales": [12]}, "scales: expected values below 12"),
        (RateScale, {"fs": 16000, "rates": []}, "non-empty list"),
        (RateScale, {"fs": 16000, "rates": [4, 2]}, "must ascend"),
        (RateScale, {"fs": 16000, "boundary": "mirror"}, "zero, circular"),
    ],
)
def test_refused_arguments(model: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        model(**wrong)


def test_refused_sounds() -> None:
    for wrong in (torch.zeros(100, dtype=torch.int16), torch.tensor(1.0), [0.0]):
        with pytest.raises(ShapeError, match=r"expected .*\(\.\., time\), got"):
            AuditorySpectrogram(16000)(wrong)


class TestAuditorySpectrogram(ModelConformance):
    """The job model with its only stream."""

    model = "auditory_spectrogram"
    other_params = {"compression": "cuberoot"}  # noqa: RUF012
    seconds = 0.3


class TestRateScale(ModelConformance):
    """The job model with all streams."""

    model = "rate_scale"
    params = {"rates": [4.0, 16.0], "scales": [0.5, 2.0]}  # noqa: RUF012
    other_params = {"rates": [4.0, 16.0], "scales": [0.5, 2.0], "boundary": "circular"}  # noqa: RUF012
    seconds = 0.3
