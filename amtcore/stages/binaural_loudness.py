"""Binaural inhibition: sound in one ear reduces the loudness at the other ear.

    L, R = specific loudness smoothed over channels with exp(-(sigma g)^2), plus 1e-13;
    left ear divided by 2 / (1 + sech(R / L)^p), right ear by 2 / (1 + sech(L / R)^p)

(Moore, Glasberg and Schlittenlacher 2016.) A sound in one ear stays as it is; the same
sound in both is 1.5 times as loud as in one.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ShapeError
from amtcore.kernels.operations.binaural_inhibition import (
    INHIBITION,
    TINY,
    divisor,
    inhibition_of_rows,
)
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import can_compute
from amtcore.stages.constants import Range
from amtcore.stages.excitation import STEP_CAM
from amtcore.stages.stage import Stage, product

#: Reach of the smoothing in Cam.
REACH_CAM = 18.0

_inhibition = operator(INHIBITION)


class Moore2016BinauralLoudness(Stage):
    """Specific loudness of both ears to the loudness of each.

    Args:
        fs: Sampling rate in Hz.
        sigma: Narrowness of the smoothing per Cam.
        p: Exponent of the inhibition.
        erb_step: Channel spacing in Cam.
        learnable: Make `sigma` and `p` parameters.
        dtype: torch.float32 or torch.float64.

    Shape:
        Two times (.., frame, channel) in sone per Cam -> two times (.., frame) in sone.

    Invariants:
        Silence in one ear leaves the loudness of the other as it is; exchanging the ears exchanges
        the results.

    >>> stage = Moore2016BinauralLoudness()
    >>> one, silent = stage(torch.ones(1, 150), torch.zeros(1, 150))
    >>> both, _ = stage(torch.ones(1, 150), torch.ones(1, 150))
    >>> round(float(one / both), 2), float(silent)
    (1.33, 0.0)
    """

    sigma: Tensor
    p: Tensor
    shown = "sigma={0.sigma:g}, p={0.p:g}, learnable={0.learnable}"

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        sigma: float = 0.08,
        p: float = 1.5978,
        erb_step: float = STEP_CAM,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fs, learnable, dtype)
        self.erb_step = erb_step
        self.constant("sigma", sigma, Range(1e-6, 1e3))
        self.constant("p", p, Range(1e-3, 1e2))

    def smoothing(self, channels: int) -> Tensor:
        """(channel, channel), symmetric: the smoothing with zeros beyond the channels."""
        reach = round(REACH_CAM / self.erb_step)
        steps = torch.arange(-reach, reach + 1, dtype=torch.float64, device=self.sigma.device)
        kernel = torch.exp(-((self.sigma.double() * self.erb_step * steps) ** 2))
        kernel = torch.nn.functional.pad(kernel / kernel.sum(), (channels, channels))
        place = torch.arange(channels, device=self.sigma.device)
        return kernel[place[:, None] - place + reach + channels].to(self.dtype)

    def inhibited(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Specific loudness of the left and the right ear in the presence of the other."""
        left = self.as_input(left, (2, 3), "(.., frame, channel)")
        right = self.as_input(right, (2, 3), "(.., frame, channel)")
        if left.shape != right.shape:
            raise ShapeError(
                f"expected two ears of one shape, got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        return self.inhibited_by(left, right, self.smoothing(left.shape[-1]))

    def inhibited_by(self, left: Tensor, right: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """Like `inhibited`, with the smoothing at hand: for many parts of a signal."""
        if left.numel() and can_compute(left, right, kernel, self.p):
            return _inhibition(left, right, kernel, self.p)
        smooth_left, smooth_right = (product(ear, kernel) + TINY for ear in (left, right))
        return (
            left / divisor(smooth_left, smooth_right, self.p),
            right / divisor(smooth_right, smooth_left, self.p),
        )

    def inhibited_rows(
        self, rows: Tensor, channels: int, sides: NDArray[Any]
    ) -> tuple[Tensor, Tensor]:
        """Inhibit float32 rows without gradients; see `inhibition_of_rows`."""
        return inhibition_of_rows(rows, channels, sides, self.p)

    def diotic(self, one: Tensor) -> Tensor:
        """Return the specific loudness of either ear for equal signals, whose ratio is 1."""
        alike = one.new_ones(())
        return one / divisor(alike, alike, self.p)

    def total(self, specific: Tensor) -> Tensor:
        """(.., frame, channel) in sone per Cam -> (.., frame) in sone."""
        return self.erb_step * specific.sum(-1)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Loudness of the left and the right ear in the presence of the other."""
        inhibited_left, inhibited_right = self.inhibited(left, right)
        return self.total(inhibited_left), self.total(inhibited_right)
