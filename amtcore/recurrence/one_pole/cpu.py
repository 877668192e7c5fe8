"""Cascade of complex one-pole sections on one block of lanes.

A block is flat, sample after sample, LANES numbers each. One pass per section keeps the section's
state in registers; the block stays in the first-level cache between passes.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ..simd import LANES, fma, vload, vsplat, vsqrt, vstore


@njit
def one_pole_cascade_block(
    real: Any, imag: Any, n: int, order: int, coef: Any, c: int, state: Any, s: int
) -> None:
    """Filter `n` samples in place: `real` goes in and comes out, `imag` is scratch.

    Coefficient rows from `c`: pole real, pole imaginary, gain. State rows from `s`: real and
    imaginary part of each section.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain = vload(coef, (c + 2) * LANES)
    minus_p_im = vsplat(coef, 0.0) - p_im
    for k in range(order):
        z_re = vload(state, (s + 2 * k) * LANES)
        z_im = vload(state, (s + 2 * k + 1) * LANES)
        for t in range(n):
            x_re = vload(real, t * LANES)
            x_im = vsplat(real, 0.0) if k == 0 else vload(imag, t * LANES)
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, x_re))
            z_im = fma(p_re, z_im, fma(p_im, z_re, x_im))
            z_re = new_re
            vstore(imag, t * LANES, z_im)
            vstore(real, t * LANES, z_re * gain if k == order - 1 else z_re)
        vstore(state, (s + 2 * k) * LANES, z_re)
        vstore(state, (s + 2 * k + 1) * LANES, z_im)


@njit
def modulation_block(
    x: Any, y: Any, n: int, modulus: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """One complex modulation filter: `x` in, `y` its real part or its scaled modulus.

    Coefficient rows from `c`: pole real, pole imaginary, input gain, output gain.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, scale = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    minus_p_im = vsplat(coef, 0.0) - p_im
    z_re, z_im = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    for t in range(n):
        new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(x, t * LANES) * gain))
        z_im = fma(p_re, z_im, p_im * z_re)
        z_re = new_re
        if modulus:
            vstore(y, t * LANES, scale * vsqrt(fma(z_re, z_re, z_im * z_im)))
        else:
            vstore(y, t * LANES, scale * z_re)
    vstore(state, s * LANES, z_re)
    vstore(state, (s + 1) * LANES, z_im)
