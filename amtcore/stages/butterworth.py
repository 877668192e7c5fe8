"""Butterworth low- and high-pass of any order, the same for every channel.

Second-order sections in state-variable form and, for an odd order, one first-order section. A
3 Hz high-pass at 44.1 kHz keeps its digits in float32, which the polynomial form does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import RATE, Text, checked_arguments, whole
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.sections import FIRST_ORDER, STATE_VARIABLE
from amtcore.stages.constants import frequencies
from amtcore.stages.stage import ChannelStage, check_below_nyquist, lowpass_memory_s


class ButterworthFilter(ChannelStage):
    """One Butterworth filter on every channel.

    Args:
        fs: Sampling rate in Hz.
        fc: Cutoff (-3 dB) in Hz, above 0 and below fs/2.
        order: Order, 1 or more.
        btype: "low" or "high".
        learnable: Make `fc` a parameter.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time), same shape out.

    Invariants:
        A tone at fc comes out 3 dB lower, whatever the order.

    >>> high = ButterworthFilter(fs=16000, fc=3.0, btype="high")
    >>> abs(float(high(torch.ones(1, 16000))[0, -1])) < 1e-4
    True
    """

    fc: Tensor
    shown = "btype={0.btype}, order={0.order}, fc={0.fc:g} Hz, fs={0.fs:g}, learnable={0.learnable}"

    @checked_arguments(fc=RATE, order=whole(1, 64), btype=Text(("low", "high")))
    def __init__(
        self,
        fs: float,
        fc: float,
        order: int = 1,
        btype: str = "low",
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        check_below_nyquist("the cutoff", fc, self.fs)
        self.order, self.btype = order, btype
        self.constant("fc", float(fc), frequencies(self.fs))

    @property
    def memory_s(self) -> float:
        return lowpass_memory_s(float(self.fc.detach()), self.order)

    def sections(self) -> list[Tensor]:
        """Coefficients of each section, (6,) or (3,)."""
        rows = design.butterworth_rows(self.fc, self.fs, self.order, self.btype)
        return [section.to(self.dtype) for section in rows]

    def recurrences(self, channels: int) -> list[ChainStep]:
        ops = []
        for section in self.sections():
            code, values = (STATE_VARIABLE, 2) if len(section) == 6 else (FIRST_ORDER, 1)
            coef = section.expand(channels, -1)
            ops.append(ChainStep(code, 0, coef, coef.new_zeros(channels, values)))
        return ops
