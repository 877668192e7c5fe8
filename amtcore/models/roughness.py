"""Roughness of Daniel and Weber (1997), Acustica 83, 113.

47 channels half a Bark apart hear the audible components of a frame of 0.2 s. Each channel has an
envelope, the magnitude of its signal. Modulation depth, weighted by modulation frequency, and the
correlation with the channels one Bark away give the roughness of the channel.

Differences from MoSQITo 1.2.1: frequencies of bins are not one bin too high. Channels whose
envelope is rounding noise have no correlation. Components above 24 Bark are no error. A 1 kHz tone
of 60 dB with full 70 Hz modulation has 1.006 asper (MoSQITo: 1.019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import Number, checked_arguments, whole
from amtcore.errors import NonFiniteError, ShapeError
from amtcore.filter_design import interpolate
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs
from amtcore.tables import load_table
from amtcore.units import REFERENCE_PA

#: Seconds of a frame, channels, and channels with both neighbours side by side in a transform.
FRAME_S, CHANNELS, PAIRS = 0.2, 47, 24
#: First channel of each weighting of modulation, and its highest modulation frequency in Hz.
MODULATION = (("h2", 1, 358.0), ("h5", 5, 502.0), ("h16", 16, 502.0), ("h21", 21, 502.0),
              ("h42", 42, 502.0))  # fmt: skip
#: Factor from the mean to the amplitude of a component, nearly sqrt 2 (as in the article).
PEAK = 1.42
#: Slopes of excitation in dB/Bark: below a component; above it, its change per Hz and per dB.
LOWER, UPPER, UPPER_HZ, UPPER_DB = -27.0, -24.0, -230.0, 0.2
#: An envelope with relatively less modulation is rounding noise.
LEAST_MODULATION = 1e-5
#: A level, or a threshold, that no component meets, in dB.
NEVER = 1e6


def _interpolated(at: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Return a piecewise linear function, constant beyond its ends."""
    return interpolate(at.clamp(float(points[0]), float(points[-1])), points, values)


class RoughnessDanielWeber(FrameModule):
    """Roughness in asper, and of each channel.

    Outputs have a frame of 0.2 s every 0.1 s. The time of a frame is its centre.

    - `r`: Roughness in asper.
    - `r_spec`: Roughness of the 47 channels; the sum is 4 times `r`.

    Args:
        fs: Sampling rate in Hz, 16 kHz or more.
        overlap: Share of a frame that the next frame has too, 0 or more and below 1.
        bin_offset: Bins that are added to the frequency of each component. 1 gives the numbers of
            MoSQITo, for comparisons.
        dtype: Working type, torch.float32 or torch.float64.

    Shape:
        (.., time) in Pa -> (.., frame, column) of each output.

    Invariants:
        Silence has no roughness. Frames depend on their own samples alone.

    Gradients exist, except where a component crosses a threshold.

    >>> RoughnessDanielWeber(fs=16000)(torch.zeros(8000))["r"].shape
    torch.Size([4, 1])
    """

    memory_s = 0.0
    window: Tensor
    ear: Tensor
    threshold: Tensor
    steepness: Tensor
    fixed: Tensor
    distance: Tensor
    least: Tensor
    modulation: Tensor
    g: Tensor

    @checked_arguments(
        fs=Number(" Hz", least=16000.0, phrase="a sampling rate in Hz"),
        overlap=Number(least=0.0, below=1.0),
        bin_offset=whole(0, 1),
    )
    def __init__(
        self,
        fs: float = 48000,
        overlap: float = 0.5,
        bin_offset: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.overlap, self.bin_offset, self.dtype = fs, overlap, bin_offset, dtype
        self.samples = math.floor(FRAME_S * fs)
        self.hop_length = max(self.samples - math.floor(overlap * self.samples), 1)
        table = {k: torch.tensor(v) for k, v in load_table("roughness_daniel_weber").items()}
        z = torch.arange(1, CHANNELS + 1, dtype=torch.float64) / 2
        fc_hz = _interpolated(z, table["scale_z_bark"], table["scale_hz"])
        self.grids = {
            "r": FrameGrid(1, self.hop_length, self.samples),
            "r_spec": FrameGrid(
                CHANNELS, self.hop_length, self.samples, fc_hz=tuple(fc_hz.tolist())
            ),
        }
        for name, value in self._tables(table, z).items():
            self.register_buffer(name, value.to(dtype))

    def extra_repr(self) -> str:
        return f"fs={self.fs:g}, overlap={self.overlap:g}, bin_offset={self.bin_offset}"

    def _tables(self, table: dict[str, Tensor], z: Tensor) -> dict[str, Tensor]:
        """Return the constants by name; matrices are (channel, component).

        A component of level L excites a channel with L + gain, gain = fixed + slope * distance in
        dB, if this level is above `least`.
        """
        n = self.samples
        turn = 2.0 * math.pi * torch.arange(n, dtype=torch.float64) / (n - 1)
        window = 0.42 - 0.5 * torch.cos(turn) + 0.08 * torch.cos(2.0 * turn)
        f_hz = (torch.arange(n // 2, dtype=torch.float64) + self.bin_offset) * (self.fs / n)
        b = _interpolated(f_hz, table["scale_hz"], table["scale_z_bark"])
        threshold = _interpolated(b, table["threshold_z_bark"], table["threshold_db"])
        if self.bin_offset == 0:
            threshold[0] = NEVER
        channel = torch.arange(1, 2 * PAIRS + 1, dtype=torch.float64).unsqueeze(1)
        low, high = torch.floor(2.0 * b), torch.ceil(2.0 * b)
        near, above = (channel == low) | (channel == high), channel < high
        below = ~near & ~above
        zones = table["threshold_z_bark"], table["threshold_db"]
        up, down = (channel + 1) / 2, (channel - 1) / 2  # points where a slope is read
        least = torch.where(above, _interpolated(up, *zones), _interpolated(down, *zones))
        least = torch.where(near, -NEVER, least)
        least[CHANNELS:] = NEVER
        weights = [
            torch.stack([self._modulation(table, name, top)] * (end - first))
            for (name, first, top), end in zip(
                MODULATION, (*(first for _, first, _ in MODULATION[1:]), CHANNELS + 1), strict=True
            )
        ]
        return {
            "window": PEAK * window / window.sum(),
            "ear": 10.0 ** (_interpolated(b, table["ear_z_bark"], table["ear_db"]) / 20),
            "threshold": threshold,
            "steepness": UPPER + UPPER_HZ / f_hz.clamp(min=1e-3),
            "fixed": torch.where(above & ~near, LOWER * (b - up), 0.0),
            "distance": torch.where(below, down - b, 0.0),
            "least": least,
            "modulation": torch.cat(weights),
            "g": _interpolated(z, table["g_z_bark"], table["g"]),
        }

    def _modulation(self, table: dict[str, Tensor], name: str, top_hz: float) -> Tensor:
        """Return the weights of bins 2, 3, .. of the envelope, up to the highest of any channel."""
        bins = torch.arange(2, self._bins(MODULATION[-1][2]), dtype=torch.float64)
        weight = _interpolated(bins * (self.fs / self.samples), table[f"{name}_hz"], table[name])
        return torch.where(bins < self._bins(top_hz), weight, 0.0)

    def _bins(self, top_hz: float) -> int:
        return math.floor(top_hz * self.samples / self.fs)

    def excitation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return audible components (signal, component), and their factors in 48 channels.

        Args:
            x: One frame of each signal, (signal, samples), in Pa.
        """
        spectrum = torch.fft.rfft(x * self.window)[..., : self.samples // 2] * self.ear
        level = 20.0 * torch.log10(spectrum.abs().clamp(min=1e-15) / REFERENCE_PA)
        slope = (self.steepness + UPPER_DB * level).clamp(max=0.0)
        gain = torch.addcmul(self.fixed, slope.unsqueeze(-2), self.distance)
        heard = level.unsqueeze(-2) + gain > self.least
        factors = torch.exp(gain * (math.log(10.0) / 20.0)) * heard
        return spectrum * (level > self.threshold), factors

    def envelopes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and weighted bins from 2 on of the scaled envelopes, and the scale.

        Two channels are the real and the imaginary part of one signal, for half of the transforms.
        They are scaled to one size, so that a loud channel leaves no rounding noise in a soft one.
        """
        spectrum, factors = self.excitation(x)
        size = (factors @ spectrum.abs().unsqueeze(-1)).squeeze(-1)
        here = size > 0
        factors = factors * torch.where(here, 1.0 / torch.where(here, size, 1.0), 0.0).unsqueeze(-1)
        pairs = 0.5 * torch.complex(factors[..., :PAIRS, :], factors[..., PAIRS:, :])
        # A real signal has each component twice, but the component at 0 Hz once.
        spectrum = torch.cat((2.0 * spectrum[..., :1], spectrum[..., 1:]), -1).unsqueeze(-2)
        right = (pairs * spectrum.conj())[..., 1:].flip(-1)
        gap = self.samples - 2 * right.shape[-1] - 1
        middle = right.new_zeros(*right.shape[:-1], gap)
        both = torch.cat((pairs * spectrum, middle, right), -1)
        signals = torch.fft.ifft(both, norm="forward")
        found = torch.fft.fft(torch.view_as_complex(torch.view_as_real(signals).abs()))
        bins = self.modulation.shape[-1] + 2
        low, high = found[..., 2:bins], found[..., -bins + 1 : -1].flip(-1).conj()
        h0 = torch.cat((found[..., 0].real, found[..., 0].imag), -1) / self.samples
        modulation = torch.cat((0.5 * (low + high), -0.5j * (low - high)), -2)
        h0, modulation = h0 * here, (modulation * here.unsqueeze(-1))[..., :CHANNELS, :]
        return h0[..., :CHANNELS], modulation * self.modulation, size[..., :CHANNELS]

    def depth_and_correlation(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return modulation depth, correlation of channels i and i + 2, and mean envelope."""
        h0, bins, scale = self.envelopes(x)
        parts = torch.view_as_real(bins).flatten(-2)
        energy = parts.square().sum(-1)
        tiny = torch.finfo(self.dtype).tiny
        rms = (2.0 * energy).clamp(min=tiny).sqrt() / self.samples
        depth = torch.where(h0 > 0, (rms / h0.clamp(min=tiny)).clamp(max=1.0), 0.0)
        steady = rms <= LEAST_MODULATION * h0
        size = energy.clamp(min=tiny).sqrt()
        cross = (parts[..., :-2, :] * parts[..., 2:, :]).sum(-1) / size[..., :-2] / size[..., 2:]
        return depth, cross.masked_fill(steady[..., :-2] | steady[..., 2:], 0.0), h0 * scale

    def _frame(self, x: Tensor) -> Outputs:
        """Return the outputs of one frame of each signal (signal, samples), (signal, column)."""
        depth, k, _ = self.depth_and_correlation(x)
        one = torch.ones_like(k[..., :2])
        common = torch.cat((one, k), -1) * torch.cat((k, one), -1)
        specific = self.g * (depth * common).square()
        return {"r": 0.25 * specific.sum(-1, keepdim=True), "r_spec": specific}

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        names = self.wanted(names)
        if not chunk.is_floating_point() or chunk.ndim < 1:
            raise ShapeError(
                f"expected a floating-point signal (.., time) in Pa, got {chunk.dtype} of shape "
                f"{tuple(chunk.shape)}"
            )
        if chunk.device.type == "cpu" and not bool(chunk.isfinite().all()):
            raise NonFiniteError("expected finite samples, got NaN or infinity; mend the signal")
        x = chunk.to(self.dtype).reshape(math.prod(chunk.shape[:-1]), chunk.shape[-1])
        waiting = x[:, :0] if state is None else state
        x = torch.cat((waiting, x), 1)
        begin, frames = 0, []
        while begin + self.samples <= x.shape[1]:
            frames.append(self._frame(x[:, begin : begin + self.samples]))
            begin += self.hop_length
        found = {
            k: torch.stack([frame[k] for frame in frames], 1)
            if frames
            else x.new_zeros(len(x), 0, self.grids[k].width)
            for k in names
        }
        made = {k: y.reshape(*chunk.shape[:-1], *y.shape[1:]) for k, y in found.items()}
        return made, x[:, begin:]
