"""What the stages that are one finite impulse response share: the taps, and looking ahead.

A filter whose delay is taken out gives sample n only once sample n + advance is in. Chunks then
come out later than they went in, and the last one brings the rest:

    pushed      [ 1 ][ 2 ][ 3 ][ 4, last ]
    returned    []   [ 1 ][ 2 ][ 3    4  ]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from amtcore.arguments import whole
from amtcore.errors import ParameterError
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operators import operator
from amtcore.stages.base import Stage
from amtcore.stages.states import check_kept

FirState = tuple[Tensor, int]
_SHAPES = "(time,), (batch, time) or (batch, channel, time)"

_fir = operator(FIR)


class FirStage(Stage):
    """A stage that filters every row of its input with one response.

    Subclasses give `design`.

    Args:
        fs: Sampling rate in Hz.
        order: Number of taps less one, 1 or more.
        learnable: Whether the gains are parameters; the taps then follow them at every call.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.
    """

    state_form = (Tensor, int)

    taps: Tensor
    looks_ahead = True
    _once_saved = ("taps",)
    #: Samples of delay that are taken out: how far the stage looks ahead.
    advance = 0

    def __init__(
        self, fs: float, order: int, learnable: bool, dtype: torch.dtype, backend: str | None
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        if not (isinstance(order, int) and order >= 1):
            raise ParameterError(f"order must be an integer of 1 or more, got {order!r}")
        self.order = order

    @property
    def memory_s(self) -> float:
        """The length of its response, in s."""
        return self.order / self.fs

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """The taps in the working type."""
        return {"taps": lambda: self.design().to(self.dtype)}

    def design(self) -> Tensor:
        """The taps in float64, (order + 1,)."""
        raise NotImplementedError

    @property
    def fir_coeffs(self) -> Tensor:
        """The taps, (order + 1,)."""
        return self.derived("taps")

    @property
    def group_delay(self) -> int:
        """Delay in samples of the linear-phase response, order / 2."""
        return self.order // 2

    def applied_taps(self) -> Tensor:
        """The taps with whatever gain the stage adds."""
        return self.fir_coeffs

    def stream(
        self, x: Tensor, state: FirState | None = None, last: bool = False
    ) -> tuple[Tensor, FirState]:
        """Process the next chunk.

        Args:
            x: (time,), (batch, time) or (batch, channel, time).
            state: What the previous chunk returned: the last `order` samples and how many outputs
                are still ahead of the first sample; None at the start.
            last: Whether the signal ends here; what follows it is 0.
        Returns:
            The samples that are ready, as many as went in less `advance` in all, or exactly as
            many with `last`; and the state to pass with the next chunk.
        """
        x = self.as_input(x, (1, 2, 3), _SHAPES)
        history, ahead = state or (x.new_zeros(*x.shape[:-1], self.order), self.advance)
        check_kept(history.shape[:-1], x.shape[:-1])
        window = torch.cat((history, x), -1)
        # Outputs still ahead of the first sample are left out; the silence after the last one is
        # what the kernel reads past the end.
        first = min(ahead, x.shape[-1])
        count = x.shape[-1] - first
        if last:
            first, count = ahead, max(x.shape[-1] + self.advance - ahead, 0)
        y = _fir(window, self.applied_taps(), 1, first, count, self.backend)
        return y, (window[..., window.shape[-1] - self.order :], max(ahead - x.shape[-1], 0))

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once: (.., time), same shape out."""
        x = self.as_input(x, (1, 2, 3), _SHAPES)
        first = self.advance - self.order
        return _fir(x, self.applied_taps(), 1, first, x.shape[-1], self.backend)

    def get_frequency_response(self, nfft: int = 8192) -> tuple[Tensor, Tensor]:
        """Complex response of the stage, delay taken out where the stage takes it out.

        Args:
            nfft: Points of the transform, 1 or more; fewer than taps are fewer frequencies of the
                same response.
        Returns:
            Frequencies in Hz and response, each (nfft // 2 + 1,).
        """
        nfft = whole(1)("nfft", nfft)
        taps = self.applied_taps()
        # The response at k fs / nfft is that of the taps wrapped round to nfft of them.
        wrapped = torch.nn.functional.pad(taps, (0, -len(taps) % nfft)).view(-1, nfft).sum(0)
        response = torch.fft.rfft(wrapped)
        cycles = torch.arange(len(response), dtype=torch.float64, device=response.device) / nfft
        turn = torch.polar(torch.ones_like(cycles), 2 * math.pi * self.advance * cycles)
        return (cycles * self.fs).to(self.dtype), response * turn.to(response.dtype)
