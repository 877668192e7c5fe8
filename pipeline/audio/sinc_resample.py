"""torchaudio's resampler in segments of one shape, so that values do not depend on the chunks.

The filter is `torchaudio.functional.resample` with the windowed sinc of its "kaiser_best" preset. r
is the lower of the two rates. Gain is flat within 0.001 dB up to 0.42 r and -0.6 dB at 0.46 r;
noise and aliases are at -105 dB, and frequencies above 0.52 r at -140 dB.

Convolutions of libraries choose their algorithm, and so the order of their sums, by the shape of
the call. So every call has one shape, and the position of a sample in it follows from its time:

    time      |----------- segment 0 -----------|----------- segment 1 -----------|---
    rows      [ halo | frames | halo ]
                      [ halo | frames | halo ]  ...  ROWS of them a segment, zeros past the ends

A frame is the shortest stretch that has whole numbers of samples at both rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchaudio.transforms import Resample

from earmill.pipeline.audio.time_span import resampled_length
from earmill.pipeline.common.errors import ResampleRatioError

Waveform = npt.NDArray[np.float32]

# Parameters for resampy's "kaiser_best", from torchaudio's documentation.
ZEROS = 64
ROLLOFF = 0.9475937167399596
BETA = 14.769656459379492

ROWS = 8  # Rows of a segment: a convolution of few channels vectorises over them.
# Samples of a segment at the higher of the two rates: 1.5 s at 44.1 kHz.
SEGMENT_SAMPLES = 1 << 16
# Most coefficients of a filter, which has (to / gcd) phases: 16 MiB, and ten times as much while it
# is computed. Rates in use have less than a tenth of it.
MOST_COEFFICIENTS = 1 << 22
# Segments of a call on a GPU. On a CPU one segment fits the caches.
SEGMENTS_A_CALL = {"cuda": 8}


@dataclass(frozen=True, eq=False)
class SincFilter:
    """The filter of one pair of rates."""

    # Samples of a frame at the input rate, and at the output rate.
    step_in: int
    step_out: int
    halo: int  # Frames that a row needs on either side.
    frames: int  # Frames of a row without its halos.
    kernel: Resample  # Resampler on the CPU.

    @property
    def segment_in(self) -> int:
        """Input samples of a segment."""
        return ROWS * self.frames * self.step_in

    @property
    def margin(self) -> int:
        """Input samples that a segment needs on either side."""
        return self.halo * self.step_in

    def apply(self, segments: Tensor, kernel: Resample) -> Tensor:
        """Resample (segment, margin + segment_in + margin) to (segment, output samples)."""
        width = (self.frames + 2 * self.halo) * self.step_in
        # rows: (segment * ROWS, row with its halos)
        rows = segments.unfold(-1, width, self.frames * self.step_in).reshape(-1, width)
        outputs = kernel(rows)
        inner = outputs[:, self.halo * self.step_out : (self.halo + self.frames) * self.step_out]
        return inner.reshape(len(segments), -1)


@lru_cache(maxsize=32)
def sinc_filter(from_hz: float, to_hz: float) -> SincFilter:
    """Return the filter; ResampleRatioError if it would have too many coefficients."""
    ratio = Fraction(to_hz) / Fraction(from_hz)
    step_in, step_out = ratio.denominator, ratio.numerator
    # In torchaudio a phase spans ZEROS periods of the lower rate to either side.
    reach = ZEROS * step_in / (min(step_in, step_out) * ROLLOFF)
    if step_out * (2 * reach + step_in) > MOST_COEFFICIENTS:
        raise ResampleRatioError(
            f"expected sample rates in a ratio of small whole numbers for the resampler torchaudio,"
            f" got {from_hz:g} Hz to {to_hz:g} Hz, which is {step_in}:{step_out}; use "
            "audio.resampler soxr_vhq"
        )
    kernel = Resample(
        step_in,
        step_out,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=ZEROS,
        rolloff=ROLLOFF,
        beta=BETA,
    )
    halo = -(-int(kernel.width) // step_in)
    frames = max(1, SEGMENT_SAMPLES // ROWS // max(step_in, step_out))
    return SincFilter(step_in, step_out, halo, frames, kernel)


class SincStream:
    """One clip that is resampled in chunks of any length. Its last segment is longer than the clip,
    see `ResampleStream`."""

    def __init__(self, from_hz: float, to_hz: float) -> None:
        self._filter = sinc_filter(from_hz, to_hz)
        # Start of the next segment, with its margin.
        self._held = np.zeros(self._filter.margin, np.float32)

    def push(self, x: Waveform, *, last: bool) -> Waveform:
        sinc, outputs = self._filter, [np.zeros(0, np.float32)]
        self._held = np.concatenate([self._held, x])
        width = sinc.segment_in + 2 * sinc.margin
        while len(self._held) >= width or (last and len(self._held) > sinc.margin):
            segment = np.zeros((1, width), np.float32)
            have = self._held[:width]
            segment[0, : len(have)] = have
            outputs.append(sinc.apply(torch.from_numpy(segment), sinc.kernel)[0].numpy())
            self._held = self._held[sinc.segment_in :]
        return np.concatenate(outputs)


class DeviceResampler:
    """Resampling of whole clips on a device, with the values of `SincStream` on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels: dict[tuple[float, float], Resample] = {}
        self._at_once = SEGMENTS_A_CALL.get(device.type, 1)

    def __call__(self, clips: Sequence[Tensor], from_hz: float, to_hz: float) -> list[Tensor]:
        """Resample clips (ear, time) of one rate, each independent of the others."""
        if from_hz == to_hz:
            return list(clips)
        sinc = sinc_filter(from_hz, to_hz)
        if (from_hz, to_hz) not in self._kernels:
            # The coefficients are computed on the CPU, so they are equal on every device.
            self._kernels[from_hz, to_hz] = deepcopy(sinc.kernel).to(self.device)
        kernel = self._kernels[from_hz, to_hz]
        ears = [ear for clip in clips for ear in clip]
        counts = [-(-len(ear) // sinc.segment_in) for ear in ears]
        segments, width = [], sinc.segment_in + 2 * sinc.margin
        for ear, count in zip(ears, counts, strict=True):
            padded = ear.new_zeros(count * sinc.segment_in + 2 * sinc.margin)
            padded[sinc.margin : sinc.margin + len(ear)] = ear
            segments.append(padded.unfold(0, width, sinc.segment_in))
        outputs = []
        for part in torch.cat(segments).split(self._at_once):
            # The filter is called with its one shape; silence fills up the last call.
            silence = part.new_zeros(self._at_once - len(part), width)
            outputs.append(sinc.apply(torch.cat([part, silence]), kernel)[: len(part)])
        resampled = iter(
            out.reshape(-1)[: resampled_length(len(ear), from_hz, to_hz)]
            for out, ear in zip(torch.cat(outputs).split(counts), ears, strict=True)
        )
        return [torch.stack([next(resampled) for _ in clip]) for clip in clips]
