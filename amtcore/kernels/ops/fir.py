"""Operator of the FIR family: `amtcore::fir`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.fir import reference
from amtcore.kernels.families.fir.reference import count_outputs
from amtcore.kernels.ops.autograd import with_adjoint
from amtcore.kernels.ops.dispatch import rows_of, use_reference


@torch.library.custom_op("amtcore::fir", mutates_args=(), device_types=DEVICES)
def _fir(x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
    return backend_of(x).fir(x, taps, stride, first, count)


@_fir.register_fake
def _(x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
    return x.new_empty(x.shape[0], count)


def _backward(context: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    """With the outputs spread out to every sample, gx and gtaps are correlations:

    gx[m] = sum over k of taps[k] gy[m - first - (K - 1) + k],
    gtaps[k] = sum over n of gy[n] x[first + n + K - 1 - k]
    """
    x, taps = context.saved_tensors
    first, last, spread = context.first, taps.shape[0] - 1, gy
    if context.stride != 1:
        spread = torch.nn.functional.pad(gy.unsqueeze(-1), (0, context.stride - 1)).flatten(1)
    gx = gtaps = None
    if context.needs_input_grad[0]:
        # Backwards in time it is the filter itself, from the last sample of x on.
        back = first + spread.shape[1] - x.shape[1]
        gx = _differentiable(spread.flip(1), taps, 1, back, x.shape[1]).flip(1)
    if context.needs_input_grad[1] and x.shape[0] == 0:
        gtaps = torch.zeros_like(taps)
    elif context.needs_input_grad[1]:
        samples = spread.shape[1] + last
        seen = reference.windows(x, first, samples)
        product = torch.fft.rfft(seen) * torch.fft.rfft(spread, samples).conj()
        gtaps = torch.fft.irfft(product.sum(0), samples)[: last + 1].flip(0)
    return gx, gtaps, None, None, None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, int], output: Tensor) -> None:
    x, taps, ctx.stride, ctx.first, _ = inputs
    ctx.save_for_backward(x, taps)


_differentiable = with_adjoint(_fir, _keep, _backward, (0,))


def fir(
    x: Tensor,
    taps: Tensor,
    stride: int = 1,
    first: int = 0,
    count: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Finite impulse response of every row; arguments as in `reference.fir`, but x (.., time).

    Without `count` there are as many outputs as have their windows inside x.
    """
    if taps.ndim != 1 or x.dtype != taps.dtype:
        raise ShapeError(
            f"expected taps (K,) of the input's dtype {x.dtype}, got {tuple(taps.shape)} "
            f"of {taps.dtype}"
        )
    rows = rows_of(x)
    if count is None:
        count = count_outputs(x.shape[-1] - first, taps.shape[0], stride)
    function = reference.fir if use_reference(x, backend) else _differentiable
    y = function(rows, taps, stride, first, count)
    return y.reshape(*x.shape[:-1], count)
