"""Modulation filterbank of King, Varnet and Lorenzi (2019): constant Q from 2 to 150 Hz.

Second-order Butterworth band-passes as two sections each (the fourth-order polynomial form is up
to 4 % wrong at 2 Hz, in float64). Above 10 Hz the modulation phase is then dropped: the Hilbert
envelope of the band, scaled to the band's RMS, which needs the whole signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.fused.filters import BANK_TWO_SECTIONS
from amtcore.kernels.fused.program import Bank, BlockOp
from amtcore.kernels.ops.envelope import hilbert_envelope
from amtcore.kernels.ops.one_pole import modulation_bank
from amtcore.stages.base import BlockStage, check_below_nyquist
from amtcore.stages.limits import MOST_CYCLES, Range, frequencies

PHASE_INSENSITIVITY = ("hilbert", "none")
_PHASE_LIMIT_HZ = 10.0  # above it the phase is dropped
_STATES = 4  # of one filter
_FACTORS = Range(1e-3, 1e4)
_LEAST_BAND = 1e-3  # of the highest edge, for bands that learning moved to fs/2


def king_centres(mflow_hz: float, mfhigh_hz: float, q: float, nmod: int | None) -> list[float]:
    """Centre frequencies in Hz: evenly in log frequency, `nmod` of them or in the ratio that lets
    neighbouring filters of this Q meet at their band edges."""
    low, high = math.log(mflow_hz), math.log(mfhigh_hz)
    if nmod is not None:
        return torch.linspace(low, high, nmod, dtype=torch.float64).exp().tolist()
    root = math.sqrt(4 * q * q + 1)
    step = math.log((root + 1) / (root - 1))
    # The small term keeps the last filter where the range is a whole number of steps.
    return [math.exp(low + i * step) for i in range(math.floor((high - low) / step + 1e-9) + 1)]


class King2019ModulationFilterbank(BlockStage):
    """The same modulation filters on every channel.

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

    state_form = Tensor

    mfc: Tensor
    qfactor: Tensor

    @checked_arguments()
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
        if not qfactor > 0:
            raise ParameterError(f"qfactor must be above 0, got {qfactor}")
        if nmod is not None and not (isinstance(nmod, int) and nmod >= 1):
            raise ParameterError(f"nmod must be an integer of 1 or more, or None, got {nmod!r}")
        if phase_insens not in PHASE_INSENSITIVITY:
            raise ParameterError(
                f"phase_insens must be one of {', '.join(PHASE_INSENSITIVITY)}, "
                f"got {phase_insens!r}"
            )
        self.phase_insens = phase_insens
        centres = king_centres(mflow, mfhigh, qfactor, nmod)
        self.constant("mfc", centres, frequencies(self.fs))
        self.constant("qfactor", float(qfactor), _FACTORS)
        highest = float(self.edges()[1].detach().max())
        check_below_nyquist("the upper edge of the highest modulation filter", highest, self.fs)
        drops = phase_insens == "hilbert"
        self.insensitive = [drops and centre > _PHASE_LIMIT_HZ for centre in centres]

    @property
    def can_stream(self) -> bool:
        """Whether chunks can be processed one after another."""
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
        """That of the slowest filter, in s.

        A pole p of the low-pass becomes those s of the band-pass with s^2 - p B s + w^2 = 0, B the
        band and w its middle in rad/s; p = exp(+-3 pi i / 4).
        """
        low, high = (2.0 * math.pi * edge.detach() for edge in self.edges())
        half = torch.polar(high - low, torch.full_like(low, 0.75 * math.pi)) / 2.0
        apart = torch.sqrt(half**2 - low * high)
        return float(1.0 / -torch.maximum((half + apart).real, (half - apart).real).max())

    def coefficients(self) -> Tensor:
        """(modulation, 12): the two sections of each filter."""
        low, high = self.edges()
        most = MOST_CYCLES * self.fs
        edges = low.clamp(max=(1.0 - _LEAST_BAND) * most), high.clamp(max=most)
        return design.bandpass2_rows(*edges, self.fs).to(self.dtype)

    def block_ops(self, channels: int) -> list[BlockOp]:
        """Nothing comes before the filters."""
        return []

    def bank(self, channels: int) -> Bank:
        """The filters, for the fused kernel."""
        self._check_streamable()
        count = self.num_filters
        coef = self.coefficients().detach().repeat(channels, 1)
        offsets = tuple(range(0, count * channels + 1, count))
        return Bank((BANK_TWO_SECTIONS,) * count, coef, offsets)

    def bands(self, x: Tensor, samples: Sequence[int]) -> Iterator[list[Tensor]]:
        """One filter after another over whole signals.

        Args:
            x: (batch, channel, time), whatever behind the end of a signal.
            samples: Length of each signal.
        Returns:
            For each filter the band of every signal, (1, channel, its time).
        """
        for m, rows in enumerate(self.coefficients()):
            y, _ = self._filter(x, rows.unsqueeze(0), self._rest(x, 1))
            band = y.squeeze(2)
            # In memory of its own: then a transform sees the same, whatever was beside a signal.
            whole = (band[i : i + 1, :, :count].contiguous() for i, count in enumerate(samples))
            yield [self._finished(each, m) for each in whole]

    def _rest(self, x: Tensor, filters: int) -> Tensor:
        return x.new_zeros(x.shape[0], x.shape[1] * filters, _STATES)

    def _filter(self, x: Tensor, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Band signals (batch, channel, modulation, time) of the filters in `rows`."""
        channels, count = x.shape[1], len(rows)
        kinds, offsets = [BANK_TWO_SECTIONS] * count, [count * i for i in range(channels + 1)]
        coef = rows.repeat(channels, 1)
        y, state = modulation_bank(x, coef, state, kinds, offsets, self.backend)
        return y.unflatten(1, (channels, count)), state

    def _finished(self, band: Tensor, m: int) -> Tensor:
        return hilbert_envelope(band, self.backend) if self.insensitive[m] else band

    def _check_streamable(self) -> None:
        if not self.can_stream:
            raise ParameterError(
                "phase_insens='hilbert' needs the whole signal and cannot run chunk by chunk; "
                "process whole signals, or use phase_insens='none'"
            )

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next chunk.

        Args:
            x: (batch, channel, time) or (channel, time).
            state: What the previous chunk returned, (batch, channel * modulation, 4); None at the
                start.
        """
        self._check_streamable()
        return self._run(x, state)

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.as_input(x, (2, 3), "(batch, channel, time) or (channel, time)")
        batched = x if x.ndim == 3 else x.unsqueeze(0)
        if state is None:
            state = self._rest(batched, self.num_filters)
        y, state = self._filter(batched, self.coefficients(), state)
        return (y if x.ndim == 3 else y.squeeze(0)), state

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        y = self._run(x, None)[0]
        if self.can_stream:
            return y
        return torch.stack([self._finished(band, m) for m, band in enumerate(y.unbind(-2))], -2)

    def extra_repr(self) -> str:
        """Range, Q and what happens to the phase."""
        return (
            f"mfc={[round(f, 2) for f in self.mfc.tolist()]} Hz, qfactor={self.qfactor.item():g}, "
            f"phase_insens={self.phase_insens}, fs={self.fs:g}, learnable={self.learnable}"
        )


class FastKing2019ModulationFilterbank(King2019ModulationFilterbank):
    """`King2019ModulationFilterbank` under the name of its FFT approximation, which it is not: the
    recurrence is both exact and faster, so there is nothing to trade.

    Args:
        ir_length_ratio: Accepted and without effect; there is no truncated impulse response.
        Others as for `King2019ModulationFilterbank`.
    """

    @checked_arguments()
    def __init__(self, *args: Any, ir_length_ratio: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ir_length_ratio = ir_length_ratio

    def distribute_gradients(self) -> None:
        """Does nothing: no filters share coefficients, so every gradient is already in place."""
