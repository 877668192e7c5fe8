"""Rate-scale features: spectro-temporal modulation of an auditory spectrogram.

The cortical stage of Chi, Ru and Shamma (2005), J. Acoust. Soc. Am. 118(2), 887-906. Each filter
is tuned to a rate in Hz, a scale in cycles per octave, and a direction. Seed functions in time and
in frequency give its gain, where G is the Fourier transform of g.

    G(f / rate) / |G(1)|,  g(t) = t^2 exp(-3.5 t) sin(2 pi t);
    H(o; scale) = (o/scale)^2 exp(1 - (o/scale)^2).

Downward ripples have f > 0 and o > 0, upward ripples f > 0 and o < 0. A scale is the
frequency of the filter's peak; in the printed seed h(s x) the peak lies at 0.225 s. All filters are
band-pass; some programs make the first and last of them low-pass and high-pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from amtcore.arguments import RATE, Number, Numbers, Text, checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.torch_state import can_compute
from amtcore.models.auditory_spectrogram import COMPRESSIONS, HAIR_CELLS, AuditorySpectrogram
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs
from amtcore.models.ripple_moduli import LENGTH, ripple_moduli
from amtcore.stages.stage import check_floating
from amtcore.units import DIGITAL

DECAY = 3.5
RATES_HZ, SCALES = (2.0, 4.0, 8.0, 16.0, 32.0), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
DIRECTIONS = ("down", "up")
MARGIN = 8.0  # periods of the slowest rate that follow the spectrogram as zeros


def rate_response(u: Tensor) -> Tensor:
    """Return G(u) of the temporal seed, complex, for u = frequency / rate."""

    def pole(v: Tensor) -> Tensor:
        return torch.complex(torch.full_like(v, DECAY), 2 * math.pi * v) ** -3

    return -1j * (pole(u - 1.0) - pole(u + 1.0))


def scale_response(o: Tensor, scale: float) -> Tensor:
    """Return H(o; scale) of the spectral seed, for o in cycles per octave."""
    ratio = (o / scale) ** 2
    return ratio * torch.exp(1.0 - ratio)


class RateScale(FrameModule):
    """Energy of a sound by rate, scale and direction of its ripples.

    Args:
        fs: Sampling rate in Hz.
        rates: Rates in Hz, each below half the frame rate (62.5 Hz at fs = 16 kHz).
        scales: Scales in cycles per octave, each below half of the channels per octave (12).
        boundary: "zero" pads the spectrogram with zeros; "circular" continues it periodically.
        hair_cell: Argument of `AuditorySpectrogram`.
        compression: Argument of `AuditorySpectrogram`.
        dtype: torch.float32 or torch.float64.

    Shape:
        (batch, time) -> dict; (time,) -> the same without the first axis:
        `rate_scale` (batch, frame, direction * rate * scale), means of moduli over channels;
        `rate_scale_mean` (batch, 1, direction * rate * scale), means over frames too;
        `scale_frequency` (batch, frame, channel * scale), means over directions and rates;
        `rate_frequency` (batch, frame, channel * direction * rate), means over scales.
        The last index varies fastest. Direction 0 is downward.

    Invariants:
        Values scale with the input. A spectrogram that does not change gives 0 with
        boundary="circular". Gradients flow; a modulus of 0 has gradient 0.

    >>> RateScale(fs=16000)(torch.zeros(1600))["rate_scale"].shape
    torch.Size([13, 60])
    """

    input_unit = DIGITAL
    can_stream = False
    whole_clips_reason = "the filters in time are Fourier transforms of the whole spectrogram"

    @checked_arguments(
        rates=Numbers(RATE, single=False, ascending=True),
        scales=Numbers(Number(" cycles per octave", above=0.0), single=False, ascending=True),
        boundary=Text(("zero", "circular")),
        hair_cell=Text(HAIR_CELLS),
        compression=Text(COMPRESSIONS),
    )
    def __init__(
        self,
        fs: float,
        rates: Sequence[float] = RATES_HZ,
        scales: Sequence[float] = SCALES,
        boundary: str = "zero",
        hair_cell: str = "halfwave",
        compression: str = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.dtype, self.boundary = fs, dtype, boundary
        self.spectrogram = AuditorySpectrogram(
            fs, hair_cell=hair_cell, compression=compression, dtype=dtype
        )
        self.rates, self.scales = ([float(x) for x in each] for each in (rates, scales))
        of_channels = self.spectrogram.grids["spectrogram"]
        for name, values, limit, unit in (
            ("rates", self.rates, self.spectrogram.frame_rate_hz / 2, "Hz"),
            ("scales", self.scales, self.spectrogram.channels_per_octave / 2, "cycles per octave"),
        ):
            if values[-1] >= limit:
                raise ParameterError(
                    f"{name}: expected values below {limit:g} {unit}, got {values[-1]:g}"
                )
        hop, fc_hz = of_channels.hop_length, of_channels.fc_hz
        rates_hz = tuple(self.rates * len(DIRECTIONS))
        of_columns = tuple(rate for rate in rates_hz for _ in self.scales)
        names = tuple(
            f"{way}_{rate:g}_{scale:g}".replace(".", "p")  # columns of tables, 0p25 for 0.25
            for way in DIRECTIONS
            for rate in self.rates
            for scale in self.scales
        )

        def of_channel(count: int, mfc_hz: tuple[float, ...] = ()) -> FrameGrid:
            """Return the grid of frames with `count` columns a channel."""
            offsets = tuple(range(0, count * len(fc_hz) + 1, count))
            return FrameGrid(
                offsets[-1], hop, window_length=1, fc_hz=fc_hz, mfc_hz=mfc_hz * len(fc_hz),
                channel_offsets=offsets,
            )  # fmt: skip

        of_names = partial(FrameGrid, len(names), columns=names, mfc_hz=of_columns)
        self.grids = {
            "rate_scale": of_names(hop, window_length=1),
            "rate_scale_mean": of_names(None),
            "scale_frequency": of_channel(len(self.scales)),
            "rate_frequency": of_channel(len(rates_hz), rates_hz),
        }

    def extra_repr(self) -> str:
        return (
            f"fs={self.fs:g}, rates={self.rates}, scales={self.scales}, "
            f"boundary={self.boundary}, dtype={self.dtype}"
        )

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        spectrogram = self.spectrogram.outputs(signal)["spectrogram"]
        return self.features(spectrogram, self.wanted(names))

    def features(self, spectrogram: Tensor, names: tuple[str, ...] = ("rate_scale",)) -> Outputs:
        """Return outputs, by default `rate_scale`, of a spectrogram (.., frame, channel)."""
        check_floating(spectrogram, "(.., frame, channel)", 2)
        batch = spectrogram.shape[:-2]
        if not spectrogram.numel():  # MKL has no transforms of nothing
            return {k: spectrogram.new_zeros(*batch, 0, self.grids[k].width) for k in names}
        per_frame: list[Tensor] = []
        of_scales = spectrogram.new_zeros(())
        of_rates: list[Tensor] = []
        for moduli in self._moduli(spectrogram):
            if "rate_scale" in names or "rate_scale_mean" in names:
                per_frame.append(moduli.mean(-2))
            if "scale_frequency" in names:
                of_scales = of_scales + moduli.sum(-4)
            if "rate_frequency" in names:
                of_rates.append(moduli.mean(-3))
        made: Outputs = {}
        if per_frame:
            columns = torch.stack(per_frame, -3)  # (.., direction, rate, scale, frame)
            made["rate_scale"] = columns.flatten(-4, -2).mT.contiguous()
            made["rate_scale_mean"] = made["rate_scale"].mean(-2, keepdim=True)
        if of_scales.ndim:  # (.., scale, channel, frame)
            columns = of_scales / (2 * len(self.rates))
            made["scale_frequency"] = columns.transpose(-3, -2).flatten(-3, -2).mT
        if of_rates:
            columns = torch.stack(of_rates, -3)  # (.., direction, rate, channel, frame)
            made["rate_frequency"] = columns.movedim(-2, -4).flatten(-4, -2).mT
        return {name: made[name] for name in names}

    def cortical(self, spectrogram: Tensor) -> Tensor:
        """Return complex responses (.., direction, rate, scale, frame, channel).

        Args:
            spectrogram: (.., frame, channel), channels from low to high frequencies.
        """
        check_floating(spectrogram, "(.., frame, channel)", 2)
        channels = spectrogram.shape[-1]
        by_rate = [self._at_scales(each, channels) for each in self._by_rate(spectrogram)]
        down, up = torch.stack(by_rate, -4).mT.unbind(-5)
        return torch.stack((down, up.conj()), -5)

    def _moduli(self, spectrogram: Tensor) -> Iterator[Tensor]:
        """Yield for each rate the moduli (.., direction, scale, channel, frame)."""
        channels = spectrogram.shape[-1]
        by_kernel = can_compute(spectrogram) and self._n_channel(channels) == LENGTH
        for responses in self._by_rate(spectrogram):
            if by_kernel:
                gains = self._scale_gains(responses, channels) / LENGTH
                rows = responses.flatten(0, -3)
                yield ripple_moduli(rows, gains, channels).unflatten(0, responses.shape[:-2])
            else:
                at_scales = torch.view_as_real(self._at_scales(responses, channels))
                power = at_scales.square().sum(-1)
                some = power != 0  # the slope of a root at 0 is infinite
                yield torch.where(some, power, 1.0).sqrt() * some

    def _by_rate(self, spectrogram: Tensor) -> Iterator[Tensor]:
        """Yield for each rate (.., direction, frequency along the channels, frame).

        The frequencies o are 0 and above. Upward ripples lie at -o and are kept as conjugates, so
        that one inverse transform serves both directions.
        """
        frames, channels = spectrogram.shape[-2:]
        n_time, n_channel = frames, self._n_channel(channels)
        if self.boundary == "zero":
            silence = MARGIN * self.spectrogram.frame_rate_hz / self.rates[0]
            n_time = _power_of_two(frames + silence)
        # (.., channel, time) to the quadrants f >= 0, o >= 0 and f >= 0, o <= 0
        spectrum = torch.fft.rfft(spectrogram.transpose(-2, -1), n_time)
        spectrum = torch.fft.fft(spectrum, n_channel, dim=-2)[..., : (n_time + 1) // 2]
        down = spectrum[..., : (n_channel + 1) // 2, :]
        up = spectrum.roll(-1, -2).flip(-2)[..., : (n_channel + 1) // 2, :]
        quadrants = torch.stack((down, up), -3)
        f_hz = torch.arange(quadrants.shape[-1], dtype=torch.float64, device=spectrogram.device)
        f_hz *= self.spectrogram.frame_rate_hz / n_time
        at_one = rate_response(torch.ones_like(f_hz[:1])).abs()
        for rate in self.rates:
            gain = 2.0 * rate_response(f_hz / rate) / at_one * (f_hz > 0)
            each = torch.fft.ifft(quadrants * gain.to(quadrants.dtype), n_time)[..., :frames]
            each.select(-3, 1).conj_physical_()
            yield each

    def _at_scales(self, responses: Tensor, channels: int) -> Tensor:
        """Return (.., direction, scale, channel, frame) of a rate; upward ones are conjugates."""
        filtered = responses.unsqueeze(-3) * self._scale_gains(responses, channels).unsqueeze(-1)
        return torch.fft.ifft(filtered, self._n_channel(channels), dim=-2)[..., :channels, :]

    def _scale_gains(self, responses: Tensor, channels: int) -> Tensor:
        """Return the gains (scale, frequency along the channels)."""
        o = torch.arange(responses.shape[-2], dtype=torch.float64, device=responses.device)
        o *= self.spectrogram.channels_per_octave / self._n_channel(channels)
        return torch.stack([scale_response(o, scale) for scale in self.scales]).to(self.dtype)

    def _n_channel(self, channels: int) -> int:
        """Return the length of transforms along the channels."""
        return channels if self.boundary == "circular" else _power_of_two(2 * channels)


def _power_of_two(least: float) -> int:
    """Return the smallest power of two that is not below `least`."""
    return 1 << max(math.ceil(least) - 1, 0).bit_length()
