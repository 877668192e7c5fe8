"""STOI and ESTOI against stored arrays of pystoi, their definition, and properties of a score."""

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

from amtcore import STOI
from amtcore.errors import ParameterError, ShapeError
from amtcore.features.feature_model import Extractor
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = names("stoi")
TOLERANCES = {
    "float64": Tolerance(1e-9, "other order of sums"),
    "float32": Tolerance(1e-4, "single-precision spectra and sums"),
}
KEYS = (
    "clean_10k@13",
    "processed_10k@13",
    "frame_level_db",
    "clean_active@13",
    "clean_bands@4",
    "processed_bands@4",
    "stoi_segments@4",
    "estoi_segments",
    "stoi",
    "estoi",
)
CASES = [(name, key) for name in FILES for key in KEYS]
#: First bin of each band, and the bin after the last band (bins are 19.53125 Hz apart).
EDGES = (7, 9, 11, 14, 17, 22, 27, 34, 43, 55, 69, 87, 109, 138, 174, 219)


@functools.cache
def _stages(name: str, dtype: str) -> dict[str, np.ndarray]:
    golden = load(name)
    model = STOI(float(golden["fs"]), DTYPES[dtype])
    clips = {key: torch.from_numpy(golden[key]) for key in ("clean", "processed")}
    made: dict[str, Tensor] = {}
    for key, clip in clips.items():
        made[f"{key}_10k"] = model.resampled(clip)
        frames = model.frames(made[f"{key}_10k"])
        if key == "clean":
            made["frame_level_db"] = model.levels_db(frames)
            made["kept"] = model.kept(made["frame_level_db"])
        made[f"{key}_active"] = model.joined(frames[made["kept"]])
        made[f"{key}_bands"] = model.envelopes(made[f"{key}_active"])
    return {key: each.numpy() for key, each in {**made, **model(*clips.values())}.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    array, _, step = key.partition("@")
    got = _stages(name, dtype)[array]
    got = got[:: int(step)] if step else got
    assert_close(got, load(name)[key], TOLERANCES[dtype], f"{name} {key}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILES)
def test_stored_frames_and_lengths(name: str, dtype: str) -> None:
    golden, made = load(name), _stages(name, dtype)
    np.testing.assert_array_equal(made["kept"], golden["kept"])
    assert len(made["clean_10k"]) == golden["resampled_length"]
    assert len(made["clean_active"]) == golden["active_length"]
    assert len(made["clean_bands"]) == golden["n_frames"]


def _speech(samples: int, seed: int = 0, *batch: int) -> Tensor:
    """Noise whose level changes slowly by 30 dB."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*batch, samples, generator=generator, dtype=torch.float64)
    return noise * 10 ** (1.5 * torch.sin(torch.arange(samples) / 900.0 + seed) / 2)


def test_bands_are_one_third_octaves_at_the_nearest_bins() -> None:
    bands = STOI(10000).bands.unflatten(0, (257, 2))
    assert torch.equal(bands[:, 0], bands[:, 1])
    bands = bands[:, 0]
    for band, (first, end) in enumerate(pairwise(EDGES)):
        assert bands[:, band].nonzero().flatten().tolist() == list(range(first, end))


@pytest.mark.parametrize("fs", [8000, 11025, 16000, 22050, 44100, 48000])
def test_resampler_is_a_polyphase_filter(fs: int) -> None:
    """The second route is scipy's resample_poly with the taps of a Kaiser window."""
    model = STOI(fs, torch.float64)
    up, down = 10000 // math.gcd(10000, fs), fs // math.gcd(10000, fs)
    half = math.ceil(52 / (28.714 / (20 * max(up, down))))
    t = np.arange(-half, half + 1)
    taps = np.sinc(t / max(up, down)) * np.kaiser(2 * half + 1, 5.65326)
    for samples in (0, 1, 2, 37, 1000):
        x = _speech(samples)
        wanted = np.zeros(0)
        if samples:
            wanted = scipy.signal.resample_poly(x.numpy(), up, down, window=taps / taps.sum())
        assert_close(model.resampled(x), wanted, Tolerance(1e-9, "order of sums"), f"{samples}")


@pytest.mark.parametrize("fs", [8000, 10000, 44100])
def test_a_clip_equal_to_the_clean_one_scores_one(fs: int) -> None:
    x = _speech(fs)
    found = STOI(fs, torch.float64)(x, x)
    for name in ("stoi", "estoi"):
        assert abs(float(found[name]) - 1.0) < 1e-9
        np.testing.assert_allclose(found[f"{name}_segments"], 1.0, atol=1e-9)


def test_noise_lowers_the_scores_and_gains_do_not() -> None:
    model, clean, noise = STOI(10000, torch.float64), _speech(12000), _speech(12000, 1)
    scores = [model(clean, clean + gain * noise) for gain in (0.0, 0.1, 0.5, 2.0)]
    for name in ("stoi", "estoi"):
        values = [float(each[name]) for each in scores]
        assert values == sorted(values, reverse=True) and values[-1] < 0.7
        for gains in ((1e-3, 1.0), (1.0, 300.0), (100.0, 1e-2)):
            found = model(gains[0] * clean, gains[1] * (clean + 0.5 * noise))[name]
            assert float(found) == pytest.approx(values[2], abs=1e-9)


def test_the_definition_in_loops() -> None:
    """Equations of both papers, segment by segment, on the envelopes of the model."""
    model, clean, processed = STOI(10000, torch.float64), _speech(6000), _speech(6000, 1)
    frames = model.frames(torch.stack((clean, processed)))
    kept = model.kept(model.levels_db(frames[0]))
    x, y = (model.envelopes(model.joined(each[kept])).numpy() for each in frames)
    stoi, estoi = [], []
    for start in range(len(x) - 29):
        u, v = x[start : start + 30], y[start : start + 30]
        row = []
        for a, b in zip(u.T, v.T, strict=True):
            b = np.minimum(b * np.linalg.norm(a) / np.linalg.norm(b), a * (1 + 10 ** (15 / 20)))
            row.append(np.corrcoef(a, b)[0, 1])
        stoi.append(row)
        for axis in (0, 1):
            u, v = (m - m.mean(axis, keepdims=True) for m in (u, v))
            u, v = (m / np.linalg.norm(m, axis=axis, keepdims=True) for m in (u, v))
        estoi.append((u * v).sum() / 30)
    found = model(clean, processed)
    np.testing.assert_allclose(found["stoi_segments"], stoi, atol=1e-12)
    np.testing.assert_allclose(found["estoi_segments"], estoi, atol=1e-12)
    assert float(found["stoi"]) == pytest.approx(np.mean(stoi), abs=1e-12)
    assert float(found["estoi"]) == pytest.approx(np.mean(estoi), abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silence(dtype: str) -> None:
    model, clean = STOI(10000, DTYPES[dtype]), _speech(8000)
    nothing = torch.zeros_like(clean)
    found = model(clean, nothing)
    assert float(found["stoi"]) == float(found["estoi"]) == 0.0
    found = model(nothing, clean)
    assert math.isnan(found["stoi"]) and math.isnan(found["estoi"])
    assert found["stoi_segments"].shape == (0, 15) and found["estoi_segments"].shape == (0,)
    assert not found["kept"].any()


def test_silent_frames_are_left_out_of_both_clips() -> None:
    model, clean = STOI(10000, torch.float64), _speech(12000)
    clean[4000:7000] *= 1e-4
    processed = clean + 0.1 * _speech(12000, 1)
    louder = processed.clone()
    louder[4300:6700] += _speech(2400, 2)
    found, other = model(clean, processed), model(clean, louder)
    assert int((~found["kept"]).sum()) > 18
    assert float(found["stoi"]) == pytest.approx(float(other["stoi"]), abs=1e-12)


@pytest.mark.parametrize("samples", [0, 1, 255, 256, 257, 4096, 4097])
@pytest.mark.parametrize("fs", [10000, 16000])
def test_short_clips(fs: int, samples: int) -> None:
    """The first segment needs 4097 samples at 10 kHz: 31 frames, one of which begins earlier."""
    model, n = STOI(fs), samples if fs == 10000 else samples * 16 // 10
    x = _speech(n)
    found, has_score = model(x, x), samples == 4097
    assert math.isnan(found["stoi"]) != has_score and len(found["estoi_segments"]) == has_score
    outputs = model.outputs(torch.stack((x, x)))
    for name, grid in model.grids.items():
        assert outputs[name].shape == (grid.n_frames(n), 1)
    assert len(found["kept"]) == len(outputs["kept"]) == max(0, -((256 - samples) // 128))
    assert len(outputs["stoi"]) == has_score


def test_a_batch_holds_the_pairs() -> None:
    model, clean = STOI(16000, torch.float64), _speech(16000, 0, 3)
    clean[1, 6000:] *= 1e-5
    clean[2] = 0.0
    processed = clean + 0.3 * _speech(16000, 1, 3)
    batch = model(clean, processed)
    for row in range(3):
        for name, values in model(clean[row], processed[row]).items():
            got, n = batch[name][row], len(values) if values.ndim else None
            assert_equal = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)
            assert_equal(got[:n] if values.ndim else got, values)
            assert not values.ndim or n == len(got) or got[n:].isnan().all()
    outputs = model.outputs(torch.stack((clean, processed), -2)[None], ("kept", "estoi"))
    assert {name: tuple(each.shape) for name, each in outputs.items()} == {
        "kept": (1, 3, 77, 1),
        "estoi": (1, 3, 1, 1),
    }
    nobody = model(clean[:0], processed[:0])
    assert nobody["stoi"].shape == (0,) and nobody["kept"].shape == (0, 77)


def test_gradients_of_both_clips() -> None:
    """Central differences along random directions, with the silent frames unchanged."""
    model = STOI(16000, torch.float64)
    clean, processed = (_speech(8000, seed).requires_grad_() for seed in (0, 1))
    for name in ("stoi", "estoi"):
        gradients = torch.autograd.grad(model(clean, processed)[name], (clean, processed))
        for position, gradient in enumerate(gradients):
            direction = _speech(8000, 2)
            ends = []
            for step in (1e-6, -1e-6):
                pair = [clean.detach(), processed.detach()]
                pair[position] = pair[position] + step * direction
                ends.append(float(model(*pair)[name]))
            slope = (ends[0] - ends[1]) / 2e-6
            assert float(gradient @ direction) == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_gradients_are_finite_where_the_processed_clip_is_silent() -> None:
    clean, processed = _speech(8000), _speech(8000, 1)
    processed[2000:5000] = 0.0
    processed.requires_grad_()
    found = STOI(10000, torch.float64)(clean, processed)
    (found["stoi"] + found["estoi"]).backward()
    assert processed.grad is not None and processed.grad.isfinite().all()


def test_constant_bands_count_nothing_in_estoi() -> None:
    """A period of 128 samples repeats in every frame, so no band changes."""
    model = STOI(10000, torch.float64)
    constant = torch.cat((_speech(128),) * 60)
    found = model(_speech(128 * 60), constant)
    assert abs(float(found["estoi"])) < 0.2 and found["estoi_segments"].isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fs": 0}, "whole number"),
        ({"fs": 22050.5}, "whole number"),
        ({"fs": "16000"}, "whole number"),
        ({"fs": 10007}, "ratio of small whole numbers"),
        ({"fs": 16000, "dtype": torch.float16}, "float32 or torch.float64"),
    ],
)
def test_refused_arguments(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        STOI(**wrong)


@pytest.mark.parametrize(
    "pair",
    [
        (torch.zeros(300), torch.zeros(301)),
        (torch.zeros(1, 2, 300), torch.zeros(1, 2, 300)),
        (torch.zeros(300, dtype=torch.int16), torch.zeros(300, dtype=torch.int16)),
    ],
)
def test_refused_pairs(pair: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ShapeError, match="expected"):
        STOI(16000)(*pair)


def test_not_a_number_stays_one() -> None:
    model, x, bad = STOI(10000), _speech(8000), _speech(8000)
    bad[4000] = math.nan
    assert model(bad, x)["stoi"].isnan() and model(x, bad)["stoi"].isnan()


class TestSTOI(ModelConformance):
    """The job model: channel 0 is clean, channel 1 is processed."""

    model = "stoi"
    seconds = 0.5

    def test_silence_is_finite(self, extractor: Extractor) -> None:
        """Silence has no score: a job quarantines the pair."""
        silence = np.zeros((2, 8000), np.float32)
        (made,) = extractor.extract([silence])
        assert np.isnan(made["stoi"]).all() and np.isnan(made["estoi"]).all()
        assert not made["kept"].any()
