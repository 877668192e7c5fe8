"""Memoryless nonlinearities on one block of lanes; equations in `reference`."""

from __future__ import annotations

from typing import Any

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

_SMALLEST = 1.2e-38


@part
def broken_stick_block(x: Any, n: int, coef: Any, c: int) -> None:
    """Compress `n` samples in place. Coefficient rows from `c`: a, b, c, knee.

    The power (a logarithm and an exponential) is taken only when some lane is above its knee,
    which changes the time, never the result.
    """
    slope, scale = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    exponent, knee = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    smallest = vsplat(x, _SMALLEST)
    for t in range(n):
        value = vload(x, t * LANES)
        size = vabs(value)
        out = slope * value
        if any_greater(size, knee):
            power = scale * vexp(exponent * vlog(vmax(size, smallest)))
            out = where_greater(size, knee, copysign(power, value), out)
        vstore(x, t * LANES, out)


@part
def square_block(x: Any, n: int, coef: Any, c: int) -> None:
    """y = (g x)^2, in place. Coefficient row `c`: g."""
    gain = vload(coef, c * LANES)
    for t in range(n):
        value = gain * vload(x, t * LANES)
        vstore(x, t * LANES, value * value)


@part
def broken_stick_adjoint(x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, c: int) -> None:
    """Gradients of one block; `gcoef` is added to.

    With p = |x|^c above the knee:  gx = gy b c p / |x|,  gb += gy sign(x) p,
    gc += gy sign(x) b p ln|x|; below it gx = a gy,  ga += gy x.
    """
    slope, scale = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    exponent, knee = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    smallest, zero = vsplat(x, _SMALLEST), vsplat(x, 0.0)
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
