"""Loudness in sones of speech whose level was evened out, by RMS and by ITU-R BS.1770.

Every voice says a row of digits in every language. Clips are brought to one RMS, and to one
loudness by BS.1770 (torchaudio.functional.loudness); Glasberg2002 and Moore2016 then say how loud
they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio

import earmill
from examples.proof.words import COMMANDS, RATE_HZ, TEST_VOICES, TRAIN_VOICES, Utterance, speak

DIGITS = "3 1 4 1 5 9 2"
LUFS = -26.0
RMS_DB = -26.0
# A digital RMS of 1 in dB SPL: -26 dB are 65 dB SPL, as one talks.
RMS1_DB_SPL = 91
MODELS = ("glasberg2002", "moore2016")
WAYS = ("RMS", "BS.1770")


def write_clips(folder: Path, voices: tuple[str, ...]) -> list[str]:
    """Every clip by both ways; the names of the clips."""
    wanted = [
        Utterance(DIGITS, "digits", language, voice, 165, 50)
        for language in COMMANDS
        for voice in voices
    ]
    for utterance, wave in zip(wanted, speak(wanted), strict=True):
        lufs = float(torchaudio.functional.loudness(torch.tensor(wave)[None], RATE_HZ))
        gains = {"RMS": 10 ** (RMS_DB / 20), "BS.1770": 10 ** ((LUFS - lufs) / 20)}
        for way, gain in gains.items():
            path = folder / way / f"{utterance.name}.flac"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, gain * wave, RATE_HZ, subtype="PCM_24")
    return [utterance.name for utterance in wanted]


def measure(folder: Path, *, quick: bool) -> dict[str, dict[str, np.ndarray]]:
    """Model to way to the loudness of each clip in sone: the maximum of the long-term trace."""
    voices = TEST_VOICES if quick else (*TRAIN_VOICES, *TEST_VOICES)
    names = write_clips(folder / "clips", voices)
    streams = {"long_term_loudness": {"frame_rate_hz": 100}}
    for model in MODELS:
        earmill.extract(
            {
                "name": f"proof-{model}",
                "source": {"kind": "files", "uri": str(folder / "clips")},
                "audio": {"calibration": {"rms1_db_spl": RMS1_DB_SPL}},
                "extract": [{"model": model, "streams": streams}],
                "output": {
                    "uri": str(folder / model),
                    "formats": ["parquet"],
                    "dtype": "float32",
                },
                "run": {"executor": "local", "workers": 1, "device": "cpu"},
            }
        )
    return {
        model: {
            way: _loudest(folder / model, [f"{way}/{name}.flac" for name in names]) for way in WAYS
        }
        for model in MODELS
    }


def _loudest(output: Path, names: list[str]) -> np.ndarray:
    dataset = earmill.open_features(str(output))
    return np.array(
        [float(np.max(dataset.by_id(name).features["long_term_loudness"])) for name in names]
    )
