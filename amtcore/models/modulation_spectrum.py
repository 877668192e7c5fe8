"""Modulation power spectrum: energy of envelopes by modulation frequency, in octave bands.

A window of an envelope is weighted by a Hann window, and its mean is removed before the transform.
The power of each bin is shared among the bands that it overlaps.

    P_k = c_k |X_k|^2 / (L sum(h^2)),  X_k = DFT of h (E - mu),  mu = sum(h E) / sum(h).

The factor c is 2 below half of the envelope's rate and 1 at half. The sum of P_k is the weighted
mean square of E - mu, as in scipy.signal.periodogram. The definition is new; no program is its
reference.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import RATE, Flag, Number, Text, checked_arguments, whole
from amtcore.errors import ParameterError, ShapeError
from amtcore.models.auditory_spectrogram import COMPRESSIONS, HAIR_CELLS, AuditorySpectrogram
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal
from amtcore.stages.constants import FixedType
from amtcore.stages.stage import check_floating, product
from amtcore.units import DIGITAL

SHORT = ("whole", "drop", "error")
_SLACK = 1e-9  # relative, of a band's edges
_RULES = {
    "win_s": Number(" s", above=0.0, most=3600.0, optional=True, hint="times are in seconds"),
    "hop_s": Number(" s", above=0.0, most=3600.0, hint="times are in seconds"),
    "f_min": RATE,
    "f_max": RATE,
    "bands_per_octave": whole(1, 100),
    "relative": Flag(),
}


class ModulationSpectrum(FixedType):
    """Energy of envelopes in bands of modulation frequency.

    Args:
        fs: Sampling rate of the envelopes in Hz.
        win_s: Length of a window in s; None takes the whole envelope.
        hop_s: Time between windows in s.
        f_min: Centre frequency of the lowest band in Hz.
        f_max: Highest centre frequency in Hz.
        bands_per_octave: Bands per octave; neighbours share an edge.
        relative: Divide energies by the square of the window's mean.
        short: Windows of an envelope shorter than `win_s`: "whole" takes one window of all samples,
            "drop" none, "error" raises.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, channel, time) -> dict of `energy` (batch, window, channel, band), `mean` (batch,
        window, channel) and `valid` (band,). (channel, time) gives no batch axis.
        There are floor((time - L) / H) + 1 windows, with L = win_s fs and H = hop_s fs rounded.

    Invariants:
        Bands whose edges lie outside 1 / window and half the rate are not valid, and hold NaN. A
        sinusoidal modulation of depth m adds m^2 / 2 to its band if `relative`; a gain of the input
        changes nothing then. Gradients flow to the envelopes.

    >>> envelope = 1 + 0.5 * torch.sin(2 * math.pi * 8 * torch.arange(800) / 100)
    >>> found = ModulationSpectrum(fs=100)(envelope[None])
    >>> found["energy"].shape, round(float(found["energy"][0, 0, 4]), 4)
    (torch.Size([5, 1, 9]), 0.125)
    """

    lower_hz: Tensor
    upper_hz: Tensor
    fc: Tensor

    @checked_arguments(**_RULES, short=Text(SHORT))
    def __init__(
        self,
        fs: float,
        win_s: float | None = 4.0,
        hop_s: float = 1.0,
        f_min: float = 0.5,
        f_max: float = 128.0,
        bands_per_octave: int = 1,
        relative: bool = True,
        short: str = "whole",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.win_s, self.hop_s, self.dtype = fs, win_s, hop_s, dtype
        self.relative, self.short = relative, short
        if f_max < f_min:
            raise ParameterError(
                f"expected f_max of f_min ({f_min:g} Hz) or more, got {f_max:g} Hz"
            )
        count = math.floor(bands_per_octave * math.log2(f_max / f_min) + _SLACK) + 1
        centres = f_min * 2.0 ** (torch.arange(count, dtype=torch.float64) / bands_per_octave)
        half = 2.0 ** (0.5 / bands_per_octave)
        self.register_buffer("fc", centres)
        self.register_buffer("lower_hz", centres / half)
        self.register_buffer("upper_hz", centres * half)
        self.hop_length = max(1, _rounded(hop_s * fs))
        #: Samples of a window; None takes the whole envelope.
        self.window_length = None if win_s is None else _rounded(win_s * fs)
        if self.window_length == 0:
            raise ParameterError(f"win_s: expected a sample or more at {fs:g} Hz, got {win_s:g} s")

    def extra_repr(self) -> str:
        return (
            f"fs={self.fs:g}, win_s={self.win_s}, hop_s={self.hop_s:g}, bands={len(self.fc)}, "
            f"relative={self.relative}, short={self.short}, dtype={self.dtype}"
        )

    def valid(self, window_length: int) -> Tensor:
        """Return True for each band whose edges a window of this many samples resolves."""
        above = self.lower_hz * (1.0 + _SLACK) >= self.fs / max(window_length, 1)
        return above & (self.upper_hz <= self.fs / 2 * (1.0 + _SLACK))

    def forward(self, envelope: Tensor, depth: bool = False) -> Outputs:
        """Return energies of all windows.

        Args:
            envelope: (batch, channel, time) or (channel, time), in any unit.
            depth: Also return `depth`, the root of twice the energy: the modulation depth of a
                single sinusoid in the band.
        Raises:
            ShapeError: Other axes, or a short envelope with short="error".
        """
        axes = "(batch, channel, time) or (channel, time)"
        check_floating(envelope, axes)
        if envelope.ndim not in (2, 3):
            raise ShapeError(f"expected {axes}, got a tensor of shape {tuple(envelope.shape)}")
        x, samples = finite_signal(envelope, self.dtype), envelope.shape[-1]
        length = samples if self.window_length is None else self.window_length
        if samples < length and self.short == "error":
            raise ShapeError(
                f"expected an envelope of {length} samples ({self.win_s:g} s) or more, got "
                f"{samples}; use short='whole' or 'drop', or a shorter window"
            )
        if samples < length and self.short == "whole":
            length = samples
        if samples < max(length, 1):
            windows = x.new_zeros(*x.shape[:-2], 0, x.shape[-2], max(length, 1))
        else:
            windows = x.unfold(-1, length, self.hop_length).transpose(-3, -2)
        energy, mean = self.of_windows(windows)
        made = {"energy": energy, "mean": mean, "valid": self.valid(length)}
        return {**made, "depth": (2.0 * energy).sqrt()} if depth else made

    def of_windows(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies (.., band) and means (..,) of windows (.., time)."""
        length = windows.shape[-1]
        hann, shares = (each.to(windows) for each in self._tables(length))
        mean = (windows * hann).sum(-1) / hann.sum()
        if not windows.numel():
            return windows.new_zeros(*mean.shape, len(self.fc)), mean
        waves, silent = hann * (windows - mean.unsqueeze(-1)), (mean == 0).unsqueeze(-1)
        if self.relative:
            # Divided before they are squared: squares of the sound's last decay are 0 in float32.
            waves = waves / torch.where(silent, 1.0, mean.unsqueeze(-1))
        spectrum = torch.fft.rfft(waves)
        energy = product(torch.view_as_real(spectrum).flatten(-2).square(), shares)
        if self.relative:
            energy = torch.where(silent, 0.0, energy)
        return torch.where(self.valid(length), energy, math.nan), mean

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the Hann window (time,) and the shares of each bin in each band."""
        bands = (tuple(self.lower_hz.tolist()), tuple(self.upper_hz.tolist()))
        return _tables(length, self.fs, *bands)


class AuditoryModulationSpectrum(FrameModule):
    """Modulation spectrum of an auditory spectrogram, from a sound.

    Args:
        fs: Sampling rate in Hz. The spectrogram has a frame every 8 ms.
        win_s: Length of a window in s; shorter sounds give no frame.
        hop_s: Time between windows in s.
        f_min: Centre frequency of the lowest modulation band in Hz.
        f_max: Highest centre frequency in Hz; bands that a window or the spectrogram's rate does
            not resolve are left out.
        bands_per_octave: Bands per octave.
        relative: Divide energies by the square of the channel's mean in the window.
        hair_cell: Argument of `AuditorySpectrogram`.
        compression: Argument of `AuditorySpectrogram`.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, time) -> dict of `energy` (batch, window, channel * band), whose bands vary fastest,
        and `mean` (batch, window, channel); (time,) gives no batch axis.

    Invariants:
        `stream` over any split equals the whole signal bit by bit. Gradients flow.

    >>> model = AuditoryModulationSpectrum(fs=16000, win_s=1.0)
    >>> model.bands_hz, model(torch.zeros(20000))["energy"].shape
    ((2.0, 4.0, 8.0, 16.0, 32.0), torch.Size([1, 640]))
    """

    input_unit = DIGITAL
    columns: Tensor

    @checked_arguments(
        **_RULES | {"win_s": Number(" s", above=0.0, most=3600.0, hint="times are in seconds")},
        hair_cell=Text(HAIR_CELLS),
        compression=Text(COMPRESSIONS),
    )
    def __init__(
        self,
        fs: float,
        win_s: float = 4.0,
        hop_s: float = 1.0,
        f_min: float = 0.5,
        f_max: float = 128.0,
        bands_per_octave: int = 1,
        relative: bool = True,
        hair_cell: str = "halfwave",
        compression: str = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.dtype = fs, dtype
        self.spectrogram = AuditorySpectrogram(
            fs, hair_cell=hair_cell, compression=compression, dtype=dtype
        )
        self.spectrum = ModulationSpectrum(
            self.spectrogram.frame_rate_hz, win_s, hop_s, f_min, f_max, bands_per_octave,
            relative, "drop", dtype,
        )  # fmt: skip
        length = self.spectrum.window_length
        assert length is not None
        self.window_length: int = length
        valid = self.spectrum.valid(length)
        self.register_buffer("columns", valid.nonzero().flatten())
        #: Centre frequencies of the bands.
        self.bands_hz = tuple(self.spectrum.fc[valid].tolist())
        if not self.bands_hz:
            raise ParameterError(
                f"expected a band between {1 / win_s:g} Hz (a period in win_s) and half the frame "
                f"rate, {self.spectrum.fs / 2:g} Hz, got bands from {f_min:g} to {f_max:g} Hz"
            )
        self.memory_s = self.spectrogram.memory_s
        frame, count = self.spectrogram.hop_length, len(self.bands_hz)
        fc_hz = self.spectrogram.grids["spectrogram"].fc_hz
        on_grid: dict[str, Any] = {
            "hop_length": frame * self.spectrum.hop_length,
            "window_length": frame * (length - 1) + 1,
            "fc_hz": fc_hz,
        }
        offsets = tuple(range(0, count * len(fc_hz) + 1, count))
        unit = "input unit" if compression == "none" else "input unit^(1/3)"
        of_energy: dict[str, Any] = {
            "mfc_hz": self.bands_hz * len(fc_hz),
            "channel_offsets": offsets,
        }
        of_energy["unit"] = "1" if relative else f"({unit})^2"
        self.grids = {
            "energy": FrameGrid(offsets[-1], **on_grid, **of_energy),
            "mean": FrameGrid(len(fc_hz), **on_grid, unit=unit),
        }

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        ear, waiting, due = (None, None, 0) if state is None else state
        found, ear = self.spectrogram.stream(chunk, ear, last)
        frames = found["spectrogram"]
        frames = frames if waiting is None else torch.cat((waiting, frames), -2)
        # Windows one by one, since the bits of a product depend on the number of its rows.
        parts: list[tuple[Tensor, Tensor]] = []
        first = due
        while first + self.window_length <= frames.shape[-2]:
            window = frames[..., first : first + self.window_length, :]
            parts.append(self.spectrum.of_windows(window.transpose(-2, -1).contiguous()))
            first += self.spectrum.hop_length
        none = frames[..., :0, :]
        made = {"energy": none.repeat_interleave(len(self.bands_hz), -1), "mean": none}
        if parts:
            energies, means = zip(*parts, strict=True)
            made["energy"] = torch.stack(energies, -3)[..., self.columns].flatten(-2)
            made["mean"] = torch.stack(means, -2)
        passed = min(first, frames.shape[-2])
        after = ear, frames[..., passed:, :], first - passed
        return {name: made[name] for name in self.wanted(names)}, after


@lru_cache(maxsize=16)
def _tables(
    length: int, fs: float, lower_hz: tuple[float, ...], upper_hz: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Return window and shares in float64, with the factors of P_k.

    Rows of the shares are (bin, real and imaginary part), so that squares need no sum of pairs.
    """
    n, step = torch.arange(length, dtype=torch.float64), fs / length
    hann = 0.5 - 0.5 * torch.cos(2 * math.pi * n / length) if length > 1 else torch.ones_like(n)
    k = torch.arange(length // 2 + 1, dtype=torch.float64)[:, None]
    low, high = (k - 0.5) * step, ((k + 0.5) * step).clamp(max=fs / 2)
    lower, upper = (torch.tensor(each, dtype=torch.float64) for each in (lower_hz, upper_hz))
    overlap = (torch.minimum(high, upper) - torch.maximum(low, lower)).clamp(min=0.0) / step
    twice = torch.where(2 * k == length, 1.0, 2.0) * (k > 0)
    shares = twice * overlap / (length * hann.square().sum())
    return hann, shares.repeat_interleave(2, 0)


def _rounded(value: float) -> int:
    """Return the nearest whole number; halves away from 0."""
    return math.floor(value + 0.5)
