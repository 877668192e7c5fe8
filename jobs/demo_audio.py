"""Two minutes of generated speech-like and music-like sound, in several rates and containers.

Speech-like: a glottal pulse train with falling intonation, shaped by the formants of five vowels,
broken by fricatives and pauses at a syllable rate near 4 Hz, where the modulation spectrum of
speech peaks. Music-like: plucked chords over a beat at 2 Hz. Two more files are damaged on purpose.
Nothing is recorded, so nothing needs a licence; the seed is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

Wave = NDArray[np.float64]

SEED = 20260401
WRITE_FRAMES = 4096  # libsndfile's Vorbis encoder overflows its stack on long writes.
RMS = 0.05  # 74 dB SPL where an RMS of 1.0 is 100 dB SPL: loud speech.
# First three formants in Hz of an adult male voice, five vowels (Peterson and Barney 1952).
VOWELS_HZ = ((270, 2290, 3010), (530, 1840, 2480), (730, 1090, 2440), (570, 840, 2410),
             (300, 870, 2240))  # fmt: skip
FORMANT_BANDWIDTHS_HZ = (60.0, 90.0, 150.0)
# A minor, F major, C major, G major: MIDI notes.
CHORDS = ((57, 60, 64), (53, 57, 60), (48, 52, 55), (55, 59, 62))


@dataclass(frozen=True)
class Clip:
    name: str  # path below the corpus folder
    make: Callable[[np.random.Generator, int, float], Wave]
    seconds: float
    rate_hz: int
    subtype: str  # soundfile's name of the sample format
    channels: int = 1


def speech(rng: np.random.Generator, rate_hz: int, seconds: float) -> Wave:
    """Generate syllables of vowels and fricatives, 3 to 5 a second, with random pauses."""
    parts: list[Wave] = []
    pitch_hz = rng.uniform(95, 210)
    total = 0
    while total < seconds * rate_hz:
        noise = rng.standard_normal(int(rng.uniform(0.03, 0.09) * rate_hz))
        fricative = _faded(0.06 * _filtered(noise, [1.0, -0.9], [1.0]), rate_hz, 0.01)
        vowel = _vowel(rng, rate_hz, rng.uniform(0.10, 0.22), pitch_hz * rng.uniform(0.85, 1.2))
        gap = np.zeros(int(rate_hz * (0.35 if rng.random() < 0.12 else rng.uniform(0.01, 0.06))))
        parts += [fricative, vowel, gap]
        total += len(fricative) + len(vowel) + len(gap)
    return np.concatenate(parts)[: round(seconds * rate_hz)]


def music(rng: np.random.Generator, rate_hz: int, seconds: float) -> Wave:
    """Generate plucked chords that change every second, over a percussive beat at 2 Hz."""
    n = round(seconds * rate_hz)
    out = np.zeros(n)
    hit_s = np.arange(int(0.12 * rate_hz)) / rate_hz
    shift = int(rng.integers(-3, 4))

    def add(start: int, part: Wave) -> None:
        room = out[start : start + len(part)]
        room += part[: len(room)]

    for beat in range(int(seconds * 2) + 1):
        start = round(beat * rate_hz / 2)
        chord = CHORDS[(beat // 2) % len(CHORDS)]
        note = chord[beat % len(chord)] + shift + (12 if rng.random() < 0.3 else 0)
        for midi, level in [(note, 1.0), *((other + shift, 0.3) for other in chord)]:
            add(start, level * _pluck(rate_hz, 440.0 * 2 ** ((midi - 69) / 12)))
        add(start, 0.5 * np.exp(-45 * hit_s) * rng.standard_normal(len(hit_s)))
    return out


def _vowel(rng: np.random.Generator, rate_hz: int, seconds: float, pitch_hz: float) -> Wave:
    n = int(seconds * rate_hz)
    # Pitch falls by a fifth of an octave; each wrap of the phase is one glottal pulse.
    phase = np.cumsum(pitch_hz * 2 ** (-np.linspace(0, 0.2, n)) / rate_hz)
    source = np.diff(np.floor(phase), prepend=0.0) + 0.01 * rng.standard_normal(n)
    source = _filtered(source, [1.0], [1.0, -0.96])
    wave = np.zeros(n)
    formants_hz = VOWELS_HZ[rng.integers(len(VOWELS_HZ))]
    for rank, (hz, width_hz) in enumerate(zip(formants_hz, FORMANT_BANDWIDTHS_HZ, strict=True)):
        radius = np.exp(-np.pi * width_hz / rate_hz)
        poles = [1.0, -2 * radius * np.cos(2 * np.pi * hz / rate_hz), radius**2]
        wave += _filtered(source, [1.0 - radius], poles) / (rank + 1)
    return _faded(wave / (np.abs(wave).max() + 1e-9), rate_hz, 0.02)


def _filtered(x: Wave, b: Sequence[float], a: Sequence[float]) -> Wave:
    """Filter a short signal by its transfer function on the unit circle. Zero padding to at least
    twice the length keeps the circular part out of the result; a power of two is transformed fast.
    scipy is not used, because its import takes seconds."""
    n = 1 << (2 * len(x) - 1).bit_length()
    response = np.fft.rfft(b, n) / np.fft.rfft(a, n)
    return np.fft.irfft(np.fft.rfft(x, n) * response, n)[: len(x)]


@lru_cache(maxsize=256)
def _pluck(rate_hz: int, pitch_hz: float) -> Wave:
    t = np.arange(int(0.9 * rate_hz)) / rate_hz
    partials = [k for k in range(1, 9) if k * pitch_hz < 0.45 * rate_hz]
    tone = sum(np.exp(-(2 + k) * t) / k * np.sin(2 * np.pi * k * pitch_hz * t) for k in partials)
    return _faded(np.asarray(tone), rate_hz, 0.004)


def _faded(wave: Wave, rate_hz: int, seconds: float) -> Wave:
    n = min(int(seconds * rate_hz), len(wave) // 2)
    ramp = np.sin(0.5 * np.pi * np.arange(n) / max(n, 1)) ** 2
    wave = wave.copy()
    wave[:n] *= ramp
    wave[len(wave) - n :] *= ramp[::-1]
    return wave


CLIPS = (
    Clip("speech/01.wav", speech, 9.0, 16000, "PCM_16"),
    Clip("speech/02.flac", speech, 12.0, 44100, "PCM_16"),
    Clip("speech/03.flac", speech, 8.0, 22050, "PCM_24"),
    Clip("speech/04.ogg", speech, 10.0, 32000, "VORBIS"),
    Clip("speech/05.mp3", speech, 7.0, 24000, "MPEG_LAYER_III"),
    Clip("speech/06.opus", speech, 11.0, 48000, "OPUS"),
    Clip("speech/07.wav", speech, 5.0, 44100, "FLOAT", channels=2),
    Clip("music/01.wav", music, 10.0, 44100, "PCM_24", channels=2),
    Clip("music/02.flac", music, 12.0, 48000, "PCM_16", channels=2),
    Clip("music/03.ogg", music, 9.0, 44100, "VORBIS", channels=2),
    Clip("music/04.mp3", music, 11.0, 44100, "MPEG_LAYER_III", channels=2),
    Clip("music/05.opus", music, 8.0, 48000, "OPUS"),
    Clip("music/06.wav", music, 8.0, 22050, "PCM_16"),
)
DAMAGED = ("damaged/cut-in-half.flac", "damaged/not-audio.wav")


def write_corpus(folder: Path) -> list[Path]:
    """Write all clips and the damaged files; return their paths, good files first."""
    for index, clip in enumerate(CLIPS):
        rng = np.random.default_rng([SEED, index])
        wave = clip.make(rng, clip.rate_hz, clip.seconds)
        # The right channel lags by 17 samples, 0.4 ms: a source on the left.
        samples = np.stack(
            [np.roll(wave, 17 * channel) for channel in range(clip.channels)], axis=1
        )
        samples *= RMS / np.sqrt(np.mean(samples**2))
        path = folder / clip.name
        path.parent.mkdir(parents=True, exist_ok=True)
        container = {"opus": "OGG"}.get(path.suffix[1:], path.suffix[1:].upper())
        with soundfile.SoundFile(
            path, "w", clip.rate_hz, clip.channels, format=container, subtype=clip.subtype
        ) as file:
            for start in range(0, len(samples), WRITE_FRAMES):
                file.write(samples[start : start + WRITE_FRAMES])
    whole = (folder / "speech/02.flac").read_bytes()
    contents = (whole[: len(whole) // 2], b"This is no sound.\n" * 200)
    (folder / "damaged").mkdir(parents=True, exist_ok=True)
    for name, content in zip(DAMAGED, contents, strict=True):
        (folder / name).write_bytes(content)
    return [folder / name for name in (*(clip.name for clip in CLIPS), *DAMAGED)]
