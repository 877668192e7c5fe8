"""Inner hair cells as half-wave rectification and a low-pass filter.

Presets after Dau et al. (1996), Breebaart et al. (2001), King et al. (2019), Lindemann (1986),
Bernstein et al. (1999) and Relano-Iborra et al. (2019). `hilbert` and `bernstein1999` need the
whole signal (an analytic signal by FFT) and so cannot stream. The king2019 cutoff is 1000 Hz, as
in its reference program, not the 1500 Hz that is sometimes quoted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.fused.operations import FIRST_ORDER, STATE_VARIABLE
from amtcore.kernels.fused.program import BlockOp
from amtcore.kernels.ops.dispatch import by_item
from amtcore.stages.base import ChannelStage, check_below_nyquist, lowpass_memory_s
from amtcore.stages.limits import Range, StableDenominator

_NEURAL_COMPRESSION = 0.23  # Bernstein et al. (1999): envelope to this power
_LARGEST_NUMERATOR = 10.0


@dataclass(frozen=True)
class _Preset:
    """Low-pass cutoff in Hz, order, number of passes, and what happens before the filter."""

    cutoff_hz: float | None
    order: int = 1
    iterations: int = 1
    nonlinearity: str = "half_wave"


PRESETS = {
    "dau1996": _Preset(1000.0),
    "breebaart2001": _Preset(2000.0, iterations=5),
    "king2019": _Preset(1000.0),
    "lindemann": _Preset(800.0),
    "hilbert": _Preset(None, nonlinearity="hilbert"),
    "bernstein1999": _Preset(425.0, order=2, nonlinearity="bernstein"),
    "relanoiborra2019": _Preset(1000.0, order=2),
}


def analytic_magnitude(x: Tensor) -> Tensor:
    """|analytic signal| over the whole last axis, by FFT."""
    n = x.shape[-1]
    if x.numel() == 0:
        return x.abs()
    # Twice the frequencies between 0 and fs/2, whose ends count once. No slice and no branch
    # depends on n, so that its axis may be dynamic in torch.export.
    twice = 2 * torch.arange(n, device=x.device)
    weights = 1.0 + torch.sign(n - twice).to(x.dtype) - (twice == 0).to(x.dtype)
    return torch.fft.ifft(torch.fft.fft(x) * weights).abs()


def _envelope_to_a_power(x: Tensor) -> Tensor:
    """What goes into the low-pass of bernstein1999."""
    weight = analytic_magnitude(x).clamp(min=torch.finfo(x.dtype).tiny)
    return (weight ** (_NEURAL_COMPRESSION - 1.0) * x).clamp(min=0).square()


class IHCEnvelope(ChannelStage):
    """Envelope of each channel: rectify, then low-pass.

    Args:
        fs: Sampling rate in Hz.
        cutoff: Low-pass cutoff in Hz; None takes the method's own.
        order: Order of the low-pass, 1 or 2; methods with a fixed order of 2 ignore it.
        method: A key of `PRESETS`.
        learnable: Make the filter coefficients `b` and `a` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time), same shape out.

    >>> ihc = IHCEnvelope(fs=44100, method="dau1996", learnable=True)
    >>> sum(p.numel() for p in ihc.parameters())
    4
    """

    state_form = Tensor

    b: Tensor
    a: Tensor

    @checked_arguments(order=whole(1, 2))
    def __init__(
        self,
        fs: float,
        cutoff: float | None = None,
        order: int = 1,
        method: str = "dau1996",
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        if method not in PRESETS:
            raise ParameterError(f"method must be one of {', '.join(PRESETS)}, got {method!r}")
        preset = PRESETS[method]
        self.method = method
        self.order = max(order, preset.order)
        self.iterations = preset.iterations
        self.cutoff = preset.cutoff_hz if cutoff is None else float(cutoff)
        self._nonlinearity = preset.nonlinearity
        if self.order not in (1, 2):
            raise ParameterError(f"order must be 1 or 2, got {order}")
        if self.cutoff is not None and self._nonlinearity != "hilbert":
            check_below_nyquist("the low-pass cutoff", self.cutoff, self.fs)
            butter = design.butter1 if self.order == 1 else design.butter2
            b, a = butter(self.cutoff, self.fs)
        else:
            b, a = [1.0, 0.0], [1.0, 0.0]
        most = _LARGEST_NUMERATOR
        self.constant("b", b, Range(-most, most, max(b)))
        self.constant("a", a, StableDenominator())

    @property
    def can_stream(self) -> bool:
        """Whether chunks can be processed one after another."""
        return self._nonlinearity == "half_wave"

    @property
    def memory_s(self) -> float | None:
        """That of the low-pass as it was designed, in s; None where the whole signal is needed."""
        if not self.can_stream or self.cutoff is None or self.learnable:
            return None
        return lowpass_memory_s(self.cutoff, self.order)

    def coefficients(self) -> Tensor:
        """(1, rows) of one pass of the low-pass."""
        rows = design.first_order_rows if self.order == 1 else design.section_rows
        return rows(self.b, self.a).to(self.dtype).unsqueeze(0)

    def recurrences(self, channels: int) -> list[BlockOp]:
        """The passes of the low-pass, the first one behind the rectifier where that is all."""
        coef = self.coefficients().expand(channels, -1)
        code, values = (FIRST_ORDER, 1) if self.order == 1 else (STATE_VARIABLE, 2)
        rest, half_wave = coef.new_zeros(channels, values), self._nonlinearity == "half_wave"
        return [
            BlockOp(code, int(half_wave and i == 0), coef, rest) for i in range(self.iterations)
        ]

    def block_ops(self, channels: int) -> list[BlockOp]:
        """The stage as operations of the fused kernel."""
        if not self.can_stream:
            raise ParameterError(
                f"hair-cell method {self.method!r} needs the whole signal and cannot run block "
                "by block; use a half-wave method such as 'dau1996'"
            )
        return self.recurrences(channels)

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next chunk; see `ChannelStage.stream`."""
        if not self.can_stream:
            raise ParameterError(
                f"method {self.method!r} needs the whole signal and cannot stream; "
                "use forward(), or a half-wave method such as 'dau1996'"
            )
        return super().stream(x, state)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once: (batch, channel, time) or (channel, time), same shape out."""
        return super().stream(x)[0]

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._nonlinearity == "hilbert":
            return by_item(analytic_magnitude, x), self.rest_state(*x.shape[:2])
        if self._nonlinearity == "bernstein":
            x = by_item(_envelope_to_a_power, x)
        return super()._run(x, state)

    def extra_repr(self) -> str:
        """Method and filter."""
        return (
            f"method={self.method}, cutoff={self.cutoff}, order={self.order}, "
            f"iterations={self.iterations}, fs={self.fs:g}, learnable={self.learnable}"
        )
