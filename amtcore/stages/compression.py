"""Instantaneous nonlinearities of each channel: broken stick, power law, squaring expansion.

Compression after King, Varnet and Lorenzi (2019, section II.A), with the knee given as a level. It
keeps the sign of the waveform, which the rectification after it needs. The expansion lies
between hair cell and adaptation (Jepsen, Ewert and Dau 2008).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.compression import BROKEN_STICK, SQUARE
from amtcore.stages.constants import DECIBELS, Range
from amtcore.stages.stage import ChannelStage

_EXPONENTS = Range(1e-6, 10.0)


class BrokenStickCompression(ChannelStage):
    """Linear up to the knee, above it a power law: sign(y) knee (|y| / knee)^n.

    Args:
        knee_db: Knee in dB SPL.
        n: Exponent above the knee, above 0; one value or one per channel.
        dboffset: Level in dB SPL of an amplitude of 1.
        learnable: Make `n` and `knee_db` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time), same shape out.

    Invariants:
        Continuous and odd; 10 dB more at the input are 10 n dB more at the output above the knee.

    >>> BrokenStickCompression(n=0.5)(torch.tensor([[2e-4, -1.0]], dtype=torch.float64))
    tensor([[ 0.0002, -0.0178]])
    """

    n: Tensor
    knee_db: Tensor

    @checked_arguments()
    def __init__(
        self,
        knee_db: float = 30.0,
        n: Tensor | Sequence[float] | float = 0.3,
        dboffset: float = 100.0,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        # Nothing depends on the sampling rate; 1 Hz stands for "one sample at a time".
        super().__init__(1.0, learnable, dtype, backend)
        self.dboffset = float(dboffset)
        self.constant("n", n, _EXPONENTS)
        self.constant("knee_db", float(knee_db), DECIBELS)

    def coefficients(self, channels: int) -> Tensor:
        """(channel, 4): gain below the knee, gain and exponent above it, knee."""
        knee, n = self._knee(), self.n.double()
        rows = torch.broadcast_tensors(torch.ones_like(knee), knee ** (1.0 - n), n, knee)
        if rows[0].numel() not in (1, channels):
            raise ParameterError(f"there are {rows[0].numel()} exponents for {channels} channels")
        return torch.stack([row.expand(channels) for row in rows], -1).to(self.dtype)

    def _knee(self) -> Tensor:
        return 10.0 ** ((self.knee_db.double() - self.dboffset) / 20.0)

    @property
    def memory_s(self) -> float:
        return 0.0

    def recurrences(self, channels: int) -> list[ChainStep]:
        coef = self.coefficients(channels)
        return [ChainStep(BROKEN_STICK, 0, coef, coef.new_zeros(channels, 0))]

    def extra_repr(self) -> str:
        return (
            f"knee_db={self.knee_db.item():g}, n={self.n.tolist()}, dboffset={self.dboffset:g}, "
            f"learnable={self.learnable}"
        )


class PowerCompression(BrokenStickCompression):
    """The power law of the broken stick at every amplitude: sign(y) knee (|y| / knee)^n.

    Arguments as for `BrokenStickCompression`; the knee is the level that does not change. The
    slope at 0 is infinite for n < 1; its gradient there is taken as 0.

    >>> PowerCompression(n=0.5)(torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    tensor([[0.0000, 0.0178]])
    """

    def coefficients(self, channels: int) -> Tensor:
        """(channel, 4): as for the broken stick with its corner at 0, and gain 0 at 0."""
        rows = super().coefficients(channels)
        return torch.cat(
            (torch.zeros_like(rows[:, :1]), rows[:, 1:3], torch.zeros_like(rows[:, 3:])), 1
        )


class SquaringExpansion(ChannelStage):
    """y = (10^(gain_db / 20) x)^2.

    Args:
        gain_db: Gain before the square in dB.
        learnable: Make `gain_db` a parameter.
        dtype: torch.float32 or torch.float64.
        backend: Accepted as by all stages; there is only one way to square.

    Shape:
        (batch, channel, time) or (channel, time), same shape out.

    >>> SquaringExpansion(gain_db=20.0)(torch.tensor([[0.1, -0.2]]))
    tensor([[1., 4.]])
    """

    gain_db: Tensor
    shown = "gain_db={0.gain_db:g}, learnable={0.learnable}"

    @checked_arguments()
    def __init__(
        self,
        gain_db: float = 50.0,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(1.0, learnable, dtype, backend)
        self.constant("gain_db", float(gain_db), DECIBELS)

    def _gain(self) -> Tensor:
        return (10.0 ** (self.gain_db.double() / 20.0)).to(self.dtype)

    @property
    def memory_s(self) -> float:
        return 0.0

    def recurrences(self, channels: int) -> list[ChainStep]:
        coef = self._gain().expand(channels, 1)
        return [ChainStep(SQUARE, 0, coef, coef.new_zeros(channels, 0))]
