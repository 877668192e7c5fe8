"""Finite impulse responses that may look ahead: filters of one response, and resampling.

A filter without its delay returns sample n when sample n + advance is known. Outputs of a chunk
come with later chunks:

    pushed      [ 1 ][ 2 ][ 3 ][ 4, last ]
    returned    []   [ 1 ][ 2 ][ 3    4  ].

The `Resampler` is a zero-phase polyphase FIR as scipy.signal.resample_poly (Kaiser window, beta 5,
10 samples of the lower rate on each side). It returns the first floor(T up / down) outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.filter_design import resample_ratio, resample_taps
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.fir import DECIMATE, FIR
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import is_exporting
from amtcore.stages.stage import BlockStage, Stage, check_fs, check_kept

FirState = tuple[Tensor, int]
_SHAPES = "(time,), (batch, time) or (batch, channel, time)"

_fir = operator(FIR)


class FirStage(Stage):
    """A stage that filters every row of its input with one response of `order` + 1 taps.

    Subclasses give `design`. The taps of a learnable stage follow its gains at every call.
    """

    state_form = (Tensor, int)

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
        return self.order / self.fs

    def derive(self) -> dict[str, Callable[[], Tensor]]:
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
            state: State after the previous chunk: the last `order` samples and how many outputs
                are still ahead of the first sample; None at the start.
            last: Whether the signal ends here; what follows it is 0.
        Returns:
            The samples that are ready, in all `advance` fewer than went in, or with `last` as many;
            and the state to pass with the next chunk.
        """
        x = self.as_input(x, (1, 2, 3), _SHAPES, state)
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
        x, first = self.as_input(x, (1, 2, 3), _SHAPES), self.advance - self.order
        return _fir(x, self.applied_taps(), 1, first, x.shape[-1], self.backend)

    def get_frequency_response(self, nfft: int = 8192) -> tuple[Tensor, Tensor]:
        """Return frequencies in Hz and complex response, each (nfft // 2 + 1,).

        The delay is taken out where the stage takes it out.

        Args:
            nfft: Points of the transform, 1 or more.
        """
        nfft = whole(1)("nfft", nfft)
        taps = self.applied_taps()
        # The response at k fs / nfft equals the response of the taps wrapped round to nfft taps.
        wrapped = torch.nn.functional.pad(taps, (0, -len(taps) % nfft)).view(-1, nfft).sum(0)
        response = torch.fft.rfft(wrapped)
        cycles = torch.arange(len(response), dtype=torch.float64, device=response.device) / nfft
        turn = torch.polar(torch.ones_like(cycles), 2 * math.pi * self.advance * cycles)
        return (cycles * self.fs).to(self.dtype), response * turn.to(response.dtype)


ResampleState = tuple[Tensor, int, int]


class Resampler(BlockStage):
    """Resample every row.

    Args:
        fs: Sampling rate of the input in Hz.
        fs_out: Sampling rate of the output in Hz.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (.., time) -> (.., floor(time * fs_out / fs)).

    Invariants:
        A constant stays what it is (away from the ends); tones below 0.8 times the lower Nyquist
        frequency keep amplitude and phase within 1 %.

    >>> Resampler(fs=16000, fs_out=4000)(torch.zeros(2, 1601)).shape
    torch.Size([2, 400])
    """

    state_form = (Tensor, int, int)

    looks_ahead = True
    _once_saved = ("phases",)
    shown = "fs fs_out up down"

    @checked_arguments()
    def __init__(
        self,
        fs: float,
        fs_out: float,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, False, dtype, backend)
        self.fs_out = check_fs(fs_out)
        self.up, self.down = resample_ratio(self.fs, self.fs_out)
        self.reach = 10 * max(self.up, self.down)

    @property
    def memory_s(self) -> float:
        return 2 * self.reach / self.up / self.fs

    def tables(self) -> dict[str, Tensor]:
        """Return the taps for each phase of the output, (up, window).

        Output m sums taps[reach + m down - i up] x[i] over i. Its first input is i_m. With
        j = i - i_m and s = i_m up - (m down - reach), the taps are taps[2 reach - s - j up].
        """
        taps, window = resample_taps(self.up, self.down), 2 * self.reach // self.up + 1
        steps = torch.arange(self.up).unsqueeze(1) + self.up * torch.arange(window)
        at = 2 * self.reach - steps
        return {"phases": torch.where(at >= 0, taps[at.clamp(min=0)], 0.0).to(self.dtype)}

    def _first(self, m: int) -> int:
        """Index of the first input that output m needs."""
        return -((self.reach - m * self.down) // self.up)

    def stream(
        self, x: Tensor, state: ResampleState | None = None, last: bool = False
    ) -> tuple[Tensor, ResampleState]:
        """Process the next chunk, (.., time), see `FirStage.stream`.

        The state is the inputs that are still needed, and how many came in and went out.
        """
        x = self.as_input(x, (1, 2, 3, 4), "(.., time)", state)
        waiting, samples, done = state or (x.new_zeros(*x.shape[:-1], -self._first(0)), 0, 0)
        check_kept(waiting.shape[:-1], x.shape[:-1])
        samples, window = samples + x.shape[-1], self.phases.shape[1]
        waiting = torch.cat((waiting, x), -1)
        if last:
            ready = samples * self.up // self.down
        else:
            ready = ((samples - window) * self.up + self.reach) // self.down + 1
        ready = max(ready, done)
        y = self._outputs(waiting, self._first(done), done, ready)
        used = self._first(ready) - self._first(done)
        return y, (waiting[..., used:], samples, ready)

    def _outputs(self, x: Tensor, start: int, done: int, ready: int) -> Tensor:
        """Outputs done..ready-1; `x` starts with input `start`, around it there is silence."""
        # All phases give the count of the first phase, so that the number of parts does not depend
        # on the length of the signal. Outputs beyond `ready` are dropped.
        count = -((done - ready) // self.up)
        parts = [
            _fir(x, self.phases[(self.reach - m * self.down) % self.up].flip(0), self.down,
                self._first(m) - start, count, self.backend)
            for m in range(done, done + self.up)
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        if is_exporting():
            # Picked by number, since a reshape and a slice would compare roundings of the length.
            m = torch.arange(ready - done, device=x.device)
            return torch.cat(parts, -1).index_select(-1, m % self.up * count + m // self.up)
        return torch.stack(parts, -1).flatten(-2)[..., : ready - done].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        x = self.as_input(x, (1, 2, 3, 4), "(.., time)")
        return self._outputs(x, 0, 0, x.shape[-1] * self.up // self.down)

    def block_ops(self, channels: int) -> list[ChainStep]:
        """The stage as an operation of the fused kernel, which can only lower the rate."""
        if self.up != 1:
            raise ParameterError(
                f"the fused kernel resamples by whole factors, not by {self.up}/{self.down}"
            )
        coef = self.phases.expand(channels, -1)
        taps = self.phases.shape[1]
        rest = coef.new_zeros(channels, taps)  # samples until the first output, then the past
        rest[:, 0] = self.reach + 1
        return [ChainStep(DECIMATE, taps * 2**16 + self.down, coef, rest)]
