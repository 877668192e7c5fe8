"""torchaudio's resampler, in segments of one shape: the same values whole, in chunks, in company.

The filter is `torchaudio.functional.resample` with the windowed sinc of its "kaiser_best" preset:
flat within 0.001 dB up to 0.42 r, -0.6 dB at 0.46 r, r the lower of the two rates; what it adds is
at -105 dB, what lies above 0.52 r is gone (-140 dB). torchaudio's own default, six zero crossings
under a Hann window, is 1 dB down at 0.42 r and leaves images there at -20 dB.

Convolutions of libraries choose their algorithm, and with it the order of their sums, by the shape
of the call. So every call has one shape, and a sample stands at a place that follows from its time:

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

# torchaudio's documentation: what equals resampy's "kaiser_best".
ZEROS = 64
ROLLOFF = 0.9475937167399596
BETA = 14.769656459379492

# Enough rows for a convolution of few channels to use its vectors.
ROWS = 8
# Samples of a segment at the higher of the two rates: 1.5 s at 44.1 kHz.
SEGMENT_SAMPLES = 1 << 16
# A filter has (to / gcd) phases; with this many coefficients it has 16 MiB, and took ten times that
# to compute. Ratios of rates in use stay below a tenth of it.
MOST_COEFFICIENTS = 1 << 22
# Segments of a call on a GPU; on a CPU one keeps all its threads' caches warm.
SEGMENTS_A_CALL = {"cuda": 8}


@dataclass(frozen=True, eq=False)
class SincFilter:
    """The filter of one pair of rates.

    Args:
        from_hz, to_hz: The rates in Hz.
        step_in, step_out: Samples of a frame at either rate.
        halo: Frames that a row needs on either side.
        frames: Frames of a row that count.
        kernel: The resampler itself, on the CPU.
    """

    from_hz: float
    to_hz: float
    step_in: int
    step_out: int
    halo: int
    frames: int
    kernel: Resample

    @property
    def segment_in(self) -> int:
        """Samples that a segment takes."""
        return ROWS * self.frames * self.step_in

    @property
    def margin(self) -> int:
        """Samples that it looks at on either side of them."""
        return self.halo * self.step_in

    def rows(self, segments: Tensor) -> Tensor:
        """(segment, margin + segment_in + margin) to (segment * ROWS, row), halos included."""
        row = (self.frames + 2 * self.halo) * self.step_in
        return segments.unfold(-1, row, self.frames * self.step_in).reshape(-1, row)

    def apply(self, segments: Tensor, kernel: Resample) -> Tensor:
        """(segment, margin + segment_in + margin) to (segment, samples at `to_hz`)."""
        made = kernel(self.rows(segments))
        kept = made[:, self.halo * self.step_out : (self.halo + self.frames) * self.step_out]
        return kept.reshape(len(segments), -1)

    def segments_of(self, n_samples: int) -> int:
        """How many segments hold so many samples."""
        return -(-n_samples // self.segment_in)


@lru_cache(maxsize=32)
def sinc_filter(from_hz: float, to_hz: float) -> SincFilter:
    """The filter of a pair of rates.

    Raises:
        ResampleRatioError: It would have too many coefficients.
    """
    ratio = Fraction(to_hz) / Fraction(from_hz)
    step_in, step_out = ratio.denominator, ratio.numerator
    # As torchaudio has it: a phase spans ZEROS periods of the lower rate to either side.
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
    return SincFilter(
        from_hz=from_hz,
        to_hz=to_hz,
        step_in=step_in,
        step_out=step_out,
        halo=-(-int(kernel.width) // step_in),
        frames=max(1, SEGMENT_SAMPLES // ROWS // max(step_in, step_out)),
        kernel=kernel,
    )


class SincStream:
    """One clip on its way through the filter, in pieces of any lengths."""

    def __init__(self, from_hz: float, to_hz: float) -> None:
        self._filter = sinc_filter(from_hz, to_hz)
        # What the next segment begins with: the samples before it, then its own.
        self._held = np.zeros(self._filter.margin, np.float32)
        self._taken = 0
        self._given = 0

    def push(self, x: Waveform) -> Waveform:
        """Output that became ready, possibly none."""
        self._taken += len(x)
        self._held = np.concatenate([self._held, x])
        return self._advance(last=False)

    def finish(self) -> Waveform:
        """The rest of the output."""
        return self._advance(last=True)

    def _advance(self, *, last: bool) -> Waveform:
        sinc, made = self._filter, [np.zeros(0, np.float32)]
        width = sinc.segment_in + 2 * sinc.margin
        wanted = resampled_length(self._taken, sinc.from_hz, sinc.to_hz)
        while len(self._held) >= width or (last and self._given < wanted):
            segment = np.zeros((1, width), np.float32)
            have = self._held[:width]
            segment[0, : len(have)] = have
            out = sinc.apply(torch.from_numpy(segment), sinc.kernel)[0].numpy()
            if last:
                out = out[: wanted - self._given]
            self._held = self._held[sinc.segment_in :]
            self._given += len(out)
            made.append(out)
        return np.concatenate(made)


class DeviceResampler:
    """Whole clips that lie on a device, resampled there; the values of `SincStream` on a CPU.

    Args:
        device: Where the clips are and the results stay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels: dict[tuple[float, float], Resample] = {}
        self._at_once = SEGMENTS_A_CALL.get(device.type, 1)

    def __call__(self, clips: Sequence[Tensor], from_hz: float, to_hz: float) -> list[Tensor]:
        """Resample clips (ear, time) of one rate; a clip does not depend on the others.

        Raises:
            ResampleRatioError: See `sinc_filter`.
        """
        if from_hz == to_hz:
            return list(clips)
        sinc, kernel = sinc_filter(from_hz, to_hz), self._kernel(from_hz, to_hz)
        ears = [ear for clip in clips for ear in clip]
        cut = torch.cat([self._segments(ear, sinc) for ear in ears])
        made = torch.cat([self._call(part, sinc, kernel) for part in cut.split(self._at_once)])
        of_ears = made.split([sinc.segments_of(len(ear)) for ear in ears])
        lengths = [resampled_length(len(ear), from_hz, to_hz) for ear in ears]
        flat = iter(
            [out.reshape(-1)[:length] for out, length in zip(of_ears, lengths, strict=True)]
        )
        return [torch.stack([next(flat) for _ in clip]) for clip in clips]

    def _segments(self, ear: Tensor, sinc: SincFilter) -> Tensor:
        count = sinc.segments_of(len(ear))
        padded = ear.new_zeros(count * sinc.segment_in + 2 * sinc.margin)
        padded[sinc.margin : sinc.margin + len(ear)] = ear
        return padded.unfold(0, sinc.segment_in + 2 * sinc.margin, sinc.segment_in)

    def _call(self, part: Tensor, sinc: SincFilter, kernel: Resample) -> Tensor:
        """One call of the one shape: the last one is filled up with silence."""
        silence = part.new_zeros(self._at_once - len(part), part.shape[1])
        return sinc.apply(torch.cat([part, silence]), kernel)[: len(part)]

    def _kernel(self, from_hz: float, to_hz: float) -> Resample:
        """The filter's coefficients on the device; computed on the CPU, so the same everywhere."""
        if (from_hz, to_hz) not in self._kernels:
            kernel = deepcopy(sinc_filter(from_hz, to_hz).kernel)
            self._kernels[from_hz, to_hz] = kernel.to(self.device)
        return self._kernels[from_hz, to_hz]
