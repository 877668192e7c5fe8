"""Memoryless nonlinearities: the broken stick, and a square.

    |x| > knee:  y = sign(x) b |x|^c      else:  y = a x

With knee = (b/a)^(1/(1-c)) and c < 1 this is sign(x) min(a |x|, b |x|^c) (Meddis, O'Mard and
Lopez-Poveda 2001, eq. 1); with knee = 0 it is a power law.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import ChainOperation, always
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    any_greater,
    copysign,
    fma,
    vabs,
    vload,
    vmax,
    vsplat,
    vstore,
    where_greater,
)

#: Floor of amplitudes in the power law: float32's smallest normal number.
SMALLEST = 1.2e-38


def broken_stick(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """Compress every sample on its own.

    Args:
        x: (batch, channel, time).
        coef: (channel, 4): a, b, c, knee. The knee has no gradient: both pieces agree there.
        state: (batch, channel, 0).
    """
    a, b, c, knee = coef.unsqueeze(-1).unbind(-2)
    size = x.abs()
    above = size > knee
    # Below the knee the power law is not used; 1 keeps its gradient finite.
    base = torch.where(above, size, 1.0).clamp(min=SMALLEST)
    power = b * torch.exp(c * torch.log(base))
    return torch.where(above, power * x.sign(), a * x), state


def square(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """y = (g x)^2; coef (channel, 1): g."""
    return (coef * x).square(), state


@part
def broken_stick_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Compress `n` samples in place. Coefficient rows from `c`: a, b, c, knee.

    The power (a logarithm and an exponential) is taken only when some lane is above its knee,
    which changes the time, never the result.
    """
    slope, scale = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    exponent, knee = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    smallest = vsplat(a, SMALLEST)
    for t in range(n):
        value = vload(a, t * LANES)
        size = vabs(value)
        out = slope * value
        if any_greater(size, knee):
            power = scale * vexp(exponent * vlog(vmax(size, smallest)))
            out = where_greater(size, knee, copysign(power, value), out)
        vstore(a, t * LANES, out)
    return n


@part
def square_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """y = (g x)^2, in place. Coefficient row `c`: g."""
    gain = vload(coef, c * LANES)
    for t in range(n):
        value = gain * vload(a, t * LANES)
        vstore(a, t * LANES, value * value)
    return n


@part
def broken_stick_adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block; `gcoef` is added to.

    With p = |x|^c above the knee:  gx = gy b c p / |x|,  gb += gy sign(x) p,
    gc += gy sign(x) b p ln|x|; below it gx = a gy,  ga += gy x.
    """
    slope, scale = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    exponent, knee = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    smallest, zero = vsplat(x, SMALLEST), vsplat(x, 0.0)
    g_slope, g_scale, g_exponent = zero, zero, zero
    for t in range(n):
        value, upstream = vload(x, t * LANES), vload(gy, t * LANES)
        size = vabs(value)
        logarithm = where_greater(size, knee, vlog(vmax(size, smallest)), zero)
        power = vexp(exponent * logarithm)
        steep = upstream * scale * exponent * power / vmax(size, smallest)
        vstore(gx, t * LANES, where_greater(size, knee, steep, slope * upstream))
        g_slope = g_slope + where_greater(size, knee, zero, upstream) * value
        along = where_greater(size, knee, copysign(power, value) * upstream, zero)
        g_scale = g_scale + along
        g_exponent = fma(along * scale, logarithm, g_exponent)
    accumulate(gcoef, c, g_slope)
    accumulate(gcoef, c + 1, g_scale)
    accumulate(gcoef, c + 2, g_exponent)


BROKEN_STICK = ChainOperation(
    name="broken_stick",
    coefficients=always(4),
    reference=broken_stick,
    block=broken_stick_block,
    adjoint=broken_stick_adjoint,
    exponentials=True,
)
SQUARE = ChainOperation(
    name="square",
    coefficients=always(1),
    reference=square,
    block=square_block,
)
