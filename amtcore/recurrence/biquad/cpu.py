"""First- and second-order sections on one block of lanes; equations in `reference`."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..simd import LANES, fma, vload, vmax, vsplat, vstore


@njit
def first_order_block(
    x: Any, y: Any, n: int, rectify: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """Coefficient rows from `c`: b0, b1, a1. State row `s`. `x` and `y` may be one buffer."""
    b0, b1 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    zero = vsplat(coef, 0.0)
    minus_a1 = zero - vload(coef, (c + 2) * LANES)
    z = vload(state, s * LANES)
    for t in range(n):
        value = vload(x, t * LANES)
        if rectify:
            value = vmax(value, zero)
        out = fma(b0, value, z)
        z = fma(minus_a1, out, b1 * value)
        vstore(y, t * LANES, out)
    vstore(state, s * LANES, z)


@njit
def state_variable_block(
    x: Any, y: Any, n: int, rectify: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """Coefficient rows from `c`: a1, a2, a3, m0, m1, m2. State rows from `s`: two integrators."""
    a1, a2 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    a3 = vload(coef, (c + 2) * LANES)
    m0, m1 = vload(coef, (c + 3) * LANES), vload(coef, (c + 4) * LANES)
    m2 = vload(coef, (c + 5) * LANES)
    i1, i2 = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    zero = vsplat(coef, 0.0)
    for t in range(n):
        value = vload(x, t * LANES)
        if rectify:
            value = vmax(value, zero)
        v3 = value - i2
        band = fma(a2, v3, a1 * i1)
        low = fma(a3, v3, fma(a2, i1, i2))
        i1 = (band + band) - i1
        i2 = (low + low) - i2
        vstore(y, t * LANES, fma(m2, low, fma(m1, band, m0 * value)))
    vstore(state, s * LANES, i1)
    vstore(state, (s + 1) * LANES, i2)
