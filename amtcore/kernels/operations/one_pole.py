"""Cascades of n equal complex one-pole sections.

    all-pole gammatone:   z_1[t] = p z_1[t-1] + x[t],        y[t] = g Re z_n[t]
                          z_k[t] = p z_k[t-1] + z_{k-1}[t]
    pole-zero gammatone:  z_k[t] = p z_k[t-1] + y_{k-1}[t],  y_k[t] = g Re z_k[t],  y_0 = x

The polynomial (direct) form of these filters loses digits, because rounding splits an n-fold pole.
Taking the real part between sections gives each section a zero at Re p.

A block is flat, sample after sample, LANES numbers each. Each pass over the block runs one section
with its state in registers; the block stays in the first-level cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import ChainOperation, always, over_time
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, fma, vload, vsplat, vstore


def one_pole_cascade(
    x: Tensor, coef: Tensor, state: Tensor, argument: int
) -> tuple[Tensor, Tensor]:
    """Run the cascade.

    Args:
        x: (batch, channel, time) or (batch, 1, time), real.
        coef: (channel, 3): real and imaginary part of the pole, gain.
        state: (batch, channel, 2 * argument): real and imaginary part of each section.
        argument: Number of sections.
    Returns:
        y (batch, channel, time) and the state after the last sample.
    """
    p_re, p_im, gain = coef.unbind(-1)
    z = list(state.unflatten(-1, (argument, 2)).unbind(-2))
    samples = []
    for sample in x.unbind(-1):
        value = torch.stack((sample, torch.zeros_like(sample)), -1)
        for k in range(argument):
            value = z[k] = turned(p_re, p_im, z[k]) + value
        samples.append(gain * z[-1][..., 0])
    return over_time(samples, state), torch.stack(z, -2).flatten(-2)


def turned(p_re: Tensor, p_im: Tensor, z: Tensor) -> Tensor:
    """Return p z, with real and imaginary parts on the last axis.

    A product of torch's complex numbers is NaN in both parts if one part is infinite.
    """
    re, im = z.unbind(-1)
    return torch.stack((p_re * re - p_im * im, p_re * im + p_im * re), -1)


def pole_zero_cascade(
    x: Tensor, coef: Tensor, state: Tensor, argument: int
) -> tuple[Tensor, Tensor]:
    """Run the pole-zero cascade; arguments as above, with the gain of one section."""
    p_re, p_im, gain = coef.unbind(-1)
    z = list(state.unflatten(-1, (argument, 2)).unbind(-2))
    samples = []
    for sample in x.unbind(-1):
        value = sample
        for k in range(argument):
            z[k] = with_real(turned(p_re, p_im, z[k]), value)
            value = gain * z[k][..., 0]
        samples.append(value)
    return over_time(samples, state), torch.stack(z, -2).flatten(-2)


def with_real(z: Tensor, value: Tensor) -> Tensor:
    """Return z + value for a real value."""
    return torch.stack((z[..., 0] + value, z[..., 1]), -1)


@part
def _turn(p_re: Any, p_im: Any, z_re: Any, z_im: Any, x_re: Any, x_im: Any) -> Any:
    """Return p z + x of complex numbers."""
    minus_p_im = vsplat(p_im, 0.0) - p_im
    new_re = fma(p_re, z_re, fma(minus_p_im, z_im, x_re))
    return new_re, fma(p_re, z_im, fma(p_im, z_re, x_im))


@part
def one_pole_cascade_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Filter `n` samples in place: imaginary parts are in `b`.

    Coefficient rows from `c`: pole real, pole imaginary, gain. State rows from `s`: real and
    imaginary part of each section. Two sections at a time hide each other's latency.
    """
    order, real, imag = argument, a, b
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
    return n


@part
def pole_zero_cascade_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Filter `n` samples in place; coefficient and state rows as above, the gain of one section."""
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain = vload(coef, (c + 2) * LANES)
    minus_p_im = vsplat(coef, 0.0) - p_im
    for k in range(argument):
        z_re = vload(state, (s + 2 * k) * LANES)
        z_im = vload(state, (s + 2 * k + 1) * LANES)
        for t in range(n):
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(a, t * LANES)))
            z_im = fma(p_re, z_im, p_im * z_re)
            z_re = new_re
            vstore(a, t * LANES, z_re * gain)
        vstore(state, (s + 2 * k) * LANES, z_re)
        vstore(state, (s + 2 * k + 1) * LANES, z_im)
    return n


@part(forceinline=True)
def _adjoint(
    zeros: bool, x: Any, gy: Any, gx: Any, n: int, order: int, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block of either cascade, backwards in time; `scratch` holds every z.

    With l_k the gradient of z_k, without zeros:
    l_n[t] = g gy[t] + p* l_n[t+1],  l_k[t] = l_{k+1}[t] + p* l_k[t+1],
    gx = Re l_1,  gp = sum over k, t of l_k[t] z_k[t-1]*,  gg = sum of gy Re z_n.
    With zeros, per section from the last: l[t] = g gy[t] + p* l[t+1],  gx = Re l (the gy of the
    section before),  gp = sum of l[t] z[t-1]*,  gg = sum of gy Re z.
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
                if zeros:
                    x_re = x_re * gain
            new_re = fma(p_re, z_re, fma(minus_p_im, z_im, x_re))
            z_im = fma(p_re, z_im, p_im * z_re if zeros else fma(p_im, z_re, x_im))
            z_re = new_re
            vstore(scratch, k * row + 2 * (t + 1) * LANES, z_re)
            vstore(scratch, k * row + 2 * (t + 1) * LANES + LANES, z_im)
    gp_re, gp_im = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_gain = vload(gcoef, (c + 2) * LANES)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        l_re, l_im = upstream, zero
        if not zeros:
            last = (order - 1) * row + 2 * (t + 1) * LANES
            g_gain = fma(upstream, vload(scratch, last), g_gain)
            l_re = upstream * gain
        for k in range(order - 1, -1, -1):
            at, before = (s + 2 * k) * LANES, k * row + 2 * t * LANES
            # gstate holds l_k[t+1] already multiplied by the conjugate pole.
            if zeros:
                g_gain = fma(l_re, vload(scratch, before + 2 * LANES), g_gain)
                l_re, l_im = fma(l_re, gain, vload(gstate, at)), vload(gstate, at + LANES)
            else:
                l_re, l_im = l_re + vload(gstate, at), l_im + vload(gstate, at + LANES)
            z_re, z_im = vload(scratch, before), vload(scratch, before + LANES)
            gp_re = fma(l_re, z_re, fma(l_im, z_im, gp_re))
            gp_im = fma(l_im, z_re, fma(zero - l_re, z_im, gp_im))
            vstore(gstate, at, fma(p_re, l_re, p_im * l_im))
            vstore(gstate, at + LANES, fma(p_re, l_im, minus_p_im * l_re))
        vstore(gx, t * LANES, l_re)
    vstore(gcoef, c * LANES, gp_re)
    vstore(gcoef, (c + 1) * LANES, gp_im)
    vstore(gcoef, (c + 2) * LANES, g_gain)


@part
def one_pole_cascade_adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    _adjoint(False, x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch)


@part
def pole_zero_cascade_adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    _adjoint(True, x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch)


def _twice(argument: int) -> int:
    """Real and imaginary part of each section."""
    return 2 * argument


#: Argument: the number of sections.
ONE_POLE_CASCADE = ChainOperation(
    name="one_pole_cascade",
    coefficients=always(3),
    states=_twice,
    reference=one_pole_cascade,
    block=one_pole_cascade_block,
    adjoint=one_pole_cascade_adjoint,
    taped=_twice,
)
#: Argument: as above.
POLE_ZERO_CASCADE = ChainOperation(
    name="pole_zero_cascade",
    coefficients=always(3),
    states=_twice,
    reference=pole_zero_cascade,
    block=pole_zero_cascade_block,
    adjoint=pole_zero_cascade_adjoint,
    taped=_twice,
)
