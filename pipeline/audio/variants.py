"""Signal processing of variants: decoded recordings, a room, noise. All in float64, rounded once.

Random choices come from Philox, a generator with a counter, whose key is a hash of seed, row id and
variant. So they do not depend on other rows, on their order, or on the machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from earmill.pipeline.audio.channels import AudioBlock, Channels
from earmill.pipeline.audio.decode import Blocks, Limits
from earmill.pipeline.audio.resample import resample
from earmill.pipeline.common.errors import NotAudioError

Samples = npt.NDArray[np.float64]  # (ear, time), or (time,) of noise.

RECORDING_S = 600.0  # Seconds of a noise or an impulse response that are used.
PINK_FROM_HZ = 20.0
PINK_TOP = 0.1  # Weight of the sample before, which takes 1.7 dB off the highest frequencies.
PINK_SETTLES_S = 0.25  # The slowest pole has forgotten its start: exp(-0.25 * 2 pi 20) is 2e-14.


def generator(seed: int, row_id: str, name: str) -> np.random.Generator:
    key = hashlib.sha256(json.dumps([seed, row_id, name]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Decoded samples of a noise or an impulse response, (channel, time)."""

    samples: AudioBlock
    rate_hz: int

    @classmethod
    def read(
        cls, opened: Callable[..., Blocks], stream: BinaryIO, uri: str, channels: Channels
    ) -> Recording:
        """Decode up to `RECORDING_S`; RowError if the bytes are no audio, or silent."""
        with stream, opened(stream, uri=uri, channels=channels, limits=Limits()) as reader:
            blocks, frames, most = [], 0, int(RECORDING_S * reader.rate_hz)
            for block in reader:
                blocks.append(block)
                frames += block.shape[1]
                if frames >= most:
                    break
            rate_hz = reader.rate_hz
        samples = np.concatenate(blocks, axis=1)[:, :most]
        if not samples.any():
            raise NotAudioError(f"{uri}: expected sound, got silence")
        return cls(samples, rate_hz)

    def at(self, rate_hz: int) -> AudioBlock:
        return np.stack([resample(each, self.rate_hz, rate_hz) for each in self.samples])

    def taps(self, rate_hz: int) -> Samples:
        """Return an impulse response behind a second of silence, with its gain at each frequency.
        The silence takes in the resampler's ringing before the first sound."""
        silence = np.zeros((len(self.samples), self.rate_hz), np.float32)
        delayed = Recording(np.concatenate([silence, self.samples], axis=1), self.rate_hz)
        return delayed.at(rate_hz).astype(np.float64) * (self.rate_hz / rate_hz)


def in_room(ears: Samples, taps: Samples, rate_hz: int) -> Samples:
    """Convolve a clip with `Recording.taps`; the result has the clip's time and length."""
    from scipy.signal import oaconvolve

    return np.asarray(oaconvolve(ears, taps, axes=1)[:, rate_hz : rate_hz + ears.shape[1]])


def stretch(noise: AudioBlock, samples: int, choice: float) -> tuple[Samples, int]:
    """Return a stretch of a noise (time,), and its first sample; `choice` is from 0 to 1."""
    if len(noise) >= samples:
        first = int(choice * (len(noise) - samples + 1))
        return noise[first : first + samples].astype(np.float64), first
    first = int(choice * len(noise))
    places = np.arange(first, first + samples)
    return np.take(noise, places, mode="wrap").astype(np.float64), first


def generated(kind: str, random: np.random.Generator, samples: int, rate_hz: int) -> Samples:
    """Return white noise, or pink noise by a pole and a zero an octave: power falls with 1/f within
    0.6 dB from 30 Hz to half the rate. Recursive filters of order one add in one order everywhere.
    """
    from scipy.signal import lfilter

    settles = math.ceil(PINK_SETTLES_S * rate_hz) if kind == "pink" else 0
    noise = np.asarray(random.standard_normal(settles + samples))
    if kind != "pink":
        return noise
    noise = lfilter([1.0, PINK_TOP], [1.0], noise)
    pole_hz = PINK_FROM_HZ
    while pole_hz < rate_hz / 2:
        pole, zero = (math.exp(-2 * math.pi * hz / rate_hz) for hz in (pole_hz, pole_hz * 2**0.5))
        noise = lfilter([1.0, -zero], [1.0, -pole], noise)
        pole_hz *= 2
    return noise[settles:]


def rms(signal: Samples) -> float:
    return math.sqrt(float(np.square(signal).mean()))
