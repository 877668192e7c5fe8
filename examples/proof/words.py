"""Twenty words in four languages, spoken by espeak-ng in voices of which some are held out.

A class is a meaning: "three", "drei" and "trois" are one. Digits are given to espeak-ng as figures,
which it reads in the language of the voice.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

Wave = NDArray[np.float64]

RATE_HZ = 16000
CLIP_S = 0.9
SAMPLES = round(CLIP_S * RATE_HZ)
COMMANDS: Mapping[str, Sequence[str]] = {
    "en": ("yes", "no", "up", "down", "left", "right", "stop", "go", "on", "off"),
    "de": ("ja", "nein", "hoch", "runter", "links", "rechts", "halt", "los", "an", "aus"),
    "fr": ("oui", "non", "haut", "bas", "gauche", "droite", "arrête", "allez", "marche", "éteint"),
    "es": ("sí", "no", "sube", "baja", "izquierda", "derecha", "para", "sigue", "abre", "cierra"),
}
LABELS = (*map(str, range(10)), *COMMANDS["en"])
# Variants of espeak-ng's voices, men's and women's in both lists.
TRAIN_VOICES = ("m1", "m2", "m3", "m4", "f1", "f2", "f3", "klatt")
TEST_VOICES = ("m7", "f4", "f5")
# The speech babble of the test is made of: nobody who is in a list above.
BABBLE_VOICES = ("m5", "m6", "m8", "klatt4")


@dataclass(frozen=True)
class Utterance:
    """One word as it is spoken: what and by whom, in words a minute and espeak-ng's 0 to 99."""

    text: str
    label: str
    language: str
    voice: str
    speed: int
    pitch: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.label}-{self.language}-{self.voice}"


def utterances(voices: Sequence[str], rng: np.random.Generator) -> list[Utterance]:
    """Every word of every language by every voice, each at a speed and pitch of its own."""
    return [
        Utterance(
            text, label, language, voice, int(rng.integers(150, 190)), int(rng.integers(35, 65))
        )
        for language, commands in COMMANDS.items()
        for label, text in zip(LABELS, (*map(str, range(10)), *commands), strict=True)
        for voice in voices
    ]


def spoken(utterance: Utterance) -> Wave:
    """The word at RATE_HZ, without the silence around it, at an RMS of 1."""
    command = ["espeak-ng", "-v", f"{utterance.language}+{utterance.voice}", "--stdout"]
    command += ["-s", str(utterance.speed), "-p", str(utterance.pitch), utterance.text]
    done = subprocess.run(command, check=True, capture_output=True)
    wave, rate_hz = soundfile.read(io.BytesIO(done.stdout))
    wave = soxr.resample(wave, rate_hz, RATE_HZ, quality="HQ")
    loud = np.flatnonzero(np.abs(wave) > 0.02 * np.abs(wave).max())
    wave = wave[loud[0] : loud[-1] + 1]
    return np.asarray(wave / np.sqrt(np.mean(wave**2)))


def speak(wanted: Iterable[Utterance]) -> list[Wave]:
    """Many words; espeak-ng's processes run side by side."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(spoken, wanted))
