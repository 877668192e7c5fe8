"""Gammatone filterbank: the basilar membrane as linear filters.

All-pole complex gammatone of order n (Hohmann 2002, eq. 13; Lyon 1997): n equal complex one-pole
sections in cascade, twice the real part. The cascade is more exact than the expanded polynomial.
For a filterbank whose gain depends on level use the dual-resonance (DRNL) one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.fused.operations import ONE_POLE_CASCADE
from amtcore.kernels.fused.program import BlockOp
from amtcore.scales import ERB_FLOOR_HZ, ERB_Q
from amtcore.stages.base import FilterbankStage, check_below_nyquist, check_channels
from amtcore.stages.limits import bandwidths, frequencies


def default_betamul(n: int) -> float:
    """Bandwidth of the n-th order filter over its ERB (Patterson et al. 1987); 1.0186 for n = 4."""
    return math.factorial(n - 1) ** 2 / (math.pi * math.factorial(2 * n - 2) * 2.0 ** -(2 * n - 2))


class GammatoneFilterbank(FilterbankStage):
    """Complex all-pole gammatone filters, real output.

    Args:
        fc: Centre frequencies in Hz, above 0 and below fs/2.
        fs: Sampling rate in Hz.
        n: Filter order, 1 or more.
        betamul: Bandwidth relative to the ERB of each centre frequency; None takes the value that
            makes the filter's own ERB that of the ear.
        erb_scale: Further factor on every bandwidth.
        learnable: Make `fc` and `bandwidth` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, time) -> (batch, channel, time); (time,) -> (channel, time).

    Invariants:
        A tone at fc passes with gain 1 (in the steady state, within 1 % for fc above 2 bandwidths).

    >>> bank = GammatoneFilterbank([500.0, 1000.0], fs=16000)
    >>> bank(torch.zeros(3, 1600)).shape
    torch.Size([3, 2, 1600])
    """

    fc: Tensor
    bandwidth: Tensor

    @checked_arguments(n=whole(1, 32))
    def __init__(
        self,
        fc: Tensor | Sequence[float],
        fs: float,
        n: int = 4,
        betamul: float | None = None,
        erb_scale: float = 1.0,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        if not (isinstance(n, int) and n >= 1):
            raise ParameterError(f"the filter order n must be an integer of 1 or more, got {n!r}")
        fc_hz = torch.as_tensor(fc, dtype=torch.float64)
        if fc_hz.ndim != 1 or fc_hz.numel() == 0 or not bool((fc_hz > 0).all()):
            raise ParameterError("fc must be a non-empty list of frequencies above 0 Hz")
        check_below_nyquist("the highest centre frequency", float(fc_hz.max()), self.fs)
        self.n = n
        self.betamul = default_betamul(n) if betamul is None else float(betamul)
        if not (self.betamul > 0 and erb_scale > 0):
            raise ParameterError("betamul and erb_scale must be above 0")
        self.erb_scale = float(erb_scale)
        erb = ERB_FLOOR_HZ + fc_hz / ERB_Q
        self.constant("fc", fc_hz, frequencies(self.fs))
        width_hz = self.betamul * self.erb_scale * erb
        self.constant("bandwidth", width_hz, bandwidths(self.fs))

    @property
    def num_channels(self) -> int:
        """Number of filters."""
        return int(self.fc.shape[0])

    @property
    def memory_s(self) -> float:
        """That of the narrowest filter, in s."""
        return 1.0 / (2.0 * math.pi * float(self.bandwidth.detach().min()))

    def coefficients(self) -> Tensor:
        """(channel, 3): pole p = exp(-2 pi (b + i fc) / fs), real and imaginary, and the gain.

        The gain 2 (1 - |p|)^n makes twice the real part 1 at the centre frequency.
        """
        step = 2.0 * math.pi / self.fs
        decay, angle = torch.exp(-step * self.bandwidth.double()), step * self.fc.double()
        rows = (decay * torch.cos(angle), -decay * torch.sin(angle), 2.0 * (1.0 - decay) ** self.n)
        return torch.stack(rows, -1).to(self.dtype)

    def block_ops(self, channels: int) -> list[BlockOp]:
        """The stage as operations of the fused kernel."""
        check_channels(self.num_channels, channels)
        coef = self.coefficients()
        return [BlockOp(ONE_POLE_CASCADE, self.n, coef, coef.new_zeros(channels, 2 * self.n))]

    def extra_repr(self) -> str:
        """Number, range and order of the filters."""
        return (
            f"num_channels={self.num_channels}, fc={self.fc[0]:.1f}..{self.fc[-1]:.1f} Hz, "
            f"n={self.n}, fs={self.fs:g}, learnable={self.learnable}"
        )
