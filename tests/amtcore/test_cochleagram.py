"""Cochleagram against the stored reference arrays, closed forms and its own other routes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Cochleagram
from amtcore.errors import ParameterError
from amtcore.models.cochleagram import HalfCosineFilters, sinc_kernel
from amtcore.models.fine_envelope import bands_to_frames, can_interpolate
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from ..short import spread
from .golden_files import DTYPES, load, names

FILES = [name for name in names("cochleagram") if not name.endswith("design")]
STAGES = ("subbands", "envelope", "downsampled", "cochleagram")
EXACT = Tolerance(1e-10, "float64 transforms in another order", 1e-12)
SINGLE = Tolerance(1e-5, "float32 transforms", 1e-9)
POWER = Tolerance(1e-3, "the power magnifies rounding near 0", 1e-6)
SILENT_POWER = Tolerance(1e-2, "the power without offset magnifies rounding near 0", 1e-6)
#: Cases of `benchmarks.exactness`.
CASES = [(name, stage) for name in FILES for stage in STAGES]


def _model(golden: dict[str, np.ndarray], **more: Any) -> Cochleagram:
    params = {k.removeprefix("param_"): v.item() for k, v in golden.items() if "param_" in k}
    if params.pop("nonlinearity", "power") != "power":
        raise ValueError("the stored files have a power law")
    pad = (params.pop("pad_left", 0), params.pop("pad_right", 0))
    return Cochleagram(golden["fs"].item(), str(golden["preset"]), pad=pad, **params, **more)


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    golden = load(name)
    signal = torch.from_numpy(golden["input"])
    found = _model(golden, dtype=dtype).outputs(signal)
    plain = {"power": 1.0, "offset": 0.0}
    uncompressed = _model({k: v for k, v in golden.items() if k[6:] not in plain}, dtype=dtype,
                          compression="none")  # fmt: skip
    found["downsampled"] = uncompressed.outputs(signal, ("cochleagram",))["cochleagram"]
    return {key: values.double().numpy() for key, values in found.items()}


@pytest.mark.parametrize("key", STAGES)
@pytest.mark.parametrize(("name", "dtype"), spread(2, FILES, DTYPES))
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden, got = load(name), _outputs(name, DTYPES[dtype])[key]
    stored = next(k for k in golden if k.partition("@")[0] == key)
    every = int(stored.partition("@")[2] or 1)
    tolerance = EXACT if dtype == "float64" else SINGLE
    if dtype == "float32" and key == "cochleagram":
        tolerance = POWER if golden["preset"] == "chcochleagram" else SILENT_POWER
    assert_close(got[::every, golden["sel"]], golden[stored], tolerance, f"{name} {key}")
    summary = f"{key}_mean" if key == "cochleagram" else f"{key}_rms"
    value = got.mean(0) if key == "cochleagram" else np.sqrt(np.square(got).mean(0))
    assert_close(value, golden[summary], tolerance, f"{name} {summary}")
    if key == "cochleagram":
        assert got.T.shape == tuple(golden["shape"])


@pytest.mark.parametrize("name", FILES)
def test_stored_frequencies(name: str) -> None:
    golden = load(name)
    model = _model(golden, dtype=torch.float64)
    np.testing.assert_allclose(model.fc.numpy(), golden["centre_freqs_hz"], rtol=1e-12)


@pytest.mark.parametrize("design", "abc")
def test_stored_filters(design: str) -> None:
    golden = load("cochleagram__design")
    samples, fs, n, low, high, s = (int(v) for v in golden[f"args_{design}"])
    filters = HalfCosineFilters(float(fs), n, low, high, s)
    found = np.zeros((len(filters.fc_hz()), samples // 2 + 1))
    for row, (first, gains) in zip(
        found, filters.responses(samples, torch.device("cpu")), strict=True
    ):
        row[first : first + len(gains)] = gains
    np.testing.assert_allclose(filters.fc_hz(), golden[f"centre_freqs_hz_{design}"], rtol=1e-12)
    np.testing.assert_allclose(
        found[golden[f"sel_{design}"]], golden[f"filters_{design}"], atol=1e-12
    )
    np.testing.assert_allclose(np.square(found).sum(0), 1.0, rtol=1e-13)


@pytest.mark.parametrize(("q", "size"), [(100, 1001), (80, 1001), (240, 801), (441, 2000)])
def test_stored_kernel(q: int, size: int) -> None:
    expected = load("cochleagram__design")[f"kaiser_sinc_{q}_{size}"]
    assert_close(sinc_kernel(q, size), expected, EXACT, f"kernel {q} {size}")


class TestPresetConformance(ModelConformance):
    model = "cochleagram"
    params = {"n": 20, "pad": [500, 500]}  # noqa: RUF012
    other_params = {"power": 0.5}  # noqa: RUF012


class TestPycochleagramConformance(ModelConformance):
    """A rate that is no multiple of the frame rate, and zeros at the end."""

    model = "cochleagram"
    params = {"preset": "pycochleagram", "padding_size": 99}  # noqa: RUF012
    other_params = {"preset": "pycochleagram", "sample_factor": 1}  # noqa: RUF012
    fs_hz = 22050.0
    streams = {"cochleagram": {}, "envelope": {}}  # noqa: RUF012


FS = 8000.0
SMALL: dict[str, Any] = {"fs": FS, "n": 8, "sample_factor": 2, "window_size": 201,
                         "dtype": torch.float64}  # fmt: skip


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("samples", [999, 1000])
@pytest.mark.parametrize("preset", ["chcochleagram", "pycochleagram"])
def test_subbands_keep_the_energy(preset: str, samples: int) -> None:
    model = Cochleagram(8000, preset, dtype=torch.float64)
    signal = _noise(samples)
    subbands = model.outputs(signal, ("subbands",))["subbands"]
    np.testing.assert_allclose(subbands.square().sum(), signal.square().sum(), rtol=1e-12)


@pytest.mark.parametrize("samples", [999, 1000])
def test_hilbert_envelope_of_a_tone_in_a_filter(samples: int) -> None:
    """A tone of a whole number of periods has a flat envelope: amplitude times gain."""
    model = Cochleagram(**SMALL, envelope_scale="full")
    cycles, amplitude = 100, 0.05
    t = torch.arange(samples, dtype=torch.float64) / samples
    tone = amplitude * torch.cos(2 * np.pi * cycles * t)
    envelope = model.outputs(tone, ("envelope",))["envelope"]
    gains = torch.zeros(len(model.fc), dtype=torch.float64)
    responses = model.filters.responses(samples, torch.device("cpu"))
    for channel, (first, of_channel) in enumerate(responses):
        if first <= cycles < first + len(of_channel):
            gains[channel] = of_channel[cycles - first]
    expected = (amplitude * gains).clamp(min=model.floor).expand_as(envelope)
    np.testing.assert_allclose(envelope, expected, atol=1e-12)
    half = Cochleagram(**SMALL).outputs(tone, ("envelope",))["envelope"]
    np.testing.assert_allclose(half, (expected / 2).clamp(min=model.floor), atol=1e-12)


def test_other_envelopes_follow_the_subbands() -> None:
    signal = _noise(1001)
    for kind, of_subband in (("abs", torch.abs), ("rectify", torch.relu)):
        made = Cochleagram(**SMALL, envelope=kind).outputs(signal, ("subbands", "envelope"))
        torch.testing.assert_close(made["envelope"], of_subband(made["subbands"]), rtol=0, atol=0)


def test_frames_are_a_plain_sum_over_the_envelope() -> None:
    model = Cochleagram(**SMALL, pad=(30, 60), power=0.4, scale=3.0, offset=1e-4)
    later = Cochleagram(**SMALL, pad=(30, 60), power=0.4, scale=3.0, offset=1e-4,
                        downsample_then_compress=False)  # fmt: skip
    signal = _noise(700)
    made = model.outputs(signal)
    padded = np.pad(made["envelope"].numpy(), ((30, 60), (0, 0)))
    taps, hop = sinc_kernel(40, 201).numpy(), 40
    frames = range((len(padded) - 201) // hop + 1)
    slow = np.stack([taps @ padded[m * hop : m * hop + 201] for m in frames])
    expected = (3.0 * (np.maximum(slow, 0) + 1e-4)) ** 0.4
    np.testing.assert_allclose(made["cochleagram"], expected, rtol=1e-12)
    compressed = np.zeros_like(padded)
    compressed[30:730] = (3.0 * (made["envelope"].numpy() + 1e-4)) ** 0.4
    expected = np.stack([taps @ compressed[m * hop : m * hop + 201] for m in frames])
    found = later.outputs(signal, ("cochleagram",))["cochleagram"]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)
    times = model.frame_times_s(700)
    np.testing.assert_allclose(times, (np.arange(len(slow)) * hop + 100.5 - 30) / FS, rtol=1e-14)


def test_decibels_are_relative_to_the_largest_value_of_a_clip() -> None:
    options: dict[str, Any] = {"preset": "pycochleagram", "dtype": torch.float64}
    linear = Cochleagram(8000, compression="none", **options)
    decibels = Cochleagram(8000, compression="db", **options)
    signal = _noise(2, 1000)
    signal[1] *= 7
    signal[:, 400:800] = 0
    values, got = (m.outputs(signal, ("cochleagram",))["cochleagram"] for m in (linear, decibels))
    for row, levels in zip(values.numpy(), got.numpy(), strict=True):
        expected = 20 * np.log10(np.maximum(row / row.max(), 1e-300))
        np.testing.assert_allclose(levels, np.maximum(expected, -60.0), atol=1e-9)


def test_dropped_channels_change_no_other_channel() -> None:
    signal, s = _noise(800), SMALL["sample_factor"]
    whole = Cochleagram(**SMALL)
    dropped = Cochleagram(**SMALL, no_lowpass=True, no_highpass=True)
    torch.testing.assert_close(dropped.fc, whole.fc[s:-s], rtol=0, atol=0)
    for name, frames in dropped.outputs(signal).items():
        torch.testing.assert_close(frames, whole.outputs(signal)[name][..., s:-s])


def test_zeros_at_the_end_are_padding() -> None:
    """A clip with its own zeros has the values of a padded clip."""
    signal = _noise(900)
    with_zeros = torch.nn.functional.pad(signal, (0, 450))
    for padding in ({"pad_factor": 1.5}, {"padding_size": 450}):
        padded = Cochleagram(**SMALL, **padding).outputs(signal, ("envelope",))["envelope"]
        plain = Cochleagram(**SMALL).outputs(with_zeros, ("envelope",))["envelope"]
        torch.testing.assert_close(padded, plain[:900], rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_has_the_values_of_its_clips(dtype: str) -> None:
    model = Cochleagram(**{**SMALL, "dtype": DTYPES[dtype]})
    signals = _noise(2, 3, 1000)
    together = model.outputs(signals)
    for i in range(2):
        for j in range(3):
            for name, frames in model.outputs(signals[i, j]).items():
                tolerance = EXACT if dtype == "float64" else SINGLE
                assert_close(together[name][i, j], frames, tolerance, name)


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (200, 0), (201, 1), (240, 1), (241, 2)])
def test_number_of_frames(samples: int, frames: int) -> None:
    model = Cochleagram(**SMALL)
    made = model.outputs(torch.zeros(samples))
    assert made["cochleagram"].shape == (frames, len(model.fc))
    assert made["envelope"].shape == (samples, len(model.fc))
    none = model.outputs(torch.zeros(0, 2, samples))
    assert {name: each.shape for name, each in none.items()} == {
        name: (0, 2, *each.shape) for name, each in made.items()
    }


def fine_envelope(
    bands: Sequence[torch.Tensor], n_fft: int, samples: int, floor: float
) -> torch.Tensor:
    """The envelopes (band, sample) of a few bands, without frames."""
    weights, starts = torch.zeros(1, 512, 4), np.zeros(0, np.int64)
    return bands_to_frames(bands, n_fft, samples, floor, weights, starts, keep=True)[0].T


@pytest.mark.parametrize(("bins", "n_fft"), [(1, 400), (20, 400), (77, 2001), (3000, 40000)])
def test_interpolated_envelope_is_the_transform_at_every_sample(bins: int, n_fft: int) -> None:
    generator = torch.Generator().manual_seed(bins)
    band = torch.randn(3, bins, generator=generator, dtype=torch.complex128)
    assert can_interpolate(band.to(torch.complex64), bins, n_fft)
    exact = torch.fft.ifft(band, n_fft, norm="forward").abs()[:, : n_fft - 1]
    found = fine_envelope(band.to(torch.complex64), n_fft, n_fft - 1, 0.0)
    assert (found - exact).abs().max() <= 1e-6 * exact.max()
    floor = float(exact.median())
    raised = fine_envelope(band.to(torch.complex64), n_fft, n_fft - 1, floor)
    torch.testing.assert_close(raised, found.clamp(min=floor), rtol=0, atol=0)


def test_envelopes_with_gradients_equal_interpolated_envelopes() -> None:
    model, signal = Cochleagram(20000), _noise(4001).float()
    spectrum = torch.fft.rfft(signal)
    assert can_interpolate(spectrum, 100, 4001) and not can_interpolate(spectrum, 2000, 4001)
    assert not can_interpolate(spectrum.to(torch.complex128), 100, 4001)
    assert not can_interpolate(spectrum.clone().requires_grad_(), 100, 4001)
    with_gradient = model.outputs(signal.clone().requires_grad_())
    for name, frames in model.outputs(signal).items():
        assert_close(with_gradient[name].detach(), frames, SINGLE, name)


@pytest.mark.parametrize("preset", ["chcochleagram", "pycochleagram"])
def test_gradient(preset: str) -> None:
    model = Cochleagram(2000, preset, n=4, sample_factor=2, window_size=21, offset=1e-4,
                        dtype=torch.float64)  # fmt: skip
    signal = _noise(32).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: tuple(model(x).values()), (signal,), atol=1e-6, fast_mode=True
    )


def test_levels_from_silence_to_140_db_are_finite() -> None:
    for preset in ("chcochleagram", "pycochleagram"):
        model = Cochleagram(8000, preset)
        for gain in (0.0, 1e-12, 1.0, 1e4):
            frames = model.outputs(gain * _noise(1600), ("cochleagram",))["cochleagram"]
            assert torch.isfinite(frames).all()
    assert (model.outputs(torch.zeros(1600))["cochleagram"] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fs": 22050.0}, "a whole multiple of fs_out"),
        ({"high_lim": 10001.0}, "high_lim <= fs/2"),
        ({"low_lim": 500.0, "high_lim": 400.0}, "low_lim < high_lim"),
        ({"sample_factor": 3}, "sample_factor must be 1 or even, got 3"),
        ({"preset": "other"}, "preset must be one of chcochleagram, pycochleagram"),
        ({"pad": (1, 2, 3)}, "pad must be two numbers"),
        ({"pad_factor": 0.5}, "pad_factor must be a finite number between 1 and 100"),
    ],
)
def test_refused_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Cochleagram(**{"fs": 20000.0, **options})


def test_a_clip_without_a_frequency_for_the_highest_filter_is_refused() -> None:
    model = Cochleagram(20000)
    least = model.min_samples
    assert model.outputs(torch.zeros(least), ("envelope",))["envelope"].shape[0] == least
    with pytest.raises(ParameterError, match=f"expected {least} samples or more"):
        model.outputs(torch.zeros(least - 1))
