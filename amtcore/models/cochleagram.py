"""Cochleagram: envelopes of half-cosine filters on the ERB scale, compressed, at 200 Hz.

    Signal -> transform of the whole clip -> filters -> envelopes -> 200 Hz -> compression.

Source: McDermott and Simoncelli (2011), Neuron 71:926. The presets are two programs with the same
filters: chcochleagram (commit c634ca8) and pycochleagram (commit 3854892). They differ in padding,
scale of the envelope, resampling and compression. One difference on purpose: a clip of an odd
number of samples has as many samples of envelope (chcochleagram: one too few).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import RATE, Flag, Number, Numbers, Text, checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.filter_design import resample_ratio, resample_taps
from amtcore.kernels.operations.fir import windows
from amtcore.kernels.torch_state import rows_of
from amtcore.kernels.vector.simd import LANES
from amtcore.models.fine_envelope import bands_to_frames, can_interpolate, frame_weights
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.scales import ERB_FLOOR_HZ, ERB_Q
from amtcore.stages.constants import outside_inference
from amtcore.stages.stage import product

#: Compression in dB ends this far below the largest value of a clip.
FLOOR_DB = -60.0
KAISER_BETA = 5.0
#: Samples of all channels that are transformed together.
_GROUP_SAMPLES = 2**18

#: First bin and gains of each channel.
Responses = tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True)
class _Preset:
    """Defaults of one program; `n` None is about one filter an ERB."""

    n: int | None
    high_lim: float
    sample_factor: int
    envelope_scale: str
    floor: float
    offset: float


PRESETS = {
    "chcochleagram": _Preset(50, 10000.0, 4, "half", 1e-8, 1e-8),
    "pycochleagram": _Preset(None, 20000.0, 2, "full", 0.0, 0.0),
}


def _erb_number(f_hz: Any) -> Any:
    return ERB_Q * np.log1p(np.asarray(f_hz, np.float64) / (ERB_FLOOR_HZ * ERB_Q))


def _erb_frequency(number: Any) -> Any:
    return ERB_FLOOR_HZ * ERB_Q * np.expm1(np.asarray(number, np.float64) / ERB_Q)


@dataclass(frozen=True)
class HalfCosineFilters:
    """Zero-phase filters whose squares sum to 1 at every frequency.

    Args:
        fs: Sampling rate in Hz.
        n: Filters between the limits, for a sample factor of 1.
        low_lim: Lower limit in Hz.
        high_lim: Upper limit in Hz.
        sample_factor: Factor of overlapping filters, 1 or even. The first and the last channels, as
            many as this factor, are low-pass and high-pass filters.
    """

    fs: float
    n: int
    low_lim: float
    high_lim: float
    sample_factor: int

    def __post_init__(self) -> None:
        if not self.low_lim < self.high_lim <= self.fs / 2:
            raise ParameterError(
                f"expected low_lim < high_lim <= fs/2 ({self.fs / 2:g} Hz), got {self.low_lim:g} "
                f"and {self.high_lim:g} Hz"
            )
        if self.sample_factor != 1 and self.sample_factor % 2:
            raise ParameterError(f"sample_factor must be 1 or even, got {self.sample_factor}")

    @property
    def step(self) -> float:
        """Distance of centres in ERB numbers."""
        low, high = _erb_number([self.low_lim, self.high_lim])
        return float(high - low) / (self.sample_factor * (self.n + 1))

    def centres(self) -> Any:
        """Return the centres of the band-pass filters in ERB numbers; they ascend."""
        bands = self.sample_factor * (self.n + 1) - 1
        return _erb_number(self.low_lim) + self.step * np.arange(1, bands + 1)

    def fc_hz(self) -> Any:
        """Return the nominal frequency of each channel in Hz."""
        centres, s = self.centres(), self.sample_factor
        low, high = centres[:s] - s * self.step, centres[-s:] + s * self.step
        fc_hz = _erb_frequency(np.concatenate((low, centres, high)))
        return np.where(fc_hz < 0, 1.0, fc_hz)

    def least_points(self) -> int:
        """Return the length of the transform from which on every high-pass filter has a bin."""
        top_hz = float(_erb_frequency(self.centres()[-1]))
        # An even length has a bin at fs/2. The last bin of an odd length is half a step below.
        return math.floor(self.fs / (self.fs - 2 * top_hz)) + 1

    def responses(self, n_fft: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield first bin and gains of each channel, float64; the other gains are 0."""
        bins, s, centres = n_fft // 2 + 1, self.sample_factor, self.centres()
        f_hz = torch.arange(bins, dtype=torch.float64, device=device) * (self.fs / n_fft)
        numbers = ERB_Q * torch.log1p(f_hz / (ERB_FLOOR_HZ * ERB_Q))
        half = s * self.step

        def place(number: float) -> float:
            return float(_erb_frequency(number)) * n_fft / self.fs

        def band(centre: float, first: int, end: int) -> Tensor:
            away = numbers[first:end] - centre
            return torch.where(away.abs() < half, torch.cos(math.pi * away / (2 * half)), 0.0)

        def rest(centre: float, first: int, end: int) -> Tensor:
            return (1.0 - band(centre, first, end).square()).clamp(min=0.0).sqrt()

        for centre in centres[:s]:
            yield 0, rest(centre, 0, math.ceil(place(centre))) / math.sqrt(s)
        for centre in centres:
            first = min(max(math.floor(place(centre - half)), 0), bins - 1)
            end = min(math.ceil(place(centre + half)) + 1, bins)
            yield first, band(centre, first, end) / math.sqrt(s)
        for centre in centres[-s:]:
            first = math.floor(place(centre)) + 1
            yield first, rest(centre, first, bins) / math.sqrt(s)


@lru_cache(maxsize=4)
def _responses(
    filters: HalfCosineFilters, n_fft: int, dtype: torch.dtype, device: torch.device
) -> Responses:
    """Return the gains of all channels; kept, because clips of a corpus are often as long."""
    with outside_inference(), torch.no_grad():
        found = filters.responses(n_fft, device)
        return tuple((first, gains.to(dtype)) for first, gains in found)


def _filtered(spectrum: Tensor, group: Responses, length: int) -> Tensor:
    """Return the filtered spectra (row, channel, `length`) of a spectrum (row, bin)."""
    banded = spectrum.new_zeros(len(spectrum), len(group), length)
    for i, (first, gains) in enumerate(group):
        end = first + len(gains)
        banded[:, i, first:end] = spectrum[:, first:end] * gains
    return banded


def sinc_kernel(q: int, window_size: int) -> Tensor:
    """Return the low-pass of chcochleagram: a sinc in a Kaiser window, not normalised.

    With an odd size the sinc is centred half a sample after the window, as in the program.
    """
    steps = np.arange(window_size) - window_size / 2
    return torch.from_numpy(np.sinc(steps / q) / q * np.kaiser(window_size, KAISER_BETA))


class Cochleagram(FrameModule):
    """Cochleagram of half-cosine filters. None takes the value of the preset.

    The filters lie on the frequency grid of the whole clip, so values depend on the clip's length,
    and the model needs whole clips. Gradients exist, but not where an envelope is 0 and `offset`
    is 0: the slope of the power is infinite there. These options have no reference data: "abs",
    "db", `no_lowpass`, `no_highpass`, `downsample_then_compress=False`, padding with "hilbert" in
    chcochleagram, other values of `scale`, `offset`, `power` and `envelope_scale`.

    Args:
        fs: Sampling rate in Hz.
        preset: "chcochleagram" or "pycochleagram".
        n: Filters between the limits, for a sample factor of 1. None is 50 in chcochleagram; in
            pycochleagram it is the distance of the limits in ERB, rounded down, less 1.
        low_lim: Lower limit in Hz.
        high_lim: Upper limit in Hz, at most fs/2. None is 10000 in chcochleagram and 20000 in
            pycochleagram, or fs/2 if that is lower.
        sample_factor: Factor of overlapping filters, 1 or even: 4 or 2.
        pad_factor: Zeros at the end make a clip longer by this factor, 1 or more.
        padding_size: Further zeros at the end, in samples; below 2 there are none.
        envelope: "hilbert", "rectify" (half-wave) or "abs".
        envelope_scale: "full" for the Hilbert envelope, "half" for half of it in all channels but
            at 0 Hz and fs/2, as in chcochleagram.
        fs_out: Frames per second.
        window_size: Taps of chcochleagram's low-pass.
        pad: Zeros before and after the envelope in chcochleagram's low-pass.
        compression: "power", "db" (re the largest value of a clip, at least -60 dB) or "none".
        power: Exponent of the compression.
        offset: Value that is added before the power, in Pa: 1e-8 or 0.
        scale: Factor before the power.
        downsample_then_compress: False compresses the envelope, then takes frames from it.
        no_lowpass: Drop the low-pass channels.
        no_highpass: Drop the high-pass channels.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., time) -> subbands, envelope (.., time, channel); cochleagram (.., frame, channel), with
        floor((time + sum(pad) - window_size) fs_out / fs) + 1 frames, or
        ceil(time fs_out / fs) in pycochleagram.

    Invariants:
        Squares of the filters' gains sum to 1 at every frequency: subbands keep the energy.

    >>> model = Cochleagram(fs=20000)
    >>> model.outputs(torch.zeros(40000), ("cochleagram",))["cochleagram"].shape
    torch.Size([390, 211])
    """

    shown = "fs preset filters fc envelope fs_out compression"
    fc: Tensor
    weights: Tensor
    can_stream = False
    whole_clips_reason = "its filters lie on the frequency grid of the whole clip"

    @checked_arguments(
        preset=Text(PRESETS),
        n=whole(1, optional=True),
        low_lim=Number(" Hz", least=0.0),
        high_lim=replace(RATE, optional=True),
        sample_factor=whole(1, 64, optional=True),
        pad_factor=Number(least=1.0, most=100.0),
        padding_size=whole(0),
        envelope=Text(("hilbert", "rectify", "abs")),
        envelope_scale=Text(("full", "half"), optional=True),
        window_size=whole(2),
        pad=Numbers(whole(0), single=False),
        compression=Text(("power", "db", "none")),
        power=Number(above=0.0, most=10.0),
        offset=Number(" Pa", least=0.0, optional=True),
        scale=Number(above=0.0),
        downsample_then_compress=Flag(),
        no_lowpass=Flag(),
        no_highpass=Flag(),
    )
    def __init__(
        self,
        fs: float,
        preset: str = "chcochleagram",
        n: int | None = None,
        low_lim: float = 50.0,
        high_lim: float | None = None,
        sample_factor: int | None = None,
        pad_factor: float = 1.0,
        padding_size: int = 0,
        envelope: str = "hilbert",
        envelope_scale: str | None = None,
        fs_out: float = 200.0,
        window_size: int = 1001,
        pad: tuple[int, int] = (0, 0),
        compression: str = "power",
        power: float = 0.3,
        offset: float | None = None,
        scale: float = 1.0,
        downsample_then_compress: bool = True,
        no_lowpass: bool = False,
        no_highpass: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        chosen = PRESETS[preset]
        self.fs, self.dtype, self.preset, self.fs_out = float(fs), dtype, preset, float(fs_out)
        self.pad_factor, self.padding_size = pad_factor, padding_size
        self.envelope, self.floor = envelope, chosen.floor if envelope == "hilbert" else 0.0
        self.envelope_scale = envelope_scale or chosen.envelope_scale
        self.compression, self.power, self.scale = compression, power, scale
        self.offset = chosen.offset if offset is None else offset
        self.downsample_then_compress = downsample_then_compress
        high_lim = min(chosen.high_lim, self.fs / 2) if high_lim is None else high_lim
        if n is None:
            low, high = _erb_number([low_lim, high_lim])
            n = max(math.floor(high - low) - 1, 1) if chosen.n is None else chosen.n
        factor = sample_factor or chosen.sample_factor
        self.filters = HalfCosineFilters(self.fs, n, low_lim, high_lim, factor)
        self._channels = slice(factor if no_lowpass else 0, -factor if no_highpass else None)
        fc_hz = self.filters.fc_hz()[self._channels]
        self.register_buffer("fc", torch.from_numpy(fc_hz).to(dtype))
        least = 1 if no_highpass else self.filters.least_points()
        self.min_samples = next(n for n in count(1) if self.n_fft(n) >= least)
        hop, window = self._add_weights(window_size, pad)
        unit = {"power": f"Pa^{power:g}", "db": "dB", "none": "Pa"}[compression]
        every = FrameGrid(len(fc_hz), 1, min_samples=self.min_samples, fc_hz=tuple(fc_hz.tolist()))
        frames = replace(every, hop_length=hop, window_length=window, unit=unit)
        self.grids = {"cochleagram": frames, "envelope": every, "subbands": every}

    def _add_weights(self, window_size: int, pad: tuple[int, int]) -> tuple[Fraction, Fraction]:
        """Add the weights of frames; return their hop and the first window in samples."""
        if len(pad) != 2:
            raise ParameterError(f"pad must be two numbers, before and after, got {list(pad)}")
        hop = Fraction(str(self.fs)) / Fraction(str(self.fs_out))
        up, down = hop.denominator, hop.numerator
        if self.preset == "pycochleagram":
            taps = resample_taps(*resample_ratio(self.fs, self.fs_out))
            ahead, window, self.centre = len(taps) // 2, Fraction(1, up), Fraction(0)
        elif up != 1:
            raise ParameterError(
                f"expected fs a whole multiple of fs_out for chcochleagram, got {self.fs:g} and "
                f"{self.fs_out:g} Hz; resample the audio, or take preset pycochleagram"
            )
        else:
            taps = sinc_kernel(down, window_size).flip(0)
            ahead, window = window_size - 1 - pad[0], Fraction(window_size - sum(pad))
            self.centre = Fraction(window_size, 2) - pad[0]
        weights, self.firsts, self.cycle = frame_weights(taps, ahead, up, down)
        self.register_buffer("weights", weights.to(self.dtype))
        return hop, window

    def n_fft(self, n_samples: int) -> int:
        """Return the length of the transform of a clip, with its zeros."""
        added = self.padding_size if self.padding_size > 1 else 0
        return n_samples + int(n_samples * (self.pad_factor - 1)) + added

    def frame_times_s(self, n_samples: int) -> Tensor:
        """Return the time of each frame of the cochleagram in s."""
        frames = torch.arange(self.grids["cochleagram"].n_frames(n_samples), dtype=torch.float64)
        return frames / self.fs_out + float(self.centre) / self.fs

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Return subbands, envelopes and cochleagram, see `FrameModule.outputs`.

        Raises:
            ParameterError: The clip is so short that a high-pass filter has no frequency.
        """
        x, names = finite_signal(signal, self.dtype), self.wanted(names)
        samples = x.shape[-1]
        if 0 < samples < self.min_samples:
            raise ParameterError(
                f"expected {self.min_samples} samples or more, so that the highest filter has a "
                f"frequency of the clip's transform, got {samples}; lower high_lim or pad the clip"
            )
        rows = rows_of(x)
        groups = list(self._groups(rows, names)) if rows.numel() else []
        found = {}
        for name in names:
            grid = self.grids[name]
            frames = rows.new_empty(len(rows), grid.n_frames(samples), grid.width)
            if frames.numel():
                frames = torch.cat([made[name] for made in groups], -1)
                if name == "cochleagram" and self.compression == "db":
                    frames = self._decibels(frames)
            found[name] = frames.reshape(*signal.shape[:-1], *frames.shape[1:])
        return found

    def _groups(self, rows: Tensor, names: tuple[str, ...]) -> Iterator[Outputs]:
        """Yield outputs (row, frame, channel) of some channels, from the lowest channel on."""
        samples, n_fft = rows.shape[-1], self.n_fft(rows.shape[-1])
        starts = self._starts(samples if "cochleagram" in names else 0)
        responses = _responses(self.filters, n_fft, self.dtype, rows.device)[self._channels]
        spectrum = torch.fft.rfft(rows, n_fft)
        weights = torch.full_like(spectrum[0].real, 1 / n_fft)
        if self.envelope_scale == "full":
            weights[1 : (n_fft + 1) // 2] *= 2.0
        weighted = spectrum * weights
        most = max(gains.numel() for _, gains in responses)
        by_kernel = self.envelope == "hilbert" and can_interpolate(spectrum, most, n_fft)
        size = LANES if by_kernel else max(1, _GROUP_SAMPLES // (n_fft * len(rows)))
        for at in range(0, len(responses), size):
            group, slow, made = responses[at : at + size], None, dict[str, Tensor]()
            if "subbands" in names or self.envelope != "hilbert":
                subbands = torch.fft.irfft(_filtered(spectrum, group, spectrum.shape[-1]), n_fft)
                made["subbands"] = subbands[..., :samples].mT
            if self.envelope != "hilbert":
                rectify = torch.abs if self.envelope == "abs" else torch.relu
                made["envelope"] = rectify(made["subbands"])
            elif not by_kernel:
                analytic = torch.fft.ifft(_filtered(weighted, group, n_fft), norm="forward")
                made["envelope"] = analytic.abs()[..., :samples].mT.clamp(min=self.floor)
            elif {*names} - {"subbands"}:
                whole = "envelope" in names or not self.downsample_then_compress
                plan = self.weights, starts if self.downsample_then_compress else starts[:0]
                each = [
                    bands_to_frames(
                        [row[first : first + len(gains)] * gains for first, gains in group],
                        n_fft, samples, self.floor, *plan, whole,
                    )
                    for row in weighted
                ]  # fmt: skip
                made["envelope"], slow = map(torch.stack, zip(*each, strict=True))
            if len(starts):
                made["cochleagram"] = self._frames(made["envelope"], slow, samples)
            yield {name: frames for name, frames in made.items() if name in names}

    def _starts(self, samples: int) -> Any:
        """Return the first sample of each group of four frames; groups come in whole cycles."""
        cycles = -(-self.grids["cochleagram"].n_frames(samples) // (4 * len(self.firsts)))
        return (self.firsts + self.cycle * np.arange(cycles)[:, None]).reshape(-1)

    def _frames(self, envelope: Tensor, slow: Tensor | None, samples: int) -> Tensor:
        """Return the cochleagram (row, frame, channel).

        Args:
            envelope: (row, time, channel).
            slow: Frames of the envelope, if they are known.
            samples: Samples of the signal.
        """
        if not self.downsample_then_compress:
            envelope, slow = self._compressed(envelope), None
        if slow is None:
            window, cycles = self.weights.shape[1], len(self._starts(samples)) // len(self.firsts)
            reach = (cycles - 1) * self.cycle + window
            parts = [
                product(windows(envelope.mT, first, reach).unfold(-1, window, self.cycle), weights)
                for first, weights in zip(self.firsts.tolist(), self.weights, strict=True)
            ]
            slow = torch.stack(parts, -2).flatten(-3).mT
        slow = slow[:, : self.grids["cochleagram"].n_frames(samples)]
        slow = slow.clamp(min=0.0) if self.preset == "pycochleagram" else slow
        return self._compressed(slow) if self.downsample_then_compress else slow

    def _compressed(self, x: Tensor) -> Tensor:
        """Compress values by the power law; "db" needs all channels, see `_decibels`."""
        if self.compression != "power":
            return x
        return (self.scale * (x.clamp(min=0.0) + self.offset)) ** self.power

    def _decibels(self, x: Tensor) -> Tensor:
        """Return levels (row, frame, channel) in dB re the largest value of each row."""
        level = torch.where(x > 0, x, torch.finfo(x.dtype).eps)
        return (20.0 * torch.log10(level / level.amax((1, 2), keepdim=True))).clamp(min=FLOOR_DB)
