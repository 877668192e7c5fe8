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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from amtcore.arguments import SAMPLING_RATE, Number, checked_arguments, whole
from amtcore.filter_design import interpolate
from amtcore.kernels.operations import roughness as kernels
from amtcore.kernels.operations.roughness import LOWER, UPPER_DB
from amtcore.kernels.torch_state import can_run
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.tables import load_table
from amtcore.units import REFERENCE_PA

#: Seconds of a frame, and channels.
FRAME_S, CHANNELS = 0.2, 47
#: First channel of each weighting of modulation, and its highest modulation frequency in Hz.
MODULATION = (("h2", 1, 358.0), ("h5", 5, 502.0), ("h16", 16, 502.0), ("h21", 21, 502.0),
              ("h42", 42, 502.0))  # fmt: skip
#: Factor from the mean to the amplitude of a component, nearly sqrt 2 (as in the article).
PEAK = 1.42
#: Slope of excitation in dB/Bark above a component, and its change per Hz.
UPPER, UPPER_HZ = -24.0, -230.0
#: An envelope with relatively less modulation is rounding noise.
LEAST_MODULATION = 1e-5
#: A threshold that no component meets, in dB.
NEVER = 1e6
#: Frames that are computed together, which limits memory.
BLOCK_FRAMES = 16
#: Samples to which a frame of envelopes is reduced for its low bins, and the low-pass before that:
#: shape of its Kaiser window. Other components of a bin are below 1e-10.
LOW_SAMPLES, KAISER = 400, 28.0


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
    components: Tensor
    near: Tensor
    least: Tensor
    modulation: Tensor
    low_pass: Tensor
    low_bins: Tensor
    g: Tensor

    @checked_arguments(
        fs=replace(SAMPLING_RATE, least=16000.0),
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
        constants = self._tables(table, z) | self._modulation(table)
        for name, value in constants.items():
            self.register_buffer(name, value.to(dtype) if value.is_floating_point() else value)

    def extra_repr(self) -> str:
        return f"fs={self.fs:g}, overlap={self.overlap:g}, bin_offset={self.bin_offset}"

    def _tables(self, table: dict[str, Tensor], z: Tensor) -> dict[str, Tensor]:
        """Return the constants of the excitation by name.

        Rows of `components` are in the order of `kernels.EAR` .. `kernels.REST`. A critical-band
        rate is a multiple of 0.5 and the rest, so that float32 holds distances to a channel well.
        """
        n = self.samples
        turn = 2.0 * math.pi * torch.arange(n, dtype=torch.float64) / (n - 1)
        window = 0.42 - 0.5 * torch.cos(turn) + 0.08 * torch.cos(2.0 * turn)
        f_hz = (torch.arange(n // 2, dtype=torch.float64) + self.bin_offset) * (self.fs / n)
        b = _interpolated(f_hz, table["scale_hz"], table["scale_z_bark"])
        threshold = _interpolated(b, table["threshold_z_bark"], table["threshold_db"])
        if self.bin_offset == 0:
            threshold[0] = NEVER
        low, high, channel = torch.floor(2.0 * b), torch.ceil(2.0 * b), (2.0 * z).round()
        near = torch.stack(
            (torch.bucketize(channel, high), torch.bucketize(channel, low, right=True)), 1
        )
        zones = table["threshold_z_bark"], table["threshold_db"]
        least = torch.stack([_interpolated(z + by, *zones) for by in (-0.5, 0.5)], 1)
        rows = [
            10.0 ** (_interpolated(b, table["ear_z_bark"], table["ear_db"]) / 20),
            threshold,
            UPPER + UPPER_HZ / f_hz.clamp(min=1e-3),
            torch.where(torch.arange(n // 2) > 0, 0.5, 1.0),
            0.5 * low,
            b - 0.5 * low,
        ]
        return {
            "window": PEAK * window / window.sum(),
            "components": pad(torch.stack(rows), (0, LANES)),
            "near": near,
            "least": least,
            "g": _interpolated(z, table["g_z_bark"], table["g"]),
        }

    def _modulation(self, table: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the constants of the envelopes' bins, from bin 2 to the highest of any channel.

        The matrix `low_bins` transforms outputs of `low_pass` to the mean and the bins.
        """
        n, hop = self.samples, max(self.samples // LOW_SAMPLES, 1)
        bins = torch.arange(2, self._bins(MODULATION[-1][2]), dtype=torch.float64)
        ends, weights = (*(first for _, first, _ in MODULATION[1:]), CHANNELS + 1), []
        for (name, first, top_hz), end in zip(MODULATION, ends, strict=True):
            weight = _interpolated(bins * (self.fs / n), table[f"{name}_hz"], table[name])
            weight = torch.where(bins < self._bins(top_hz), weight, 0.0)
            weights.append(weight.repeat_interleave(2).expand(end - first, -1))
        taps = torch.kaiser_window(hop * kernels.OUTPUTS, False, KAISER, dtype=torch.float64)
        taps = taps / taps.sum()
        omega = 2.0 * math.pi / n * torch.cat((torch.zeros(1).double(), bins))
        turn = torch.exp(-1j * omega * torch.arange(len(taps)).unsqueeze(1))
        outputs = kernels.outputs_of(n, hop)
        back = torch.exp(-1j * omega * (hop * torch.arange(1, outputs + 1).unsqueeze(1) - 1))
        low_bins = torch.view_as_real(back * hop / n / (taps @ turn.real + 1j * (taps @ turn.imag)))
        return {
            "modulation": torch.cat(weights),
            "low_pass": taps.unflatten(0, (-1, hop)).flip(1).T.contiguous(),
            "low_bins": torch.cat((low_bins[:, 0, :1], low_bins[:, 1:].flatten(1)), 1),
        }

    def _bins(self, top_hz: float) -> int:
        return math.floor(top_hz * self.samples / self.fs)

    def spectra(self, x: Tensor) -> Tensor:
        """Return the one-sided spectrum of each channel, (.., channel, component).

        Components above 0 Hz are halved, as a real signal has each of them twice. The kernel
        `excite` does the same.

        Args:
            x: Frames (.., samples) in Pa.
        """
        ear, threshold, steepness, halves, whole, rest = self.components[:, :-LANES]
        spectrum = torch.fft.rfft(x * self.window)[..., : len(ear)] * ear
        level = 20.0 * torch.log10(spectrum.abs().clamp(min=1e-15) / REFERENCE_PA)
        slope = (steepness + UPPER_DB * level).clamp(max=0.0)
        edge = 0.5 * torch.arange(CHANNELS, device=x.device).unsqueeze(1)
        below = ((edge - whole) - rest).clamp(min=0.0)
        above = ((edge + 1.0 - whole) - rest).clamp(max=0.0)
        component = torch.arange(len(ear), device=x.device)
        near, least = self.near.unsqueeze(-1), self.least.unsqueeze(-1)
        bound = torch.where(component < near[:, 0], least[:, 0], least[:, 1])
        bound = bound.masked_fill((component >= near[:, 0]) & (component < near[:, 1]), -NEVER)
        gain = torch.addcmul(-LOWER * above, slope.unsqueeze(-2), below)
        factors = torch.exp(gain * kernels.EXPONENT) * (level.unsqueeze(-2) + gain > bound)
        audible = spectrum * (halves * (level > threshold))
        return pad(factors * audible.unsqueeze(-2), (0, 1))

    def envelopes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means (.., channel) and weighted bins (.., channel, pair of numbers) of envelopes.

        Args:
            x: Frames of each signal (signal, frame, samples) in Pa.
        """
        if can_run(x):
            bins = x.new_empty(*x.shape[:2], CHANNELS, self.low_bins.shape[1])
            parallel_for(lambda i: self._low_bins_of(x[i], bins[i]), len(x))
            return bins[..., 0], bins[..., 1:] * self.modulation
        waves = torch.fft.irfft(self.spectra(x), self.samples, norm="forward")
        spectrum = torch.view_as_real(torch.fft.rfft(waves.abs(), norm="forward"))
        pairs = spectrum[..., 2 : 2 + self.modulation.shape[-1] // 2, :].flatten(-2)
        return spectrum[..., 0, 0], pairs * self.modulation

    def _low_bins_of(self, x: Tensor, out: Tensor) -> None:
        """Compute means and bins of the envelopes of (frame, samples) by the kernels.

        Frames share memory, as fresh memory of this size costs a page fault every 4 kB.
        """
        excited = x.new_empty(CHANNELS, self.samples // 2 + 1, 2)
        lowered = x.new_empty(CHANNELS, len(self.low_bins))
        channels, pairs, low = (
            excited.flatten(1).numpy(),
            torch.view_as_complex(excited),
            lowered.numpy(),
        )
        tables = [each.numpy() for each in (self.components, self.near, self.least)]
        low_pass = self.low_pass.numpy()
        for frame, bins in zip(x, out, strict=True):
            spectrum = torch.view_as_real(torch.fft.rfft(frame * self.window))
            kernels.excite(spectrum.view(-1).numpy(), *tables, channels)
            waves = torch.fft.irfft(pairs, self.samples, norm="forward")
            kernels.lower_rate(waves.numpy(), low_pass, low)
            torch.matmul(lowered, self.low_bins, out=bins)

    def depth_and_correlation(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return modulation depth, correlation of channels i and i + 2, and mean envelope."""
        h0, parts = self.envelopes(x)
        energy, tiny = parts.square().sum(-1), torch.finfo(self.dtype).tiny
        rms = (2.0 * energy).clamp(min=tiny).sqrt()
        depth = torch.where(h0 > 0, (rms / h0.clamp(min=tiny)).clamp(max=1.0), 0.0)
        steady = rms <= LEAST_MODULATION * h0
        size = energy.clamp(min=tiny).sqrt()
        cross = (parts[..., :-2, :] * parts[..., 2:, :]).sum(-1) / size[..., :-2] / size[..., 2:]
        return depth, cross.masked_fill(steady[..., :-2] | steady[..., 2:], 0.0), h0

    def _block(self, x: Tensor) -> Outputs:
        """Return the outputs (signal, frame, column) of frames (signal, frame, samples)."""
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
        x = finite_signal(chunk, self.dtype).reshape(math.prod(chunk.shape[:-1]), chunk.shape[-1])
        waiting = x[:, :0] if state is None else state
        x = torch.cat((waiting, x), 1)
        count = max((x.shape[1] - self.samples) // self.hop_length + 1, 0)
        none = {k: x.new_zeros(len(x), 0, grid.width) for k, grid in self.grids.items()}
        blocks = x.unfold(1, self.samples, self.hop_length).split(BLOCK_FRAMES, 1) if count else ()
        parts = [none, *(self._block(block) for block in blocks)]
        found = {k: torch.cat([part[k] for part in parts], 1) for k in names}
        made = {k: y.reshape(*chunk.shape[:-1], *y.shape[1:]) for k, y in found.items()}
        return made, x[:, count * self.hop_length :]
