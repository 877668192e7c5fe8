"""Band-limited resampling of one channel, whole or in chunks, with one result.

The algorithm is soxr's constant-rate converter: linear phase, compensated, so the delay is zero.
With r the lower of the two rates, gain is flat within 0.001 dB up to 0.3 r and within 0.012 dB up
to 0.46 r (soxr's own roll-off), and everything from 0.5 r on is gone. "soxr_vhq", the default,
computes in double precision: what it adds or leaves of aliases is at -150 dB, the rounding of
float32 itself. "soxr_hq" computes in single precision and reaches -130 dB; it saves 0.15 ms of the
0.55 ms that a second of audio costs from 16 to 44.1 kHz. (Ratios such as 44100:44101, whose filter
is interpolated, reach -120 dB with either.) The name is provenance. Equal rates pass untouched.

"torchaudio_kaiser_best" is another algorithm, for jobs on GPUs: see `sinc_resample`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import soxr

from earmill.pipeline.audio.time_span import resampled_length

if TYPE_CHECKING:
    from earmill.pipeline.audio.sinc_resample import SincStream

Waveform = npt.NDArray[np.float32]
# Of a resampler: from and to, in Hz, and its quality.
Kind = tuple[float, float, str]

QUALITIES = {"soxr_vhq": "VHQ", "soxr_hq": "HQ"}
DEFAULT_QUALITY = "soxr_vhq"
# The one that GPUs can do as well: `torchaudio.functional.resample` under its preset of that name.
ON_DEVICES = "torchaudio_kaiser_best"
RESAMPLERS = (*QUALITIES, ON_DEVICES)

# Fed to soxr piece by piece: faster than one call, as what comes out is still in the cache of the
# processor when it is put where it stays; and memory does not grow with the clip.
CHUNK_SAMPLES = 1 << 14
# Of soxr, ready for the next clip: more than threads that resample at the same time.
MAX_IDLE = 32


class AudioResampler:
    """Converts from one rate to another.

    Args:
        from_hz: Input rate in Hz, above 0.
        to_hz: Output rate in Hz, above 0.
        quality: One of RESAMPLERS.

    Shape:
        - Input: (n,) float32
        - Output: (resampled_length(n, from_hz, to_hz),) float32

    Invariants: sample k of the output is at time k / to_hz; chunked equals whole exactly.

    Example:
        >>> AudioResampler(16000, 44100).process(np.zeros(16000, np.float32)).shape
        (44100,)
    """

    def __init__(self, from_hz: float, to_hz: float, quality: str = DEFAULT_QUALITY) -> None:
        if not (from_hz > 0 and to_hz > 0):
            raise ValueError(f"expected rates above 0 Hz, got {from_hz} to {to_hz}")
        if quality not in RESAMPLERS:
            raise ValueError(f"expected one of {', '.join(RESAMPLERS)}, got {quality!r}")
        self.from_hz = float(from_hz)
        self.to_hz = float(to_hz)
        self.quality = quality

    @property
    def is_identity(self) -> bool:
        return self.from_hz == self.to_hz

    def process(self, x: Waveform, into: Waveform | None = None) -> Waveform:
        """The whole clip at once.

        Args:
            into: Where the output goes; None for a new array.
        """
        if self.is_identity and into is None:
            return _checked(x)
        if into is None:
            into = np.empty(resampled_length(len(x), self.from_hz, self.to_hz), np.float32)
        left = into
        for piece in self._pieces(x):
            left[: len(piece)] = piece
            left = left[len(piece) :]
        if len(left):
            raise ValueError(
                f"expected room for the {len(into) - len(left)} samples that come out, got "
                f"{len(into)}"
            )
        return into

    def _pieces(self, x: Waveform) -> Iterator[Waveform]:
        stream = self.stream()
        for start in range(0, len(x), CHUNK_SAMPLES):
            yield stream.push(x[start : start + CHUNK_SAMPLES])
        yield stream.finish()

    def stream(self) -> ResampleStream:
        """A fresh stream: push chunks of any sizes, then finish."""
        return ResampleStream(self)


class _Converters:
    """soxr's streams, used again: a new one costs as much as a second of audio. Cleared, one gives
    the same bits as a new one does. Safe in several threads, and without locks in forked ones."""

    def __init__(self) -> None:
        self._idle: deque[tuple[Kind, soxr.ResampleStream]] = deque()

    def take(self, wanted: Kind) -> soxr.ResampleStream:
        """One that has seen nothing."""
        for _ in range(MAX_IDLE):
            try:
                kind, found = self._idle.pop()
            except IndexError:
                break
            if kind == wanted:
                found.clear()
                return found
            self._idle.appendleft((kind, found))
        *rates, quality = wanted
        return soxr.ResampleStream(*rates, 1, dtype="float32", quality=QUALITIES[quality])

    def give_back(self, kind: Kind, converter: soxr.ResampleStream) -> None:
        """What has come to its end."""
        self._idle.append((kind, converter))
        while len(self._idle) > MAX_IDLE:
            with suppress(IndexError):  # another thread took the last
                self._idle.popleft()


_converters = _Converters()


class ResampleStream:
    """State of one clip on its way through a resampler.

    Args:
        resampler: Rates and quality.

    Invariants: the chunks returned by every `push` and the final `finish` concatenate to
    `resampler.process` of the concatenated input, bit for bit.
    """

    def __init__(self, resampler: AudioResampler) -> None:
        self._rates = (resampler.from_hz, resampler.to_hz)
        self._kind = (*self._rates, resampler.quality)
        self._taken = 0
        self._given = 0
        self._finished = False
        self._soxr: soxr.ResampleStream | None = None
        self._sinc: SincStream | None = None
        if resampler.is_identity:
            return
        if resampler.quality == ON_DEVICES:
            from earmill.pipeline.audio.sinc_resample import SincStream  # drags in torch

            self._sinc = SincStream(*self._rates)
        else:
            self._soxr = _converters.take(self._kind)

    def push(self, x: Waveform) -> Waveform:
        """Output that became ready, possibly none."""
        if self._finished:
            raise ValueError("push after finish; take a fresh stream for the next clip")
        return self._advance(_checked(x), last=False)

    def finish(self) -> Waveform:
        """The rest of the output."""
        if self._finished:
            raise ValueError("finish was called twice; take a fresh stream for the next clip")
        self._finished = True
        return self._advance(np.zeros(0, np.float32), last=True)

    def _advance(self, x: Waveform, *, last: bool) -> Waveform:
        if self._sinc is not None:
            return self._sinc.finish() if last else self._sinc.push(x)
        if self._soxr is None:
            return x
        self._taken += len(x)
        y: Waveform = self._soxr.resample_chunk(x, last=last)
        if last:
            # soxr rounds an exact half either way, as its floats fall; the formula decides.
            y = y[: resampled_length(self._taken, *self._rates) - self._given]
            _converters.give_back(self._kind, self._soxr)
        self._given += len(y)
        return y


def _checked(x: Waveform) -> Waveform:
    if x.ndim != 1 or x.dtype != np.float32:
        raise ValueError(f"expected a 1-D float32 array, got {x.ndim}-D {x.dtype}")
    return x
