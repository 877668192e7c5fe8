"""SRMR: stored outputs of every stage and variant, edges, levels, gradients, jobs."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import Tensor

from amtcore import SRMR
from amtcore.errors import NonFiniteError, ParameterError, ShapeError
from amtcore.features.registry import build_extractor
from amtcore.models.frame_module import Outputs
from amtcore.models.srmr import BANDS, centre_frequencies, erb_hz
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = names("srmr")
STAGES = ("gammatone_sel@step", "envelope_sel@step", "modulated_mid@step", "fast_envelope_sel@4")
SCORES = [(name, key) for name in FILES for key in load(name) if key.startswith("srmr_")]
CASES = [(name, key) for name in FILES for key in STAGES] + [
    (name, key.replace("srmr", part, 1))
    for name, key in SCORES
    for part in ("srmr", "energy", "avg_energy")
    if part == "srmr" or "corrected" not in key
]
DOUBLE = Tolerance(1e-9, "order of sums")
SINGLE = Tolerance(1e-3, "single-precision recurrences")
FAST_SINGLE = Tolerance(1e-4, "single-precision spectra")
#: Small enough for finite differences and plain loops.
SMALL: dict[str, Any] = {"fs": 1000, "n_channels": 3, "low_freq": 60.0, "max_cf": 100.0}


#: Models that tests only read: the design of their filters takes 0.1 CPU seconds.
built = functools.cache(SRMR)


def _variant(key: str) -> dict[str, Any]:
    """Arguments of the variant in an array's name."""
    words = key.split("_")
    return {
        "fast": "fast" in words,
        "norm": "norm" in words,
        "framing": words[-1],
        "bandwidth": "corrected" if "corrected" in words else "srmrpy",
    }


def _model(name: str, dtype: str, **arguments: Any) -> tuple[Tensor, SRMR, dict[str, np.ndarray]]:
    stored = load(name)
    model = built(stored["fs"].item(), dtype=DTYPES[dtype], **arguments)
    return torch.from_numpy(stored["input"]).to(model.dtype), model, stored


@functools.cache
def _found(name: str, dtype: str, *arguments: tuple[str, Any]) -> tuple[SRMR, Outputs]:
    """Return a model and its outputs, which several stored arrays belong to."""
    x, model, _ = _model(name, dtype, **dict(arguments))
    return model, model.outputs(x)


@functools.cache
def _envelope(name: str, dtype: str, fast: bool) -> tuple[SRMR, Tensor]:
    """Return a model and its envelopes, which two stored arrays are made of."""
    x, model, _ = _model(name, dtype, fast=fast)
    return model, model.envelope(x)


def _stage(name: str, key: str, dtype: str) -> Tensor:
    stored, fast = load(name), "fast" in key
    chosen, step = stored["sel"], int(stored["step"])
    if key.startswith("gammatone"):
        x, model, _ = _model(name, dtype)
        return model.filtered(x)[chosen].T[::step]
    model, envelope = _envelope(name, dtype, fast)
    if not key.startswith("modulated"):
        return envelope[chosen].T[:: 4 if fast else step]
    bands = model.modulated(envelope)[0].unflatten(0, (-1, BANDS))[int(chosen[1])]
    return bands[stored["modulated_sel"]].T[::step]


def _param(name: str, key: str, dtype: str) -> Any:
    """Every file in one precision, and in both in `make test-long`; every array in both."""
    daily = FILES.index(name) % 2 == list(DTYPES).index(dtype)
    return pytest.param(name, key, dtype, marks=[pytest.mark.long] * (not daily))


@pytest.mark.parametrize(
    ("name", "key", "dtype"), [_param(*case, dtype) for case in CASES for dtype in DTYPES]
)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    stored, fast = load(name), "fast" in key
    tolerance = DOUBLE if dtype == "float64" else FAST_SINGLE if fast else SINGLE
    if key in STAGES:
        # Stored stages end with the clip, or with the samples that SRMRpy pads.
        got = _stage(name, key, dtype)[: len(stored[key])]
        assert_close(got, stored[key], tolerance, f"{name} {key}")
        return
    model, found = _found(name, dtype, *_variant(key).items())
    if key.startswith("srmr"):
        got = found["score"][0, 0]
        bands = model.last_band(found["modulation_spectrogram"].unflatten(-1, (-1, BANDS))[0])
        assert int(bands) == int(stored[key.replace("srmr", "kstar", 1)])
    elif key.startswith("avg"):
        got = found["modulation_spectrogram"].unflatten(-1, (-1, BANDS))[0]
    else:
        got = found["energy"].unflatten(-1, (-1, BANDS))[stored["energy_frames"]]
    assert_close(got, stored[key], tolerance, f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_frequencies_and_counts(name: str) -> None:
    for fast in (False, True):
        x, model, stored = _model(name, "float64", fast=fast)
        assert_close(model.fc_hz, stored["fc_hz"], DOUBLE)
        assert_close(erb_hz(model.fc_hz), stored["erb_hz"], DOUBLE)
        assert_close(model.modulation_hz, stored["modulation_fc_hz"], DOUBLE)
        frames = model.grids["energy"].n_frames(len(x))
        assert frames == int(stored["n_frames_fast" if fast else "n_frames_full"])
    assert model.envelope(x).shape[-1] == int(stored["fast_n_columns"])
    assert SRMR(16000, norm=True).max_cf == 30.0 and SRMR(16000).max_cf == 128.0


def test_published_centre_frequencies() -> None:
    known = [125.0, 176.8745626, 236.3543259, 304.5542695]
    fc_hz = centre_frequencies(16000.0, 23, 125.0)
    assert_close(fc_hz[:4], known, Tolerance(1e-9, "printed digits"))
    assert float(fc_hz[-1]) == pytest.approx(6947.845076)


@pytest.mark.parametrize("framing", ["srmrpy", "buffer"])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 319, 320, 1000])
def test_energies_are_sums_over_windows(framing: str, length: int) -> None:
    """Plain direct-form filters and one sum a window are the second route."""
    model = built(**SMALL, framing=framing, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    envelope = torch.rand(3, length, dtype=torch.float64, generator=generator)
    w = np.tan(np.pi * model.modulation_hz.numpy() / 1000)
    y = np.stack([
        lfilter([g / 2, 0, -g / 2], [1 + g / 2 + g * g, 2 * g * g - 2, 1 - g / 2 + g * g], each)
        for each in envelope.numpy() for g in w
    ])  # fmt: skip
    period, begin = (255, 64 - 256) if framing == "buffer" else (256, 0)
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(256) / period)
    padded = np.pad(y, ((0, 0), (256, 512)))
    if framing == "buffer":
        frames = -(-length // 64)
    else:
        frames = max(0, 1 + (length - 256) // 64)
    wanted = [
        ((padded[:, 256 + begin + 64 * i :][:, :256] * window) ** 2).sum(-1) for i in range(frames)
    ]
    got = model.energies(envelope)
    assert got.shape == (frames, 24)
    if frames:
        assert_close(got, wanted, DOUBLE)
        learning = model.energies(envelope.clone().requires_grad_()).detach()
        assert_close(learning, got, Tolerance(1e-12, "two kernels"))


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("gain", [1e-30, 1e-3, 7.0, 1e30])
def test_gain_does_not_change_the_score(fast: bool, gain: float) -> None:
    x, model = _noise(8000), built(8000, fast=fast, norm=True)
    assert_close(model(gain * x)["score"], model(x)["score"], Tolerance(1e-5, "rounding of gains"))


@pytest.mark.parametrize("fast", [False, True])
def test_reverberation_lowers_the_score(fast: bool) -> None:
    dry, wet = (_model(name, "float32", fast=fast) for name in
                ("srmr__speech_16000", "srmr__speech_reverb_16000"))  # fmt: skip
    assert float(dry[1](dry[0])["score"]) > 1.15 * float(wet[1](wet[0])["score"])


@pytest.mark.parametrize("framing", ["srmrpy", "buffer"])
@pytest.mark.parametrize("fast", [False, True])
def test_silence_and_short_clips(fast: bool, framing: str) -> None:
    for norm in (False, True):
        model = built(8000, fast=fast, framing=framing, norm=norm)
        silent = model(torch.zeros(8000))
        assert math.isnan(float(silent["score"])) and not silent["energy"].any()
        assert len(silent["energy"]) and int(model.last_band(torch.zeros(23, BANDS))) == 5
        short = model(_noise(100))
        assert short["energy"].shape == (int(framing == "buffer" and not fast), 23 * BANDS)
        assert short["score"].shape == (1, 1)
        assert math.isnan(float(short["score"])) == (len(short["energy"]) == 0)
        empty = model(torch.zeros(0))
        assert [len(values) for values in empty.values()] == [0, 0, 0]


@pytest.mark.parametrize("fast", [False, True])
def test_a_batch_equals_its_items(fast: bool) -> None:
    x, model = 0.1 * _noise(2, 2, 8000), built(8000, fast=fast)
    found = model(x)
    assert found["score"].shape == (2, 2, 1, 1)
    for i in range(2):
        for j in range(2):
            alone = model.outputs(x[i, j], ("score", "energy"))
            assert list(alone) == ["score", "energy"]
            assert all(torch.equal(values, found[name][i, j]) for name, values in alone.items())
    none = model(x[:0])
    assert none["score"].shape == (0, 2, 1, 1) and none["energy"].shape[0] == 0


@pytest.mark.parametrize("arguments", [{}, {"fast": True, "max_cf": 60.0}, {"framing": "buffer"}])
def test_gradients(arguments: dict[str, Any]) -> None:
    model = built(**{**SMALL, **arguments}, dtype=torch.float64)
    x, along = _noise(2, 700, dtype=torch.float64)

    def value(signal: Tensor) -> Tensor:
        found = model.outputs(signal, ("score", "energy"))
        return found["score"].sum() + found["energy"].sum().log()

    learner = x.clone().requires_grad_()
    value(learner).backward()
    got, step = float((learner.grad * along).sum()), 1e-6
    wanted = float(value(x + step * along) - value(x - step * along)) / (2 * step)
    assert got == pytest.approx(wanted, rel=1e-5)
    silent = torch.zeros(700, dtype=torch.float64, requires_grad=True)
    model.outputs(silent, ("energy",))["energy"].sum().backward()
    assert bool(torch.isfinite(silent.grad).all())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fs": 500}, "fs must be a sampling rate"),
        ({"n_channels": 0}, "n_channels"),
        ({"low_freq": 4000.0}, "low_freq 4000 Hz must lie below fs/2"),
        ({"min_cf": 200.0}, "min_cf <= max_cf"),
        ({"fast": True, "max_cf": 200.0}, "max_cf < 200 Hz"),
        ({"framing": "hann"}, "framing must be one of srmrpy, buffer"),
        ({"bandwidth": "wide"}, "bandwidth must be one of srmrpy, corrected"),
        ({"norm": 1}, "norm must be True or False"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        SRMR(**({"fs": 8000} | arguments))


def test_wrong_signals_and_streams() -> None:
    model = built(8000)
    for wrong in (torch.zeros(100, dtype=torch.int16), torch.tensor(1.0)):
        with pytest.raises(ShapeError):
            model(wrong)
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteError):
            model(torch.tensor([0.0, bad, 0.0]))
    with pytest.raises(ParameterError, match="no output 'srmr'"):
        model.outputs(torch.zeros(100), ("srmr",))
    with pytest.raises(ParameterError, match="Hilbert"):
        model.stream(torch.zeros(100))
    assert "n_channels=23" in repr(model)


def test_a_job_describes_channels_and_bands() -> None:
    extractor = build_extractor("srmr", fs_hz=8000, streams={"energy": {}, "score": {}})
    energy, _ = extractor.streams
    assert energy.width == 23 * BANDS and energy.frame_rate_hz == pytest.approx(15.625)
    assert len(energy.fc_hz) == 23 and energy.mfc_hz[7] == energy.mfc_hz[15] == 128.0
    assert list(energy.channel_offsets[:3]) == [0, 8, 16]
    (made,) = extractor.extract([np.zeros(8000, np.float32)])
    assert made["score"].tolist() == [[0.0]], "silence has no score"


class TestSRMR(ModelConformance):
    model, fs_hz, seconds = "srmr", 8000.0, 0.6
    other_params = {"norm": True}  # noqa: RUF012


class TestSRMROfSpectra(ModelConformance):
    """At a rate whose hop is no whole number of columns, with windows that begin outside."""

    model, fs_hz, seconds = "srmr", 11025.0, 0.6
    params = {"fast": True, "framing": "buffer"}  # noqa: RUF012
    other_params = {"fast": True, "framing": "buffer", "n_channels": 20}  # noqa: RUF012
