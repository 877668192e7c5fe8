"""Adaptation loops on one block of lanes; equations in `reference`.

All loops in one pass, each one sample behind the one before it: what they do is independent, so
the processor overlaps their long divisions. The limiter (an exponential and one more division)
runs only when some lane overshoots, which changes the time, never the result.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.vector.elementary import vexp
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    any_greater,
    any_greater_or_nan,
    fma,
    vload,
    vmax,
    vsplat,
    vstore,
    where_greater,
    where_greater_or_nan,
)


@part
def _limited(y: Any, one: Any, m: Any, steepness: Any) -> Any:
    soft = (m + m) / (one + vexp(steepness * (y - one))) - (m - one)
    return where_greater(y, one, soft, y)


@part
def adaptation_block(
    x: Any, n: int, loops: int, limit: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """Filter `n` samples in place.

    Coefficient rows from `c`: minimum level, output offset, output scale; then per loop 1 - a, m
    and -2 / m.
    State rows from `s`: one divisor per loop.
    """
    floor, one = vload(coef, c * LANES), vsplat(x, 1.0)
    for i in range(n + loops - 1):
        for j in range(min(loops, i + 1) - 1, max(0, i - n + 1) - 1, -1):
            at, row = (i - j) * LANES, c + 3 + 3 * j
            y, divisor = vload(x, at), vload(state, (s + j) * LANES)
            if j == 0:
                y = vmax(y, floor)
            y = y / divisor
            if limit and any_greater(y, one):
                m, steepness = vload(coef, (row + 1) * LANES), vload(coef, (row + 2) * LANES)
                y = _limited(y, one, m, steepness)
            rise = vload(coef, row * LANES)
            vstore(state, (s + j) * LANES, fma(rise, y - divisor, divisor))
            vstore(x, at, y)
    offset, scale = vload(coef, (c + 1) * LANES), vload(coef, (c + 2) * LANES)
    for t in range(n):
        vstore(x, t * LANES, (vload(x, t * LANES) - offset) * scale)


@part
def adaptation_adjoint(
    x: Any, gy: Any, gx: Any, n: int, loops: int, limit: bool, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time; `gstate` and `gcoef` as in the one-pole family.

    Per loop, with u = y_in / s, y = limiter(u), s' = s + r (y - s) and l the gradient of s':
    gy += r l,  gr += l (y - s),  gu = gy limiter'(u),  gy_in = gu / s,
    and before the sample l = (1 - r) l - gu u / s.
    """
    floor = vload(coef, c * LANES)
    offset, scale = vload(coef, (c + 1) * LANES), vload(coef, (c + 2) * LANES)
    one, zero = vsplat(x, 1.0), vsplat(x, 0.0)
    rows = 2 * loops  # per sample: each loop's divisor before it, and its input over the divisor
    _adaptation_tape(x, n, loops, limit, coef, c, state, s, scratch)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        g_y = upstream * scale
        last = vload(scratch, (rows * t + 2 * loops - 1) * LANES)
        if limit and any_greater(last, one):
            m = vload(coef, (c + 1 + 3 * loops) * LANES)
            last = _limited(last, one, m, vload(coef, (c + 2 + 3 * loops) * LANES))
        accumulate(gcoef, c + 1, zero - g_y)
        accumulate(gcoef, c + 2, upstream * (last - offset))
        for j in range(loops - 1, -1, -1):
            row = c + 3 + 3 * j
            divisor = vload(scratch, (rows * t + 2 * j) * LANES)
            u = vload(scratch, (rows * t + 2 * j + 1) * LANES)
            rise, later = vload(coef, row * LANES), vload(gstate, (s + j) * LANES)
            g_y = fma(rise, later, g_y)
            y = u
            if limit and any_greater_or_nan(u, one):
                m, steepness = vload(coef, (row + 1) * LANES), vload(coef, (row + 2) * LANES)
                y = _limited(u, one, m, steepness)
                g_y, g_m, g_steepness = _limiter_adjoint(u, one, g_y, m, steepness)
                accumulate(gcoef, row + 1, g_m)
                accumulate(gcoef, row + 2, g_steepness)
            accumulate(gcoef, row, later * (y - divisor))
            g_in = g_y / divisor
            vstore(gstate, (s + j) * LANES, fma(zero - g_in, u, (one - rise) * later))
            g_y = g_in
        value = vload(x, t * LANES)
        vstore(gx, t * LANES, where_greater_or_nan(value, floor, g_y, zero))
        accumulate(gcoef, c, where_greater(value, floor, zero, g_y))


@part
def _adaptation_tape(
    x: Any, n: int, loops: int, limit: bool, coef: Any, c: int, state: Any, s: int, tape: Any
) -> None:
    """The forward pass again, writing down each loop's divisor and quotient; `state` stays."""
    floor, one = vload(coef, c * LANES), vsplat(x, 1.0)
    for j in range(loops):
        vstore(tape, 2 * j * LANES, vload(state, (s + j) * LANES))
    for t in range(n):
        y = vmax(vload(x, t * LANES), floor)
        for j in range(loops):
            at = (2 * loops * t + 2 * j) * LANES
            divisor = vload(tape, at)
            y = y / divisor
            vstore(tape, at + LANES, y)
            row = c + 3 + 3 * j
            if limit and any_greater(y, one):
                m, steepness = vload(coef, (row + 1) * LANES), vload(coef, (row + 2) * LANES)
                y = _limited(y, one, m, steepness)
            rise = vload(coef, row * LANES)
            vstore(tape, at + 2 * loops * LANES, fma(rise, y - divisor, divisor))


@part
def _limiter_adjoint(u: Any, one: Any, g_y: Any, m: Any, steepness: Any) -> Any:
    """With e = exp(k (u - 1)) and y = 2 m / (1 + e) - (m - 1): the gradients of u, m and k."""
    zero, past = vsplat(one, 0.0), u - one
    # Up to 1 the limiter is off: there a hard one (m below 0.02) would take exp beyond float32, and
    # infinity times 0 is no gradient.
    power = steepness * past
    e = vexp(where_greater(power, zero, zero, power))
    inverse = one / (one + e)
    slope = zero - (m + m) * e * inverse * inverse  # dy / d(k (u - 1))
    over = where_greater_or_nan(u, one, g_y, zero)
    g_u = where_greater_or_nan(u, one, g_y * slope * steepness, g_y)
    return g_u, over * (inverse + inverse - one), over * slope * past
