"""Adaptation loops on one block of lanes; equations in `reference`.

All loops in one pass, so that the processor overlaps their long divisions. The limiter (an
exponential and one more division) runs only when some lane overshoots, which changes the time,
never the result.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ..simd import LANES, any_greater, fma, vexp, vload, vmax, vsplat, vstore, where_greater


@njit
def adaptation_block(
    x: Any, n: int, loops: int, limit: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """Filter `n` samples in place.

    Coefficient rows from `c`: minimum level, output offset, output scale; then per loop 1 - a, m
    and -2 / m.
    State rows from `s`: one divisor per loop.
    """
    floor = vload(coef, c * LANES)
    offset, scale = vload(coef, (c + 1) * LANES), vload(coef, (c + 2) * LANES)
    one = vsplat(x, 1.0)
    for t in range(n):
        y = vmax(vload(x, t * LANES), floor)
        for j in range(loops):
            divisor = vload(state, (s + j) * LANES)
            y = y / divisor
            if limit and any_greater(y, one):
                m = vload(coef, (c + 4 + 3 * j) * LANES)
                steepness = vload(coef, (c + 5 + 3 * j) * LANES)
                limited = (m + m) / (one + vexp(steepness * (y - one))) - (m - one)
                y = where_greater(y, one, limited, y)
            rise = vload(coef, (c + 3 + 3 * j) * LANES)
            vstore(state, (s + j) * LANES, fma(rise, y - divisor, divisor))
        vstore(x, t * LANES, (y - offset) * scale)
