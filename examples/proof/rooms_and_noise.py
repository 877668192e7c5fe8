"""What stands between a speaker and an ear: noise of several kinds, and the echoes of a room.

The kinds that a network is trained on are not those that it is tested on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.signal import fftconvolve, lfilter

from examples.proof.words import RATE_HZ, SAMPLES, Wave

Rng = np.random.Generator


def white(rng: Rng) -> Wave:
    """The same power at all frequencies."""
    return rng.standard_normal(SAMPLES)


def pink(rng: Rng) -> Wave:
    """Power falls with 1/f above 50 Hz."""
    spectrum = np.fft.rfft(rng.standard_normal(SAMPLES))
    hz = np.fft.rfftfreq(SAMPLES, 1 / RATE_HZ)
    return np.fft.irfft(spectrum / np.sqrt(np.maximum(hz, 50.0)), SAMPLES)


def rumble(rng: Rng) -> Wave:
    """Noise below some 300 Hz, as in a car."""
    return np.asarray(lfilter([1.0], np.poly([0.95, 0.9]), rng.standard_normal(SAMPLES)))


def hum(rng: Rng) -> Wave:
    """A machine: forty harmonics of 70 to 160 Hz, whose strength turns with a slow shaft."""
    seconds = np.arange(SAMPLES) / RATE_HZ
    base_hz, shaft_hz = rng.uniform(70, 160), rng.uniform(2, 9)
    tones = [
        np.sin(2 * np.pi * (k * base_hz * seconds + rng.random())) / np.sqrt(k)
        for k in range(1, 41)
    ]
    return np.sum(tones, axis=0) * (1 + 0.7 * np.sin(2 * np.pi * shaft_hz * seconds))


def bursts(rng: Rng) -> Wave:
    """Noise of the long-term spectrum of speech, switched on and off 3 to 8 times a second."""
    carrier = lfilter([1.0], [1.0, -0.9], rng.standard_normal(SAMPLES))
    phase = rng.uniform(3, 8) * np.arange(SAMPLES) / RATE_HZ + rng.random()
    return np.asarray(carrier * (0.1 + (phase % 1.0 < 0.5)))


Noise = Callable[[Rng], Wave]
TRAIN_NOISES: Mapping[str, Noise] = {"white": white, "pink": pink, "rumble": rumble}
TEST_NOISES: Mapping[str, Noise] = {"hum": hum, "bursts": bursts}


def babble(voices: list[Wave]) -> Noise:
    """Four people who talk at a time, cut out of what they say."""

    def noise(rng: Rng) -> Wave:
        total = np.zeros(SAMPLES)
        for _ in range(4):
            speech = np.concatenate([voices[i] for i in rng.integers(len(voices), size=6)])
            start = rng.integers(len(speech) - SAMPLES)
            total += speech[start : start + SAMPLES]
        return total

    return noise


def room(rng: Rng, t60_s: float) -> Wave:
    """Response of a room: the direct sound, then noise that has lost 60 dB after t60_s."""
    seconds = np.arange(round(0.6 * t60_s * RATE_HZ)) / RATE_HZ
    tail = rng.standard_normal(len(seconds)) * 10 ** (-3 * seconds / t60_s)
    tail *= np.sqrt(0.5 / np.sum(tail**2))
    return np.concatenate([[1.0], np.zeros(round(0.002 * RATE_HZ)), tail])


def heard(speech: Wave, response: Wave | None) -> Wave:
    """A word in a room, in a clip of SAMPLES, from 50 ms on; what is longer is cut off."""
    clip = np.zeros(SAMPLES)
    start = round(0.05 * RATE_HZ)
    wave = speech if response is None else fftconvolve(speech, response)
    wave = wave[: SAMPLES - start]
    clip[start : start + len(wave)] = wave
    return clip


def mixed(speech: Wave, noise: Wave, snr_db: float) -> Wave:
    """Both, with their powers over the clip in the given ratio."""
    gain = np.sqrt(np.mean(speech**2) / np.mean(noise**2)) * 10 ** (-snr_db / 20)
    return speech + gain * noise
