"""Binaural inhibition: by the kernel for numbers alone, see `ops.excitation`, else by torch."""

from __future__ import annotations

from torch import Tensor

from amtcore.kernels.families.binaural import runner
from amtcore.kernels.families.binaural.reference import TINY as TINY
from amtcore.kernels.families.binaural.reference import divisor as divisor


def inhibition(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """(.., frame, channel) of both ears, see `runner.inhibition`."""
    one, other = (ear.detach().flatten(0, -2) for ear in (left, right))
    of_left, of_right = runner.inhibition(one, other, smoothing.detach(), p.detach())
    return of_left.view(left.shape), of_right.view(right.shape)
