"""Modulation filterbanks: the envelope of each channel split by modulation rate.

`ModulationFilterbank`: Dau, Kollmeier and Kohlrausch (1997, section II), Jepsen et al. (2008),
Paulick et al. (2024). Filters of type `efilt` are frequency-shifted first-order low-passes: the
real part up to 10 Hz, the modulus above. Filters of type `butterworth` are real band-passes with
these centres and bandwidths; their output is the band signal, neither rectified nor attenuated.

`King2019ModulationFilterbank`: King, Varnet and Lorenzi (2019), constant Q from 2 to 150 Hz. Each
filter has two second-order Butterworth sections; the fourth-order polynomial form is up to 4 %
wrong at 2 Hz in float64. Above 10 Hz the output is the Hilbert envelope of the band, scaled to the
RMS of the band, which needs the whole signal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import Text, checked_arguments
from amtcore.errors import ParameterError, StateError
from amtcore.kernels.chain import ChainStep, FilterBank
from amtcore.kernels.operations.envelope import HILBERT_ENVELOPE
from amtcore.kernels.operations.modulation_filters import (
    BANK_MODULUS,
    BANK_REAL,
    BANK_STATE_VARIABLE,
    BANK_TWO_SECTIONS,
)
from amtcore.kernels.operations.sections import FIRST_ORDER
from amtcore.kernels.operators import modulation_bank, operator, run_ops
from amtcore.kernels.torch_state import is_transformed
from amtcore.stages.constants import (
    LEAST_CYCLES,
    MOST_CYCLES,
    Range,
    bandwidths,
    frequencies,
    outside_inference,
)
from amtcore.stages.envelope_means import EnvelopeFilters
from amtcore.stages.stage import (
    BlockStage,
    check_below_nyquist,
    check_channels,
    check_kept,
    lowpass_memory_s,
)


def can_separate(x: Tensor) -> bool:
    """Return True on the CPU outside of torch.compile and torch.func; else outputs stay views."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and not (torch.compiler.is_compiling() or is_transformed(x)) and x.numel() > 0


class SeparateOutputs(torch.autograd.Function):
    """Split (row, time) into parts of `rows` rows; saving a part writes its own bytes only."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        ends = list(accumulate(rows[:-1]))
        return tuple(map(torch.from_numpy, np.split(y.detach().numpy(), ends)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat(gradients), None


@functools.lru_cache(maxsize=64)
def _by_channel(counts: tuple[int, ...], batch: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Return the order that puts a channel's filters of all items of a batch side by side.

    Args:
        counts: Filters of each channel.
        batch: Number of items.
    Returns:
        The number in (batch, filter) of each filter, the inverse of this order, the offsets that
        cut the filters by channel and item, and the number of filters of each channel.
    """
    with outside_inference():
        rows = torch.arange(batch * sum(counts), device="cpu").view(batch, -1)
        order = torch.cat([part.reshape(-1) for part in rows.split(counts, 1)])
        back = torch.argsort(order)
    sizes = [count for count in counts for _ in range(batch)]
    return order, back, [0, *accumulate(sizes)], [count * batch for count in counts]


_FIRST_BANDWIDTH_HZ = 5.0
_PHASE_LIMIT_HZ = 10.0  # up to here the modulation phase is kept
_LEAST_BAND = 1e-3  # of the highest edge, for bands that learning moved to fs/2

#: Arguments of all presets, and of each preset.
_COMMON: dict[str, float] = {"lp_cutoff": 2.5, "max_mfc": 150.0}
_LATER = {"att_factor": 1.0 / math.sqrt(2.0), "use_upper_limit": True, "lowpass_cutoff": 150.0}
PRESETS: dict[str, dict[str, float]] = {
    "dau1997": {"att_factor": 1.0, "use_upper_limit": False, "lowpass_cutoff": 0.0},
    "jepsen2008": _LATER,
    "paulick2024": _LATER,
}


def modulation_centres(upper_hz: float, q: float) -> list[float]:
    """Modulation centre frequencies in Hz up to a limit: 0; 5, 10; then constant Q.

    Neighbouring constant-Q filters meet at their band edges, which makes the ratio of centres
    (1 + 1/(2Q)) / (1 - 1/(2Q)), 5/3 for Q = 2.
    """
    half = 1.0 / (2.0 * q)
    centres = [0.0] + [f for f in (_FIRST_BANDWIDTH_HZ, _PHASE_LIMIT_HZ) if f <= upper_hz]
    next_hz = (centres[-1] + _FIRST_BANDWIDTH_HZ / 2) / (1.0 - half)
    if centres[-1] < _PHASE_LIMIT_HZ:
        return centres
    while next_hz <= upper_hz:
        centres.append(next_hz)
        next_hz *= (1.0 + half) / (1.0 - half)
    return centres


class ModulationFilterbank(BlockStage):
    """Modulation filters of every channel.

    Args:
        fs: Sampling rate in Hz.
        fc: Centre frequencies of the channels in Hz.
        Q: Quality factor of the filters above 10 Hz, above 0.5.
        max_mfc: Highest modulation centre frequency in Hz; None takes the preset's.
        lp_cutoff: Cutoff in Hz of the low-pass that is filter 0; None takes the preset's.
        att_factor: Gain of the modulus outputs; None takes the preset's.
        use_upper_limit: Whether a channel's range ends at fc/4; None takes the preset's.
        filter_type: "efilt" or "butterworth".
        preset: A key of `PRESETS`; None is dau1997.
        lowpass_cutoff: Cutoff in Hz of a first-order low-pass in front of all filters, 0 for none;
            None takes the preset's.
        learnable: Make `mfc_hz`, `bandwidth_hz` and `lp_cutoff` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) -> list over channels of (batch, M_i, time);
        (channel, time) -> list of (M_i, time). One channel's output saved alone is saved alone.

    >>> bank = ModulationFilterbank(16000, torch.tensor([80.0, 1000.0]), preset="jepsen2008")
    >>> [tuple(y.shape) for y in bank(torch.zeros(2, 2, 160))]
    [(2, 4, 160), (2, 8, 160)]
    """

    state_form = (Tensor, Tensor)
    shown = "preset num_channels max_mfc Q filter_type fs learnable"

    @checked_arguments(
        preset=Text(PRESETS, optional=True), filter_type=Text(("efilt", "butterworth"))
    )
    def __init__(
        self,
        fs: float,
        fc: Tensor | Sequence[float],
        Q: float = 2.0,
        max_mfc: float | None = None,
        lp_cutoff: float | None = None,
        att_factor: float | None = None,
        use_upper_limit: bool | None = None,
        filter_type: str = "efilt",
        preset: str | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        lowpass_cutoff: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.preset, self.filter_type, self.Q = preset or "dau1997", filter_type, float(Q)
        given = {"max_mfc": max_mfc, "lp_cutoff": lp_cutoff, "att_factor": att_factor,
                 "use_upper_limit": use_upper_limit, "lowpass_cutoff": lowpass_cutoff}  # fmt: skip
        values = {**_COMMON, **PRESETS[self.preset]}
        values |= {name: value for name, value in given.items() if value is not None}
        self.max_mfc, self.att_factor = float(values["max_mfc"]), float(values["att_factor"])
        self.use_upper_limit = bool(values["use_upper_limit"])
        self.lowpass_cutoff = float(values["lowpass_cutoff"])
        for name in ("lowpass_cutoff", "lp_cutoff"):
            check_below_nyquist(name, values[name], self.fs)
        if max_mfc is not None:
            check_below_nyquist("max_mfc", max_mfc, self.fs)
        fc_hz = [float(f) for f in fc]
        self.register_buffer("fc", torch.tensor(fc_hz, dtype=dtype))
        limits = [min(f / 4, self.max_mfc) if self.use_upper_limit else self.max_mfc for f in fc_hz]
        centres = [modulation_centres(limit, self.Q) for limit in limits]
        self._counts, self.num_channels = list(map(len, centres)), len(centres)
        self.offsets = [0, *accumulate(self._counts)]
        longest, butterworth = max(centres, key=len), filter_type == "butterworth"
        edge = 1.0 + 0.5 / self.Q if butterworth else 1.0
        check_below_nyquist("the highest modulation frequency", longest[-1] * edge, self.fs)
        flat = [mfc for of_channel in centres for mfc in of_channel]
        widths = [_FIRST_BANDWIDTH_HZ if f < _PHASE_LIMIT_HZ else f / self.Q for f in flat]
        self.constant("mfc_hz", flat, Range(0.0, MOST_CYCLES * self.fs))  # 0: the low-pass
        self.constant("bandwidth_hz", widths, bandwidths(self.fs))
        self.constant("lp_cutoff", values["lp_cutoff"], frequencies(self.fs))
        #: Kind of a channel's m-th filter.
        self.kinds = [
            BANK_STATE_VARIABLE if mfc == 0 or butterworth
            else BANK_REAL if mfc <= _PHASE_LIMIT_HZ else BANK_MODULUS
            for mfc in longest
        ]  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = super().__call__(*args, **kwargs)
        return list(y) if isinstance(y, tuple) else y  # see `accepts_chunks`

    @property
    def mfc(self) -> list[Tensor]:
        """Modulation centre frequencies in Hz, one tensor (M_i,) per channel."""
        return list(self.mfc_hz.split(self._counts))

    @property
    def memory_s(self) -> float:
        widths_hz = self.bandwidth_hz.detach()[~self.is_low.bool()].tolist()
        memories_s = [1.0 / (math.pi * min(widths_hz))] if widths_hz else []
        memories_s.append(lowpass_memory_s(float(self.lp_cutoff.detach()), 2))
        return max(memories_s + [lowpass_memory_s(f) for f in (self.lowpass_cutoff,) if f])

    def tables(self) -> dict[str, Tensor]:
        m = torch.cat([torch.arange(count) for count in self._counts])
        modulus = torch.tensor([kind == BANK_MODULUS for kind in self.kinds])[m]
        return {"is_low": m == 0, "output_gain": torch.where(modulus, self.att_factor, 1.0)}

    def coefficients(self) -> Tensor:
        """(filter, 6) rows of all filters, channel after channel."""
        mfc, width = self.mfc_hz.double(), self.bandwidth_hz.double()
        low = design.lowpass2_rows(self.lp_cutoff, self.fs).expand(len(mfc), 6)
        if self.filter_type == "butterworth":
            # The low-pass rows have no band edges and get harmless ones. Edges of bands stay
            # between 0 and fs/2 wherever learning moves them.
            centre = torch.where(mfc > 0, mfc, 2 * width)
            least, most = LEAST_CYCLES * self.fs, MOST_CYCLES * self.fs
            low_hz = (centre - width / 2).clamp(least, (1.0 - _LEAST_BAND) * most)
            high_hz = (centre + width / 2).clamp(2 * least, most)
            rows = design.bandpass1_rows(low_hz, high_hz, self.fs)
        else:
            # Pole r exp(i w) with r = exp(-pi width / fs), input gain 2 (1 - r), output gain.
            angle, r = 2 * math.pi * mfc / self.fs, torch.exp(-math.pi * width / self.fs)
            scale, zero = self.output_gain.to(mfc), torch.zeros_like(mfc)
            pole = (r * torch.cos(angle), r * torch.sin(angle))
            rows = torch.stack((*pole, 2 * (1 - r), scale, zero, zero), -1)
        return torch.where(self.is_low.unsqueeze(1), low, rows).to(self.dtype)

    def block_ops(self, channels: int) -> list[ChainStep]:
        """Return the low-pass in front of the bank, as operations of the fused kernel."""
        check_channels(self.num_channels, channels)
        if not self.lowpass_cutoff:
            return []
        (b0, b1), (_, a1) = design.butter1(self.lowpass_cutoff, self.fs)
        rows = torch.stack([self.fc.new_full((), value) for value in (b0, b1, a1)])
        coef = rows.expand(channels, -1)
        return [ChainStep(FIRST_ORDER, 0, coef, coef.new_zeros(channels, 1))]

    def bank(self, channels: int) -> FilterBank:
        check_channels(self.num_channels, channels)
        return FilterBank(tuple(self.kinds), self.coefficients().detach(), tuple(self.offsets))

    def stream(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Process the next chunk, see `BlockStage.stream`.

        The state is of the prefilter, (batch, channel, 1), and of the filters, (batch, filter, 2).
        """
        x = self.as_input(x, self.axes, self.axis_names, state)
        batched = x if x.ndim == 3 else x.unsqueeze(0)
        batch, channels = batched.shape[:2]
        check_channels(self.num_channels, channels)
        count = self.offsets[-1]
        before, filters = state or (x.new_zeros(batch, channels, 1), x.new_zeros(batch, count, 2))
        check_kept(before.shape[:2], batched.shape[:2])
        if filters.shape[1] != count:
            raise StateError(
                f"expected a state of {count} filters, got {filters.shape[1]}: it is that of "
                "another filterbank"
            )
        if self.lowpass_cutoff:
            ops = self.block_ops(self.num_channels)
            batched, before = run_ops(batched, ops, before, self.backend)
        parts, filters = self._filter(batched, filters)
        if x.ndim == 2:
            parts = [part.squeeze(0) for part in parts]
        return parts, (before, filters)

    def _filter(self, x: Tensor, state: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the outputs of every channel, each with its own storage if `can_separate`."""
        coef, batch = self.coefficients(), x.shape[0]
        if not can_separate(x):
            y, state = modulation_bank(x, coef, state, self.kinds, self.offsets, self.backend)
            return list(y.split(self._counts, -2)), state
        # The batch goes into the channels, (batch, channel, time) -> (1, channel * batch, time), so
        # that the filters of a channel lie together for all items.
        order, back, offsets, rows = _by_channel(tuple(self._counts), batch)
        x, state = x.transpose(0, 1).flatten(0, 1)[None], state.flatten(0, 1)[order][None]
        coef = coef if batch == 1 else coef[order % len(coef)]
        y, state = modulation_bank(x, coef, state, self.kinds, offsets, self.backend)
        parts = SeparateOutputs.apply(y[0], rows)
        after = state[0][back].unflatten(0, (batch, -1))
        return [part.unflatten(0, (batch, -1)) for part in parts], after

    def forward(self, x: Tensor) -> list[Tensor]:
        """The whole signal at once: list over channels of (batch, M_i, time)."""
        return self.stream(x)[0]


class FastModulationFilterbank(ModulationFilterbank):
    """`ModulationFilterbank` under the name of a grouped approximation; nothing is approximated.

    Args:
        tolerance: Accepted and without effect; no coefficients are rounded.
        Others as for `ModulationFilterbank`.
    """

    @checked_arguments()
    def __init__(self, *args: Any, tolerance: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tolerance = tolerance

    def distribute_gradients(self) -> None:
        """Does nothing: no filters share coefficients, so every gradient is already in place."""


_hilbert_envelope = operator(HILBERT_ENVELOPE)


def king_centres(mflow_hz: float, mfhigh_hz: float, q: float, nmod: int | None) -> list[float]:
    """Return `nmod` centres in Hz, evenly spaced in log frequency; None sets them edge to edge."""
    low, high = math.log(mflow_hz), math.log(mfhigh_hz)
    if nmod is not None:
        return torch.linspace(low, high, nmod, dtype=torch.float64).exp().tolist()
    root = math.sqrt(4 * q * q + 1)
    step = math.log((root + 1) / (root - 1))
    # The small term keeps the last filter where the range is a whole number of steps.
    return [math.exp(low + i * step) for i in range(math.floor((high - low) / step + 1e-9) + 1)]


class King2019ModulationFilterbank(BlockStage):
    """Modulation filters of constant Q, equal on every channel.

    Args:
        fs: Sampling rate in Hz.
        mflow: Lowest centre frequency in Hz, above 0.
        mfhigh: Highest centre frequency in Hz; the upper edge of its filter lies below fs/2.
        qfactor: Quality factor, above 0.
        nmod: Number of filters; None sets them edge to edge.
        learnable: Make `mfc` and `qfactor` parameters.
        dtype: torch.float32 or torch.float64.
        phase_insens: "hilbert" drops the phase above 10 Hz; "none" keeps the bands.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) -> (batch, channel, modulation, time);
        (channel, time) -> (channel, modulation, time).

    Invariants:
        With "none", a tone at a centre frequency passes with gain 1.

    >>> bank = King2019ModulationFilterbank(fs=16000)
    >>> [round(float(f), 2) for f in bank.mfc]
    [2.0, 5.24, 13.71, 35.89, 93.96]
    """

    shown = "mfc qfactor phase_insens fs learnable"

    @checked_arguments(phase_insens=Text(("hilbert", "none")))
    def __init__(
        self,
        fs: float,
        mflow: float = 2.0,
        mfhigh: float = 150.0,
        qfactor: float = 1.0,
        nmod: int | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        phase_insens: str = "hilbert",
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        if not 0 < mflow <= mfhigh:
            raise ParameterError(f"expected 0 < mflow <= mfhigh, got {mflow:g} and {mfhigh:g} Hz")
        check_below_nyquist("mfhigh", mfhigh, self.fs)
        self.phase_insens = phase_insens
        centres = king_centres(mflow, mfhigh, qfactor, nmod)
        self.constant("mfc", centres, frequencies(self.fs))
        self.constant("qfactor", float(qfactor), Range(1e-3, 1e4))
        highest = float(self.edges()[1].detach().max())
        check_below_nyquist("the upper edge of the highest modulation filter", highest, self.fs)
        drops = phase_insens == "hilbert"
        self.insensitive = [drops and centre > _PHASE_LIMIT_HZ for centre in centres]

    @property
    def can_stream(self) -> bool:
        return not any(self.insensitive)

    @property
    def num_filters(self) -> int:
        """Filters of a channel."""
        return len(self.insensitive)

    def edges(self) -> tuple[Tensor, Tensor]:
        """Lower and upper band edges in Hz, (modulation,) each."""
        mfc, q = self.mfc.double(), self.qfactor.double()
        middle, half = mfc * torch.sqrt(4.0 + 1.0 / q**2) / 2.0, mfc / (2.0 * q)
        return middle - half, middle + half

    @property
    def memory_s(self) -> float:
        """Time constant of the slowest filter, in s.

        A pole p = exp(+-3 pi i / 4) of the low-pass becomes the roots s of s^2 - p B s + w^2 = 0,
        with the band B and its middle w in rad/s.
        """
        low, high = (2.0 * math.pi * edge.detach() for edge in self.edges())
        half = torch.polar(high - low, torch.full_like(low, 0.75 * math.pi)) / 2.0
        apart = torch.sqrt(half**2 - low * high)
        slowest = torch.maximum((half + apart).real, (half - apart).real).max()
        return 1.0 / -float(slowest)

    def coefficients(self) -> Tensor:
        """(modulation, 12): the two sections of each filter."""
        low, high = self.edges()
        most = MOST_CYCLES * self.fs
        edges = low.clamp(max=(1.0 - _LEAST_BAND) * most), high.clamp(max=most)
        return design.bandpass2_rows(*edges, self.fs).to(self.dtype)

    def block_ops(self, channels: int) -> list[ChainStep]:
        """Nothing comes before the filters."""
        return []

    def bank(self, channels: int) -> FilterBank:
        self._check_streamable()
        return self._bank([True] * self.num_filters, channels)

    def envelope_filters(self, channels: int) -> EnvelopeFilters:
        """Return the filters without and with an envelope."""
        plain = [not is_envelope for is_envelope in self.insensitive]
        upper_hz = self.edges()[1].detach()[self.insensitive].tolist()
        banks = self._bank(plain, channels), self._bank(self.insensitive, channels)
        return EnvelopeFilters(self.insensitive, *banks, upper_hz)

    def _bank(self, chosen: list[bool], channels: int) -> FilterBank:
        count = sum(chosen)
        coef = self.coefficients().detach()[chosen].repeat(channels, 1)
        offsets = tuple(count * i for i in range(channels + 1))
        return FilterBank((BANK_TWO_SECTIONS,) * count, coef, offsets)

    def bands(self, x: Tensor, samples: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield each filter's bands, (1, channel, its samples), of signals padded to one length."""
        for m, rows in enumerate(self.coefficients()):
            y, _ = self._filter(x, rows.unsqueeze(0), None)
            band = y.squeeze(2)
            # A copy: the rounding of a transform then does not depend on other signals.
            whole = (band[i : i + 1, :, :count].contiguous() for i, count in enumerate(samples))
            yield [self._finished(each, m) for each in whole]

    def _filter(self, x: Tensor, rows: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Band signals (batch, channel, modulation, time) of the filters in `rows`."""
        (batch, channels), count = x.shape[:2], len(rows)
        kinds, offsets = [BANK_TWO_SECTIONS] * count, [count * i for i in range(channels + 1)]
        coef = rows.repeat(channels, 1)
        state = x.new_zeros(batch, channels * count, 4) if state is None else state
        y, state = modulation_bank(x, coef, state, kinds, offsets, self.backend)
        return y.unflatten(1, (channels, count)), state

    def _finished(self, band: Tensor, m: int) -> Tensor:
        return _hilbert_envelope(band, self.backend) if self.insensitive[m] else band

    def _check_streamable(self) -> None:
        if not self.can_stream:
            raise ParameterError(
                "phase_insens='hilbert' needs the whole signal and cannot run chunk by chunk; "
                "process whole signals, or use phase_insens='none'"
            )

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_streamable()
        return super().stream(x, state)

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._filter(x, self.coefficients(), state)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        y = super().stream(x)[0]
        if self.can_stream:
            return y
        return torch.stack([self._finished(band, m) for m, band in enumerate(y.unbind(-2))], -2)


class FastKing2019ModulationFilterbank(King2019ModulationFilterbank):
    """`King2019ModulationFilterbank` under the name of an FFT approximation; it is exact.

    Args:
        ir_length_ratio: Accepted and without effect; there is no truncated impulse response.
        Others as for `King2019ModulationFilterbank`.
    """

    @checked_arguments()
    def __init__(self, *args: Any, ir_length_ratio: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ir_length_ratio = ir_length_ratio

    distribute_gradients: Any = FastModulationFilterbank.distribute_gradients
