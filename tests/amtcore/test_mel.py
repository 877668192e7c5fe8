"""Mel spectra and cepstra: torchaudio's values, whatever the clip, its neighbours and chunks."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio

from amtcore.errors import ParameterError
from amtcore.features.mel import BLOCK_FRAMES, MelParams, mel_centres_hz
from amtcore.features.registry import build_extractor
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close

FS_HZ = 16000
BLOCKWISE = Tolerance(1e-5, "float32 in another order", 1e-5)


def _clip(samples: int, seed: int = 0) -> np.ndarray:
    return (0.05 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


class TestMelConformance(ModelConformance):
    model = "melspectrogram"
    other_params = {"n_mels": 40}  # noqa: RUF012
    seconds = 1.5  # several blocks


class TestMelOfWholeClips(ModelConformance):
    model = "melspectrogram"
    params = {"top_db": 40.0, "center": False, "hop_length": 100, "n_fft": 512}  # noqa: RUF012
    other_params = {"top_db": 30.0}  # noqa: RUF012


class TestMelSparse(ModelConformance):
    """Frames further apart than they are long."""

    model = "melspectrogram"
    params = {"hop_length": 999, "pad_mode": "constant", "log": "ln"}  # noqa: RUF012
    other_params = {"log": "log10"}  # noqa: RUF012
    seconds = 5.0


class TestMfccConformance(ModelConformance):
    model = "mfcc"
    other_params = {"n_mfcc": 20}  # noqa: RUF012
    seconds = 1.5


class TestMfccOfWholeClips(ModelConformance):
    model = "mfcc"
    params, other_params = {"top_db": 80.0}, {"top_db": 60.0}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n_fft": 512, "win_length": 400, "hop_length": 128, "n_mels": 40, "window": "hamming"},
        {"mel_scale": "slaney", "norm": "slaney", "f_min": 50.0, "f_max": 7600.0},
        {"power": 1.0, "center": False},
        {"pad_mode": "constant", "hop_length": 700},
    ],
    ids=str,
)
def test_values_are_those_of_torchaudio(params: dict[str, Any]) -> None:
    clip = _clip(12345)
    extractor = build_extractor("melspectrogram", params={**params, "log": None})
    (got,) = (made["mel"] for made in extractor.extract([clip]))
    windows = {"hamming": torch.hamming_window}
    asked = {"n_fft": 400, "hop_length": 160, "n_mels": 80, **params}
    window = windows.get(asked.pop("window", ""), torch.hann_window)
    transform = torchaudio.transforms.MelSpectrogram(FS_HZ, window_fn=window, **asked)
    expected = transform(torch.from_numpy(clip)).T.numpy()
    assert len(expected) - len(got) == (1 if asked.get("center", True) else 0)
    assert_close(got, expected[: len(got)], BLOCKWISE, str(params))
    assert extractor.streams[0].frame_rate_hz == FS_HZ / asked["hop_length"]


def test_decibels_and_cepstra_are_those_of_torchaudio() -> None:
    clip = _clip(20000)
    mel = {"n_fft": 400, "hop_length": 160, "n_mels": 40}
    (got,) = build_extractor("mfcc", params={"top_db": 80.0}).extract([clip])
    transform = torchaudio.transforms.MFCC(FS_HZ, n_mfcc=13, melkwargs=mel)
    expected = transform(torch.from_numpy(clip)).T.numpy()
    assert_close(got["mfcc"], expected[: len(got["mfcc"])], Tolerance(1e-4, "dB", 1e-3))
    (streamed,) = build_extractor("mfcc").extract([clip])
    assert_close(streamed["mfcc"], got["mfcc"], Tolerance(1e-4, "nothing is 80 dB down", 1e-3))
    for power in (1.0, 2.0):
        params = {"n_mels": 40, "power": power, "ref": 1e-3**power, "floor": 1e-20}
        (made,) = build_extractor("melspectrogram", params=params).extract([clip])
        plain = torchaudio.transforms.MelSpectrogram(FS_HZ, power=power, **mel)
        kind = "power" if power == 2.0 else "magnitude"
        decibels = torchaudio.transforms.AmplitudeToDB(kind)(plain(torch.from_numpy(clip))) + 60.0
        assert_close(made["mel"], decibels.T[: len(made["mel"])], Tolerance(1e-4, "dB", 1e-3))


@pytest.mark.parametrize("scale", ["htk", "slaney"])
def test_a_tone_is_loudest_in_the_band_of_its_frequency(scale: str) -> None:
    params = MelParams(mel_scale=scale, n_fft=2048, n_mels=40)
    centres_hz = mel_centres_hz(params, FS_HZ)
    asked = {"mel_scale": scale, "n_fft": 2048, "n_mels": 40}
    extractor = build_extractor("melspectrogram", params=asked)
    assert extractor.streams[0].fc_hz == centres_hz
    t = np.arange(FS_HZ) / FS_HZ
    for band in (5, 15, 25, 38):
        tone = np.sin(2 * np.pi * centres_hz[band] * t).astype(np.float32)
        (made,) = extractor.extract([tone])
        assert (made["mel"][10:-10].argmax(1) == band).all(), centres_hz[band]
    bins_hz = torch.linspace(0, FS_HZ // 2, 100001)
    peaks = torchaudio.functional.melscale_fbanks(
        100001, 0.0, FS_HZ / 2, 40, FS_HZ, mel_scale=scale
    ).argmax(0)
    np.testing.assert_allclose(centres_hz, bins_hz[peaks], atol=0.1)


def test_a_short_clip_is_reflected_again_and_again() -> None:
    """200 samples of padding around 170: torch refuses, the first frame is there all the same."""
    clip = _clip(170)
    extractor = build_extractor("melspectrogram", params={"log": None})
    (made,) = extractor.extract([clip])
    assert made["mel"].shape == (1, 80)
    padded = np.pad(clip, 200, mode="reflect")
    transform = torchaudio.transforms.MelSpectrogram(
        FS_HZ, n_fft=400, hop_length=160, n_mels=80, center=False
    )
    expected = transform(torch.from_numpy(padded)).T[:1]
    assert_close(made["mel"], expected, BLOCKWISE)


def test_memory_of_a_long_signal_is_bounded() -> None:
    stream = build_extractor("melspectrogram").open_stream()
    for _ in range(30):
        stream.push(_clip(FS_HZ))
    held = stream._stream._waiting
    assert len(held) <= BLOCK_FRAMES * 160 + 400 + FS_HZ


@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        ("melspectrogram", {"f_min": 5000.0, "f_max": 400.0}, "f_min < f_max, got 5000 and 400"),
        ("melspectrogram", {"f_max": 9000.0}, "at most half the sampling rate"),
        ("melspectrogram", {"win_length": 500}, r"win_length must be 1 to n_fft \(400\), got 500"),
        ("melspectrogram", {"hop_length": 0}, "hop_length must be above 0 and at most 1e"),
        ("melspectrogram", {"n_fft": 10**30}, "n_fft must be above 0 and at most 1e"),
        ("melspectrogram", {"n_mels": 1e9}, "n_mels must be above 0 and at most 10000"),
        ("melspectrogram", {"power": math.inf}, "power must be above 0 and at most 10"),
        ("melspectrogram", {"log": "dB"}, "'log': expected 'db' or 'ln' or 'log10' or null"),
        ("melspectrogram", {"log": "ln", "top_db": 80.0}, "goes with log 'db'"),
        ("mfcc", {"n_mfcc": 41}, r"n_mfcc must be 1 to n_mels \(40\), got 41"),
        ("mfcc", {"log": None}, "log must be db, ln or log10"),
        ("mfcc", {"nmfcc": 3}, "did you mean 'n_mfcc'"),
    ],
)
def test_wrong_parameters(model: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_extractor(model, params=params)


def test_a_rate_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"whole sampling rate in Hz, got 16000\.5"):
        build_extractor("melspectrogram", fs_hz=16000.5)


def test_a_compiler_that_fails_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Any, **_: Any) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no compiler\nhere")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    extractor = build_extractor("melspectrogram", params={"compile": True})
    clip = _clip(30000)
    with caplog.at_level(logging.WARNING):
        (made,) = extractor.extract([clip])
    assert [record.getMessage() for record in caplog.records] == [
        "melspectrogram runs without torch.compile, which failed: RuntimeError: no compiler here"
    ]
    (plain,) = build_extractor("melspectrogram").extract([clip])
    np.testing.assert_array_equal(made["mel"], plain["mel"])
