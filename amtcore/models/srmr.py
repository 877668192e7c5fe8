"""Speech-to-reverberation modulation energy ratio (SRMR), a score of one clip without a reference.

Falk, Zheng and Chan (2010), IEEE TASLP 18(7), 1766-1774; with `norm` Santos, Senoussaoui and Falk
(2014), IWAENC. The numbers equal SRMRpy (commit fee0097). SRMRpy's fast variant reads the
bandwidth of a channel from the wrong end; `bandwidth="corrected"` reads it from the right end.
For intelligibility against a clean clip take `STOI`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from amtcore import filter_design as design
from amtcore.arguments import RATE, SAMPLING_RATE, Flag, Text, checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.devices import get_backend
from amtcore.kernels.operations.envelope import Quadrature
from amtcore.kernels.operations.modulation_filters import BANK_STATE_VARIABLE
from amtcore.kernels.operations.sections import STATE_VARIABLE
from amtcore.kernels.operators import modulation_bank, run_ops
from amtcore.kernels.torch_state import can_run, rows_of, wants_derivative
from amtcore.kernels.vector.arrays import groups_of
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.memory import aligned, transpose
from amtcore.kernels.vector.simd import LANES, fma, vload, vsplat, vstore
from amtcore.models.frame_blocks import inside
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs, finite_signal

#: ERB(f) = f / EAR_Q + LEAST_HZ, and bandwidth of a gammatone filter in ERB (Slaney 1993).
EAR_Q, LEAST_HZ, BANDWIDTH = 9.26449, 24.7, 1.019
#: Modulation filters: their number, quality, and frequency of the highest without and with `norm`.
BANDS, QUALITY, MAX_CF_HZ, NORM_MAX_CF_HZ = 8, 2.0, 128.0, 30.0
#: Window and hop of the energies in s.
WINDOW_S, HOP_S = Fraction("0.256"), Fraction("0.064")
#: Gammatonegram of the fast variant: block, window and hop in s; its rate as SRMRpy takes it.
BLOCK_S, FAST_WINDOW_S, FAST_HOP_S = Fraction("0.02"), Fraction("0.01"), Fraction("0.0025")
FAST_RATE_HZ = 400
#: Most by which a clip is scaled before its squares, as a power of two.
LARGEST_EXPONENT = 120
#: Energies are limited to 30 dB with `norm`.
NORM_RATIO = 1000.0
#: Bands of the numerator; the denominator has bands from here to 5 or more.
SLOW_BANDS, LEAST_BANDS, SHARE = 4, 5, 0.9
#: SRMRpy pads the envelope to a multiple of this many samples.
PADDED_TO = 16
#: Hops, spectra and samples of a block, which limit memory.
BLOCK_HOPS, BLOCK_SPECTRA, BLOCK_SAMPLES = 8, 128, 128
#: Hops that a window covers, the last of them in part.
WINDOW_HOPS = 4


@kernel
def sum_energies(
    group: int, x: Any, channels: int, length: int, begin: int, hop: int, hops: int, coef: Any,
    windows: Any, out: Any,
) -> None:  # fmt: skip
    """Sum the energies of eight modulation filters of LANES channels, hop by hop.

    Shapes, all flat: x (channel, length), coef (band, 6), windows (hop, WINDOW_HOPS), out (group,
    hop, WINDOW_HOPS, band, LANES). The first sample is sample `begin` of the first hop.
    """
    first, bands, t = group * LANES, coef.shape[0] // 6, 0
    rows, step = min(LANES, channels - first), bands * LANES
    block, state = aligned(BLOCK_SAMPLES * LANES, x), aligned(2 * step, x)
    state[:] = 0.0
    end = min(length, hops * hop - begin)
    while t < end:
        at, row = (t + begin) % hop, (group * hops + (t + begin) // hop) * WINDOW_HOPS * step
        n = min(BLOCK_SAMPLES, end - t, hop - at)
        transpose(x, first * length + t, length, rows, n, block, LANES, LANES)
        for band in range(bands):
            c = 6 * band
            a1, a2, a3 = vsplat(x, coef[c]), vsplat(x, coef[c + 1]), vsplat(x, coef[c + 2])
            gain = vsplat(x, coef[c + 4])
            i1, i2 = vload(state, 2 * band * LANES), vload(state, (2 * band + 1) * LANES)
            place = row + band * LANES
            e0, e1 = vload(out, place), vload(out, place + step)
            e2, e3 = vload(out, place + 2 * step), vload(out, place + 3 * step)
            for s in range(n):
                v = vload(block, s * LANES) - i2
                y, low = fma(a2, v, a1 * i1), fma(a3, v, fma(a2, i1, i2))
                i1, i2 = (y + y) - i1, (low + low) - i2
                y = gain * y
                y, w = y * y, WINDOW_HOPS * (at + s)
                e0 = fma(y, vsplat(x, windows[w]), e0)
                e1 = fma(y, vsplat(x, windows[w + 1]), e1)
                e2 = fma(y, vsplat(x, windows[w + 2]), e2)
                e3 = fma(y, vsplat(x, windows[w + 3]), e3)
            vstore(state, 2 * band * LANES, i1)
            vstore(state, (2 * band + 1) * LANES, i2)
            vstore(out, place, e0)
            vstore(out, place + step, e1)
            vstore(out, place + 2 * step, e2)
            vstore(out, place + 3 * step, e3)
        t += n


def _rounded(seconds: Fraction, fs: Fraction) -> int:
    """Return a number of samples, rounded half up."""
    return math.floor(seconds * fs + Fraction(1, 2))


def erb_hz(f_hz: Tensor) -> Tensor:
    """Return the equivalent rectangular bandwidth in Hz."""
    return f_hz / EAR_Q + LEAST_HZ


def centre_frequencies(fs: float, count: int, low_hz: float) -> Tensor:
    """Return ascending centre frequencies in Hz, evenly spaced in ERB; the next would be fs/2."""
    step = torch.arange(count, dtype=torch.float64) / count
    offset = EAR_Q * LEAST_HZ
    return (low_hz + offset) ** (1.0 - step) * (fs / 2.0 + offset) ** step - offset


def modulus(re: Tensor, im: Tensor) -> Tensor:
    """Return the modulus of complex numbers.

    Torch's modulus has the gradient 0 at 0. A square root has none there, but takes half the time.
    """
    if wants_derivative(re, im):
        return torch.complex(re, im).abs()
    return torch.addcmul(re.square(), im, im).sqrt_()


class SRMR(FrameModule):
    """Speech-to-reverberation modulation energy ratio.

    Gammatone filters, temporal envelope, eight modulation filters, and their energy in windows of
    0.256 s. The score is the energy of the four slow bands over the energy of the faster bands, up
    to a band that depends on the clip's spectrum. Reverberation and noise lower the score.

    Args:
        fs: Sampling rate in Hz, 1000 or more; the measure is defined for 8000 and 16000.
        n_channels: Number of gammatone filters.
        low_freq: Lowest centre frequency of the gammatone filters in Hz.
        min_cf: Lowest modulation frequency in Hz.
        max_cf: Highest modulation frequency in Hz; None is 128, or 30 with `norm`.
        fast: Whether envelopes come from a spectrogram at 400 Hz, not from filters at `fs`.
        norm: Whether energies are limited to 30 dB below their peak, which makes scores of
            different talkers and texts comparable.
        framing: "srmrpy" (whole windows), or "buffer" (windows that begin and end outside the
            clip, as in SRMRpy before November 2015, to which its published values belong).
        bandwidth: "srmrpy", or "corrected": the fast variant then finds the channel of 90 % of the
            energy from the lowest channel upwards, as the full variant does.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., time) in any unit, which changes the energies and not the score.
        score: (.., 1, 1). NaN for silence, and for a clip without a window.
        energy: (.., frame, channel * 8), channel by channel, in the input's unit squared.
        modulation_spectrogram: (.., 1, channel * 8), mean of `energy` over the frames.

    Invariants:
        A gain of the input does not change the score. Gradients exist; they do not see that another
        gain or clip may have other bands in the denominator.

    Raises:
        NonFiniteError: NaN or infinity in a signal.

    >>> t = torch.arange(16000) / 16000
    >>> noise = torch.randn(16000, generator=torch.Generator().manual_seed(1))
    >>> slow = noise * (1.0 + torch.sin(2 * torch.pi * 5 * t))
    >>> model = SRMR(fs=16000, fast=True)
    >>> bool(model(slow)["score"] > 2 * model(noise)["score"])
    True
    """

    input_unit = "digital"
    shown = "fs n_channels low_freq min_cf max_cf fast norm framing bandwidth dtype"
    can_stream = False
    whole_clips_reason = (
        "the Hilbert envelope of the full variant and the limits of norm depend on the whole clip"
    )
    fc_hz: Tensor
    modulation_hz: Tensor
    sections: Tensor
    weights: Tensor
    window: Tensor
    filters: Tensor
    hop_windows: Tensor

    @checked_arguments(
        fs=replace(SAMPLING_RATE, least=1000.0),
        low_freq=RATE, min_cf=RATE, max_cf=replace(RATE, optional=True),
        n_channels=whole(1, 512), fast=Flag(), norm=Flag(),
        framing=Text(("srmrpy", "buffer")), bandwidth=Text(("srmrpy", "corrected")),
    )  # fmt: skip
    def __init__(
        self,
        fs: float,
        n_channels: int = 23,
        low_freq: float = 125.0,
        min_cf: float = 4.0,
        max_cf: float | None = None,
        fast: bool = False,
        norm: bool = False,
        framing: str = "srmrpy",
        bandwidth: str = "srmrpy",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fs, self.n_channels, self.fast, self.norm = float(fs), n_channels, fast, norm
        self.low_freq, self.min_cf, self.dtype = low_freq, min_cf, dtype
        self.max_cf = (NORM_MAX_CF_HZ if norm else MAX_CF_HZ) if max_cf is None else max_cf
        self.framing, self.bandwidth = framing, bandwidth
        rate = Fraction(str(self.fs))
        self.rate = Fraction(FAST_RATE_HZ) if fast else rate
        if not min_cf <= self.max_cf < self.rate / 2:
            raise ParameterError(
                f"expected min_cf <= max_cf < {float(self.rate / 2):g} Hz, half the rate of the "
                f"envelope, got {min_cf:g} and {self.max_cf:g} Hz"
            )
        if not low_freq < fs / 2:
            raise ParameterError(f"low_freq {low_freq:g} Hz must lie below fs/2 ({fs / 2:g} Hz)")
        self.length, self.hop = math.ceil(WINDOW_S * self.rate), math.ceil(HOP_S * self.rate)
        self._make_envelope(rate)
        self._make_bank()
        columns = self.n_channels * BANDS
        layout: dict[str, Any] = {
            "fc_hz": tuple(self.fc_hz.tolist()),
            "mfc_hz": tuple(self.modulation_hz.tolist()) * n_channels,
            "channel_offsets": tuple(range(0, columns + 1, BANDS)),
            "least": 0.0,
        }
        first = 1 if framing == "buffer" else self.length
        #: Windows of an envelope. A sample of it comes from `block` samples of the clip.
        self.windows = FrameGrid(1, self.hop, first)
        self.padded_to = 1 if fast or framing == "buffer" else PADDED_TO
        block, step = (self.block, self.block_hop) if fast else (1, 1)
        hop, window = self.hop * step, block + (first - 1) * step
        self.grids = {
            "score": FrameGrid(1, None, columns=("score",), least=0.0),
            "energy": FrameGrid(columns, hop, window, padded_to=self.padded_to, **layout),
            "modulation_spectrogram": FrameGrid(columns, None, **layout),
        }

    def _make_envelope(self, rate: Fraction) -> None:
        """Design the gammatone filters, or the weights of the spectrogram's bins."""
        fc_hz = centre_frequencies(self.fs, self.n_channels, self.low_freq)
        self.register_buffer("fc_hz", fc_hz)
        numerators, denominator = design.gammatone_polynomials(
            fc_hz, BANDWIDTH * erb_hz(fc_hz), self.fs
        )
        rows = design.section_rows(numerators, denominator)
        self.register_buffer("sections", rows.to(self.dtype))
        self.block = 2 ** math.ceil(math.log2(BLOCK_S * rate))
        half = _rounded(FAST_WINDOW_S, rate) // 2
        self.block_hop = _rounded(FAST_HOP_S, rate)
        theta = 2.0 * math.pi * torch.arange(self.block // 2 + 1).double() / self.block
        gains = design.polynomial(numerators.unsqueeze(2), theta) / design.polynomial(
            denominator.unsqueeze(1), theta
        )
        self.register_buffer("weights", (gains.abs().prod(0) / self.block).T.to(self.dtype))
        window = torch.hann_window(2 * half, dtype=torch.float64)
        around = self.block // 2 - half
        self.register_buffer("window", pad(window, (around, around)).to(self.dtype))

    def _make_bank(self) -> None:
        """Design the modulation filters and the windows of the energies."""
        share = torch.arange(BANDS).double() / (BANDS - 1)
        centres_hz = self.min_cf * (self.max_cf / self.min_cf) ** share
        self.register_buffer("modulation_hz", centres_hz)
        g = torch.tan(math.pi * centres_hz / float(self.rate))
        k, zero = torch.full_like(g, 1.0 / QUALITY), torch.zeros_like(g)
        rows = design.state_variable_rows(g, k, zero, k, zero)
        self.register_buffer("filters", rows.repeat(self.n_channels, 1).to(self.dtype))
        periodic = self.framing == "srmrpy"
        window = torch.hamming_window(self.length, periodic, dtype=torch.float64).square()
        hops = pad(window, (0, WINDOW_HOPS * self.hop - self.length)).view(WINDOW_HOPS, self.hop)
        self.register_buffer("hop_windows", hops.T.contiguous().to(self.dtype))

    def filtered(self, signal: Tensor) -> Tensor:
        """Return the outputs (.., channel, time) of the gammatone filters."""
        rest = signal.new_zeros(self.n_channels, 2)
        ops = [ChainStep(STATE_VARIABLE, 0, rows, rest) for rows in self.sections]
        x = signal.reshape(-1, 1, signal.shape[-1])
        y, _ = run_ops(x, ops)
        return y.unflatten(0, signal.shape[:-1]) if signal.ndim > 1 else y[0]

    def envelope(self, signal: Tensor) -> Tensor:
        """Return the envelopes (channel, time) of one clip (time,), at `rate`."""
        samples = signal.shape[-1]
        if samples < (self.block if self.fast else 1):
            return signal.new_zeros(self.n_channels, 0)
        if self.fast:
            blocks = signal.unfold(-1, self.block, self.block_hop).split(BLOCK_SPECTRA)
            spectra = (torch.view_as_real(torch.fft.rfft(each * self.window)) for each in blocks)
            return torch.cat([modulus(*each.unbind(-1)) @ self.weights for each in spectra]).T
        y = pad(self.filtered(signal), (0, -samples % self.padded_to))
        quadrature, envelopes = Quadrature(y.shape[-1], y), []
        for pair in y.split(2):  # two channels share a transform
            turned = torch.view_as_real(quadrature(torch.complex(pair[0], pair[-1]))).unbind(-1)
            envelopes += [modulus(*both) for both in zip(pair, turned, strict=False)]
        return torch.stack(envelopes)

    def modulated(self, envelope: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs (channel * 8, time) of the modulation filters, and their state."""
        count = len(self.filters)
        state = envelope.new_zeros(1, count, 2) if state is None else state
        kinds, offsets = [BANK_STATE_VARIABLE] * BANDS, list(range(0, count + 1, BANDS))
        y, state = modulation_bank(envelope.unsqueeze(0), self.filters, state, kinds, offsets)
        return y[0], state

    def energies(self, envelope: Tensor) -> Tensor:
        """Return the energy (frame, channel * 8) of one clip's envelopes (channel, time)."""
        length = envelope.shape[-1]
        before = self.length - self.hop if self.framing == "buffer" else 0
        frames = self.windows.n_frames(length)
        if frames == 0:
            return envelope.new_zeros(0, len(self.filters))
        hops = frames + WINDOW_HOPS - 1
        sums = self._summed if can_run(envelope) else self._summed_in_blocks
        by_hop = sums(envelope, before, hops)
        return torch.stack([by_hop[:, p : p + frames, p] for p in range(WINDOW_HOPS)]).sum(0).T

    def _summed(self, envelope: Tensor, before: int, hops: int) -> Tensor:
        """Return (channel * 8, hop, WINDOW_HOPS), the energy of a hop at each place of a window."""
        groups = groups_of(self.n_channels)
        out = envelope.new_zeros(groups, hops, WINDOW_HOPS, BANDS, LANES)
        x = envelope.detach().contiguous()
        get_backend("cpu").run_items(
            sum_energies, groups, x, *x.shape, before, self.hop, hops, self.filters[:BANDS],
            self.hop_windows, out,
        )  # fmt: skip
        return out.permute(0, 4, 3, 1, 2).flatten(0, 1)[: self.n_channels].flatten(0, 1)

    def _summed_in_blocks(self, envelope: Tensor, before: int, hops: int) -> Tensor:
        """Return `_summed` with gradients and on any device."""
        length, size = envelope.shape[-1], BLOCK_HOPS * self.hop
        after = max(hops * self.hop - before - length, 0)
        x = pad(envelope, (before, after))[:, : hops * self.hop]
        state, parts = None, []
        for start in range(0, hops * self.hop, size):
            y, state = self.modulated(x[:, start : start + size], state)
            squares = inside(y, start - before, length).square()
            parts.append(squares.unflatten(1, (-1, self.hop)) @ self.hop_windows)
        return torch.cat(parts, 1)

    def normalised(self, energy: Tensor) -> Tensor:
        """Return energies (frame, channel * 8) limited to 30 dB below their peak."""
        peak = energy.unflatten(-1, (self.n_channels, BANDS)).mean(-2).max()
        return energy.clamp(peak / NORM_RATIO, peak)

    def last_band(self, spectrogram: Tensor) -> Tensor:
        """Return the number K* of bands, of a modulation spectrogram (channel, 8)."""
        power = spectrogram.detach().double().sum(-1)
        total = power.sum()
        order = power.flip(0) if self.fast and self.bandwidth == "srmrpy" else power
        above = order.cumsum(0) > SHARE * total
        place = above.int().argmax()
        width_hz = erb_hz(self.fc_hz.to(power))[place]
        ripple = torch.tan(math.pi * self.modulation_hz / self.fs) * self.fs
        lower_hz = (self.modulation_hz - ripple / (2.0 * math.pi * QUALITY)).to(power)
        count = LEAST_BANDS + (lower_hz[LEAST_BANDS:] < width_hz).sum()
        return torch.where(total > 0, count, LEAST_BANDS)

    def score(self, spectrogram: Tensor) -> Tensor:
        """Return the score of a modulation spectrogram (channel, 8); NaN for silence."""
        by_band = spectrogram.sum(0)
        counted = torch.arange(BANDS, device=by_band.device) < self.last_band(spectrogram)
        faster = torch.where(counted, by_band, 0.0)[SLOW_BANDS:].sum()
        return by_band[:SLOW_BANDS].sum() / faster

    def _of_clip(self, signal: Tensor) -> dict[str, Tensor]:
        """Return every output of one clip (time,)."""
        rows = self.grids["score"].n_frames(signal.shape[-1])
        # A power of two brings the peak near 1, so that no square is too small or too large.
        peak = signal.detach().abs().amax() if rows else signal.new_zeros(())
        exponent = torch.frexp(peak).exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        scale = torch.ldexp(torch.ones_like(peak), exponent)
        energy = self.energies(self.envelope(signal / scale))
        energy = self.normalised(energy) if self.norm and len(energy) else energy
        mean = energy.mean(0, keepdim=True)
        score = self.score(mean.view(self.n_channels, BANDS)).view(1, 1)
        energy, mean = energy * scale * scale, mean * scale * scale
        return {"score": score[:rows], "energy": energy, "modulation_spectrogram": mean[:rows]}

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Return outputs of whole signals, see the class."""
        names = self.wanted(names)
        x = finite_signal(signal, self.dtype)
        # One clip at a time: the rounding of sums in torch depends on the shape of a batch.
        rows = rows_of(x)
        clips = [self._of_clip(row) for row in rows] or [self._of_clip(x.new_zeros(x.shape[-1]))]
        return {
            name: torch.stack([clip[name] for clip in clips])[: len(rows)].reshape(
                *x.shape[:-1], *clips[0][name].shape
            )
            for name in names
        }
