"""Cascades of complex one-pole sections on one block of lanes; equations in `reference`.

A block is flat, sample after sample, LANES numbers each. One pass per section keeps the section's
state in registers; the block stays in the first-level cache between passes.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    vabs,
    vload,
    vmax,
    vsplat,
    vsqrt,
    vstore,
    where_greater_or_nan,
)


@part
def _turn(p_re: Any, p_im: Any, z_re: Any, z_im: Any, x_re: Any, x_im: Any) -> Any:
    """p z + x of complex numbers."""
    minus_p_im = vsplat(p_im, 0.0) - p_im
    new_re = fma(p_re, z_re, fma(minus_p_im, z_im, x_re))
    return new_re, fma(p_re, z_im, fma(p_im, z_re, x_im))


@part
def one_pole_cascade_block(
    real: Any, imag: Any, n: int, order: int, coef: Any, c: int, state: Any, s: int
) -> None:
    """Filter `n` samples in place: `real` goes in and comes out, `imag` is scratch.

    Coefficient rows from `c`: pole real, pole imaginary, gain. State rows from `s`: real and
    imaginary part of each section. Two sections at a time hide each other's latency.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, zero = vload(coef, (c + 2) * LANES), vsplat(coef, 0.0)
    for k in range(0, order, 2):
        at, both, ends = (s + 2 * k) * LANES, k + 1 < order, k + 2 >= order
        z_re, z_im = vload(state, at), vload(state, at + LANES)
        w_re, w_im = zero, zero
        if both:
            w_re, w_im = vload(state, at + 2 * LANES), vload(state, at + 3 * LANES)
        for t in range(n):
            x_im = zero if k == 0 else vload(imag, t * LANES)
            z_re, z_im = _turn(p_re, p_im, z_re, z_im, vload(real, t * LANES), x_im)
            y_re, y_im = z_re, z_im
            if both:
                w_re, w_im = _turn(p_re, p_im, w_re, w_im, z_re, z_im)
                y_re, y_im = w_re, w_im
            vstore(imag, t * LANES, y_im)
            vstore(real, t * LANES, y_re * gain if ends else y_re)
        vstore(state, at, z_re)
        vstore(state, at + LANES, z_im)
        if both:
            vstore(state, at + 2 * LANES, w_re)
            vstore(state, at + 3 * LANES, w_im)


@part
def pole_zero_cascade_block(
    x: Any, n: int, order: int, coef: Any, c: int, state: Any, s: int
) -> None:
    """Filter `n` samples in place; coefficient and state rows as above, the gain of one section."""
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain = vload(coef, (c + 2) * LANES)
    minus_p_im = vsplat(coef, 0.0) - p_im
    for k in range(order):
        z_re = vload(state, (s + 2 * k) * LANES)
        z_im = vload(state, (s + 2 * k + 1) * LANES)
        for t in range(n):
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(x, t * LANES)))
            z_im = fma(p_re, z_im, p_im * z_re)
            z_re = new_re
            vstore(x, t * LANES, z_re * gain)
        vstore(state, (s + 2 * k) * LANES, z_re)
        vstore(state, (s + 2 * k + 1) * LANES, z_im)


@part
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


@part
def one_pole_cascade_adjoint(
    x: Any, gy: Any, gx: Any, n: int, order: int, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time.

    With l_k the gradient of z_k:
    l_n[t] = g gy[t] + p* l_n[t+1],  l_k[t] = l_{k+1}[t] + p* l_k[t+1],
    gx = Re l_1,  gp = sum over k, t of l_k[t] z_k[t-1]*,  gg = sum of gy Re z_n.

    `state` is the one before the block; `gstate` enters as the gradient of the state after it and
    leaves as that of the state before it; `gcoef` is added to; `scratch` holds every z.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, zero = vload(coef, (c + 2) * LANES), vsplat(coef, 0.0)
    minus_p_im = zero - p_im
    row = 2 * (n + 1) * LANES  # scratch of one section: z before and after every sample
    for k in range(order):
        z_re = vload(state, (s + 2 * k) * LANES)
        z_im = vload(state, (s + 2 * k + 1) * LANES)
        vstore(scratch, k * row, z_re)
        vstore(scratch, k * row + LANES, z_im)
        for t in range(n):
            if k == 0:
                x_re, x_im = vload(x, t * LANES), zero
            else:
                before = (k - 1) * row + 2 * (t + 1) * LANES
                x_re, x_im = vload(scratch, before), vload(scratch, before + LANES)
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, x_re))
            z_im = fma(p_re, z_im, fma(p_im, z_re, x_im))
            z_re = new_re
            vstore(scratch, k * row + 2 * (t + 1) * LANES, z_re)
            vstore(scratch, k * row + 2 * (t + 1) * LANES + LANES, z_im)
    gp_re, gp_im = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_gain = vload(gcoef, (c + 2) * LANES)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        last = (order - 1) * row + 2 * (t + 1) * LANES
        g_gain = fma(upstream, vload(scratch, last), g_gain)
        l_re, l_im = upstream * gain, zero
        for k in range(order - 1, -1, -1):
            at = (s + 2 * k) * LANES
            # gstate holds l_k[t+1] already multiplied by the conjugate pole.
            l_re = l_re + vload(gstate, at)
            l_im = l_im + vload(gstate, at + LANES)
            z_re = vload(scratch, k * row + 2 * t * LANES)
            z_im = vload(scratch, k * row + 2 * t * LANES + LANES)
            gp_re = fma(l_re, z_re, fma(l_im, z_im, gp_re))
            gp_im = fma(l_im, z_re, fma(zero - l_re, z_im, gp_im))
            vstore(gstate, at, fma(p_re, l_re, p_im * l_im))
            vstore(gstate, at + LANES, fma(p_re, l_im, minus_p_im * l_re))
        vstore(gx, t * LANES, l_re)
    vstore(gcoef, c * LANES, gp_re)
    vstore(gcoef, (c + 1) * LANES, gp_im)
    vstore(gcoef, (c + 2) * LANES, g_gain)


@part
def pole_zero_cascade_adjoint(
    x: Any, gy: Any, gx: Any, n: int, order: int, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block of the pole-zero cascade; arguments as above.

    Per section, from the last: l[t] = g gy[t] + p* l[t+1],  gx = Re l (the gy of the section
    before),  gp = sum of l[t] z[t-1]*,  gg = sum of gy Re z.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, zero = vload(coef, (c + 2) * LANES), vsplat(coef, 0.0)
    minus_p_im = zero - p_im
    row = 2 * (n + 1) * LANES  # scratch of one section: z before and after every sample
    for k in range(order):
        z_re = vload(state, (s + 2 * k) * LANES)
        z_im = vload(state, (s + 2 * k + 1) * LANES)
        vstore(scratch, k * row, z_re)
        vstore(scratch, k * row + LANES, z_im)
        for t in range(n):
            if k == 0:
                value = vload(x, t * LANES)
            else:
                value = vload(scratch, (k - 1) * row + 2 * (t + 1) * LANES) * gain
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, value))
            z_im = fma(p_re, z_im, p_im * z_re)
            z_re = new_re
            vstore(scratch, k * row + 2 * (t + 1) * LANES, z_re)
            vstore(scratch, k * row + 2 * (t + 1) * LANES + LANES, z_im)
    gp_re, gp_im = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_gain = vload(gcoef, (c + 2) * LANES)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        for k in range(order - 1, -1, -1):
            at, before = (s + 2 * k) * LANES, k * row + 2 * t * LANES
            g_gain = fma(upstream, vload(scratch, before + 2 * LANES), g_gain)
            # gstate holds l_k[t+1] already multiplied by the conjugate pole.
            l_re = fma(upstream, gain, vload(gstate, at))
            l_im = vload(gstate, at + LANES)
            z_re, z_im = vload(scratch, before), vload(scratch, before + LANES)
            gp_re = fma(l_re, z_re, fma(l_im, z_im, gp_re))
            gp_im = fma(l_im, z_re, fma(zero - l_re, z_im, gp_im))
            vstore(gstate, at, fma(p_re, l_re, p_im * l_im))
            vstore(gstate, at + LANES, fma(p_re, l_im, minus_p_im * l_re))
            upstream = l_re
        vstore(gx, t * LANES, upstream)
    vstore(gcoef, c * LANES, gp_re)
    vstore(gcoef, (c + 1) * LANES, gp_im)
    vstore(gcoef, (c + 2) * LANES, g_gain)


@part
def modulation_adjoint(
    x: Any, gy: Any, gx: Any, n: int, modulus: bool, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one complex modulation filter; `gx` is added to. Otherwise as above.

    With z[t] = p z[t-1] + a x[t]:  l[t] = b gy[t] (1 or z/|z|) + p* l[t+1],  gx = a Re l,
    ga = sum of x Re l,  gb = sum of gy (Re z or |z|). The modulus has gradient 0 at z = 0.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, scale = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    zero, tiny = vsplat(coef, 0.0), vsplat(coef, 1e-30)
    minus_p_im = zero - p_im
    z_re, z_im = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    vstore(scratch, 0, z_re)
    vstore(scratch, LANES, z_im)
    for t in range(n):
        new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(x, t * LANES) * gain))
        z_im = fma(p_re, z_im, p_im * z_re)
        z_re = new_re
        vstore(scratch, 2 * (t + 1) * LANES, z_re)
        vstore(scratch, 2 * (t + 1) * LANES + LANES, z_im)
    gp_re, gp_im = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_gain, g_scale = vload(gcoef, (c + 2) * LANES), vload(gcoef, (c + 3) * LANES)
    # Gradient that reaches z[t] from later samples: p* l[t+1].
    later_re, later_im = vload(gstate, s * LANES), vload(gstate, (s + 1) * LANES)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        z_re, z_im = vload(scratch, 2 * (t + 1) * LANES), vload(scratch, (2 * t + 3) * LANES)
        direct = upstream * scale
        if modulus:
            size = vsqrt(fma(z_re, z_re, z_im * z_im))
            g_scale = fma(upstream, size, g_scale)
            direct = direct / vmax(size, tiny)
            l_re, l_im = fma(direct, z_re, later_re), fma(direct, z_im, later_im)
        else:
            g_scale = fma(upstream, z_re, g_scale)
            l_re, l_im = direct + later_re, later_im
        z_re, z_im = vload(scratch, 2 * t * LANES), vload(scratch, (2 * t + 1) * LANES)
        gp_re = fma(l_re, z_re, fma(l_im, z_im, gp_re))
        gp_im = fma(l_im, z_re, fma(zero - l_re, z_im, gp_im))
        g_gain = fma(vload(x, t * LANES), l_re, g_gain)
        # Where a channel has no such filter the gain is 0, and l may be NaN although gy is 0.
        l_re = where_greater_or_nan(vabs(gain), zero, l_re, zero)
        vstore(gx, t * LANES, fma(gain, l_re, vload(gx, t * LANES)))
        later_re = fma(p_re, l_re, p_im * l_im)
        later_im = fma(p_re, l_im, minus_p_im * l_re)
    vstore(gstate, s * LANES, later_re)
    vstore(gstate, (s + 1) * LANES, later_im)
    vstore(gcoef, c * LANES, gp_re)
    vstore(gcoef, (c + 1) * LANES, gp_im)
    vstore(gcoef, (c + 2) * LANES, g_gain)
    vstore(gcoef, (c + 3) * LANES, g_scale)
