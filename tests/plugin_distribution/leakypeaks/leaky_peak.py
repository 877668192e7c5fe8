"""A peak detector that leaks: y[t] = max(|x[t]|, d y[t-1]).

Coefficient: d, 0..1. State: y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import ChainOperation, Example, always, over_time
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    copysign,
    vabs,
    vload,
    vmax,
    vsplat,
    vstore,
    where_greater,
)


def reference(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """Follow the peaks of every channel."""
    y, samples = state[..., 0], []
    for sample in x.unbind(-1):
        size, held = sample.abs(), coef[:, 0] * y
        y = torch.where(held > size, held, size)
        samples.append(y)
    return over_time(samples, state), y.unsqueeze(-1)


@part
def block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """`n` samples in place."""
    decay, y = vload(coef, c * LANES), vload(state, s * LANES)
    for t in range(n):
        y = vmax(vabs(vload(a, t * LANES)), decay * y)
        vstore(a, t * LANES, y)
    vstore(state, s * LANES, y)
    return n


@part
def adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """With l the gradient of y[t]: where d y[t-1] is larger gd += l y[t-1] and the gradient of
    y[t-1] is d l, else gx = sign(x) l. `scratch` holds y before each sample."""
    decay, zero = vload(coef, c * LANES), vsplat(coef, 0.0)
    y = vload(state, s * LANES)
    for t in range(n):
        vstore(scratch, t * LANES, y)
        y = vmax(vabs(vload(x, t * LANES)), decay * y)
    later = vload(gstate, s * LANES)
    for t in range(n - 1, -1, -1):
        value, before = vload(x, t * LANES), vload(scratch, t * LANES)
        size, held = vabs(value), decay * before
        total = later + vload(gy, t * LANES)
        rise = where_greater(held, size, zero, total)
        fall = where_greater(held, size, total, zero)
        vstore(gx, t * LANES, rise * copysign(vsplat(value, 1.0), value))
        accumulate(gcoef, c, fall * before)
        later = decay * fall
    vstore(gstate, s * LANES, later)


def _example() -> list[Example]:
    decay = 0.8 + 0.19 * torch.rand(5, 1, dtype=torch.float64)
    x = torch.randn(5, 300, dtype=torch.float64)
    return [Example(0, decay, torch.rand(5, 1, dtype=torch.float64), x)]


LEAKY_PEAK = ChainOperation(
    name="leaky_peak",
    coefficients=always(1),
    states=always(1),
    reference=reference,
    block=block,
    adjoint=adjoint,
    taped=always(1),
    example=_example,
)
