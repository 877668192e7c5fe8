"""Change of sampling rate by a ratio of integers: zero-phase polyphase FIR.

As scipy.signal.resample_poly (Kaiser window, beta 5, 10 samples of the lower rate each side), but
with the first floor(T up / down) outputs. The filter looks ahead by its half length; chunks come
out that much later.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.filter_design import resample_taps
from amtcore.kernels.fused.operations import DECIMATE
from amtcore.kernels.fused.program import BlockOp
from amtcore.kernels.ops.fir import fir
from amtcore.kernels.vector.exporting import is_exporting
from amtcore.stages.base import BlockStage, check_fs
from amtcore.stages.states import check_kept

#: Numerator and denominator of a ratio of rates stay below this.
_LARGEST = 4096
#: Numbers of dimensions that the input may have.
_NDIMS = (1, 2, 3, 4)
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

    phases: Tensor
    looks_ahead = True
    _once_saved = ("phases",)

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
        ratio = Fraction(str(self.fs_out)) / Fraction(str(self.fs))
        self.up, self.down = ratio.numerator, ratio.denominator
        if max(self.up, self.down) >= _LARGEST:
            raise ParameterError(
                f"{self.fs_out:g} Hz from {self.fs:g} Hz is no ratio of small integers; "
                "use a rounder rate"
            )
        self.reach = 10 * max(self.up, self.down)

    @property
    def memory_s(self) -> float:
        """The length of its response, in s."""
        return 2 * self.reach / self.up / self.fs

    def tables(self) -> dict[str, Tensor]:
        """The low-pass."""
        return {"phases": self._phases().to(self.dtype)}

    def _phases(self) -> Tensor:
        """(up, window): the low-pass as each phase of the output sees it.

        Output m sums taps[reach + m down - i up] x[i] over i. With i counted from the first one,
        j = i - i_m, and s = i_m up - (m down - reach), the taps are taps[2 reach - s - j up].
        """
        taps, window = resample_taps(self.up, self.down), 2 * self.reach // self.up + 1
        steps = torch.arange(self.up).unsqueeze(1) + self.up * torch.arange(window)
        return torch.where(
            steps <= 2 * self.reach, taps[(2 * self.reach - steps).clamp(min=0)], 0.0
        )

    def _first(self, m: int) -> int:
        """Index of the first input that output m needs."""
        return -((self.reach - m * self.down) // self.up)

    def stream(
        self, x: Tensor, state: ResampleState | None = None, last: bool = False
    ) -> tuple[Tensor, ResampleState]:
        """Process the next chunk.

        Args:
            x: (.., time).
            state: What the previous chunk returned: the inputs still needed, and how many have
                come in and gone out; None at the start.
            last: Whether the signal ends here; what follows it is 0.
        Returns:
            The outputs that are ready, and the state to pass with the next chunk.
        """
        x = self.as_input(x, _NDIMS, "(.., time)")
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
        # Every phase gives as many outputs as the first, so that no number of parts depends on
        # the length of the signal; the last of them may lie beyond `ready`.
        count = -((done - ready) // self.up)
        parts = [
            fir(x, self.phases[(self.reach - m * self.down) % self.up].flip(0), self.down,
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
        x = self.as_input(x, _NDIMS, "(.., time)")
        return self._outputs(x, 0, 0, x.shape[-1] * self.up // self.down)

    def block_ops(self, channels: int) -> list[BlockOp]:
        """The stage as an operation of the fused kernel, which can only lower the rate."""
        if self.up != 1:
            raise ParameterError(
                f"the fused kernel resamples by whole factors, not by {self.up}/{self.down}"
            )
        coef = self.phases.expand(channels, -1)
        taps = self.phases.shape[1]
        rest = coef.new_zeros(channels, taps)  # samples until the first output, then the past
        rest[:, 0] = self.reach + 1
        return [BlockOp(DECIMATE, taps * 2**16 + self.down, coef, rest)]

    def extra_repr(self) -> str:
        """Rates and their ratio."""
        return f"fs={self.fs:g}, fs_out={self.fs_out:g}, up={self.up}, down={self.down}"
