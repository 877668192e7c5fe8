"""Binaural inhibition: by the kernel for numbers alone, see `ops.excitation`, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.binaural import runner
from amtcore.kernels.families.binaural.reference import TINY as TINY
from amtcore.kernels.families.binaural.reference import divisor as divisor
from amtcore.kernels.families.binaural.runner import inhibition_of_rows as inhibition_of_rows
from amtcore.kernels.families.binaural.runner import sides_of as sides_of


@torch.library.custom_op("amtcore::inhibition", mutates_args=(), device_types="cpu")
def _inhibition(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return runner.inhibition(left, right, smoothing, p)


@_inhibition.register_fake
def _(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape)


def inhibition(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """(.., frame, channel) of both ears, see `runner.inhibition`."""
    one, other = (ear.detach().flatten(0, -2) for ear in (left, right))
    call = _inhibition if torch.compiler.is_compiling() else runner.inhibition
    of_left, of_right = call(one, other, smoothing.detach(), p.detach())
    return of_left.view(left.shape), of_right.view(right.shape)
