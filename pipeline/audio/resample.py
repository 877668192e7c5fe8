"""Band-limited resampling of one channel, whole or in chunks, with one result.

The algorithm is soxr's constant-rate converter: linear phase, with zero delay. r is the lower of
the two rates. Gain is flat within 0.001 dB up to 0.3 r and within 0.012 dB up to 0.46 r (soxr's own
roll-off); nothing is left from 0.5 r on. "soxr_vhq", the default, computes in double precision: its
noise and aliases are at -150 dB, the rounding of float32. "soxr_hq" computes in single precision
and reaches -130 dB; it saves 0.15 ms of the 0.55 ms that a second of audio costs from 16 to 44.1
kHz. Ratios such as 44100:44101, whose filter is interpolated, reach -120 dB with either. The name
is part of the provenance. Samples with equal rates are not changed.

"torchaudio_kaiser_best" is another algorithm, for jobs on GPUs: see `sinc_resample`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import soxr

from earmill.pipeline.audio.time_span import resampled_length

Waveform = npt.NDArray[np.float32]

QUALITIES = {"soxr_vhq": "VHQ", "soxr_hq": "HQ"}
DEFAULT_QUALITY = "soxr_vhq"
# GPUs can compute this resampler as well: torchaudio's with its preset of this name.
ON_DEVICES = "torchaudio_kaiser_best"
RESAMPLERS = (*QUALITIES, ON_DEVICES)

# soxr gets chunks, because one call for a whole clip is slower.
CHUNK_SAMPLES = 1 << 14


def resample(
    x: Waveform,
    from_hz: float,
    to_hz: float,
    quality: str = DEFAULT_QUALITY,
    into: Waveform | None = None,
) -> Waveform:
    """Convert a whole clip from one rate to another: (n,) to (resampled_length(n),).

    Rates are in Hz. Sample k of the output is at time k / to_hz. `into` is an array for the output.

    Example:
        >>> resample(np.zeros(16000, np.float32), 16000, 44100).shape
        (44100,)
    """
    stream = ResampleStream(from_hz, to_hz, quality)
    if from_hz == to_hz and into is None:
        return _checked(x)
    starts = range(0, len(x), CHUNK_SAMPLES)
    pieces = [stream.push(x[start : start + CHUNK_SAMPLES]) for start in starts]
    return np.concatenate([*pieces, stream.finish()], out=into)


class ResampleStream:
    """One clip that is resampled in chunks; for the arguments see `resample`. Invariant: the chunks
    returned by every `push` and the final `finish` concatenate to `resample` of the concatenated
    input, bit for bit."""

    def __init__(self, from_hz: float, to_hz: float, quality: str = DEFAULT_QUALITY) -> None:
        if not (from_hz > 0 and to_hz > 0):
            raise ValueError(f"expected rates above 0 Hz, got {from_hz} to {to_hz}")
        if quality not in RESAMPLERS:
            raise ValueError(f"expected one of {', '.join(RESAMPLERS)}, got {quality!r}")
        self._rates = float(from_hz), float(to_hz)
        self._taken = self._given = 0
        self._finished = False
        # Converts the next samples, with `last` to the end; None for equal rates.
        self._convert: Callable[..., Waveform] | None = None
        if from_hz == to_hz:
            return
        if quality == ON_DEVICES:
            from earmill.pipeline.audio.sinc_resample import SincStream  # imports torch

            self._convert = SincStream(*self._rates).push
        else:
            self._convert = soxr.ResampleStream(
                *self._rates, 1, dtype="float32", quality=QUALITIES[quality]
            ).resample_chunk

    def push(self, x: Waveform) -> Waveform:
        if self._finished:
            raise ValueError("push after finish; take a fresh stream for the next clip")
        return self._advance(_checked(x), last=False)

    def finish(self) -> Waveform:
        if self._finished:
            raise ValueError("finish was called twice; take a fresh stream for the next clip")
        self._finished = True
        return self._advance(np.zeros(0, np.float32), last=True)

    def _advance(self, x: Waveform, *, last: bool) -> Waveform:
        if self._convert is None:
            return x
        self._taken += len(x)
        y = self._convert(x, last=last)
        if last:
            # soxr rounds an exact half up or down, by its float error, and the other resampler
            # fills its last segment; the formula decides here.
            y = y[: resampled_length(self._taken, *self._rates) - self._given]
        self._given += len(y)
        return y


def _checked(x: Waveform) -> Waveform:
    if x.ndim != 1 or x.dtype != np.float32:
        raise ValueError(f"expected a 1-D float32 array, got {x.ndim}-D {x.dtype}")
    return x
