"""Receptor potential of an inner hair cell (Paulick et al. 2024), forward Euler.

With u the potential above rest, p the open probability of the transduction channels, v the
velocity of the basilar membrane and conductances in units of (fs Cm):

    p = 1 / (1 + e1 (1 + e0)),  e1 = exp(o1 + q1 v),  e0 = exp(o0 + q0 v)
    g = g_max p
    u = u - (g + g_k) u + (g - g_rest) drive + leak

This is V += -(G (V - EP) + Gkf (V - Ekf) + Gks (V - Eks)) / (fs Cm) with V = V_0 + u taken apart:
drive = EP - V_0, and leak is what is left at V_0 with the conductance at rest (almost nothing).
Working on u keeps float32's digits for the signal, which is 1e-6 of V at threshold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import ChainOperation, always, over_time
from amtcore.kernels.vector.elementary import vexp
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    fma,
    vload,
    vmin,
    vsplat,
    vstore,
    where_greater,
)

#: The exponents end here, where the channel is closed for good (p < 1e-17).
LARGEST_EXPONENT = 40.0


def reference(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """Run the membrane.

    Args:
        x: (batch, channel, time), velocity.
        coef: (channel, 9): o1, q1, o0, q0, g_max, g_k, g_rest, drive, leak.
        state: (batch, channel, 1): u.
    """
    o1, q1, o0, q0, g_max, g_k, g_rest, drive, leak = coef.unbind(-1)
    u = state[..., 0]
    samples = []
    for v in x.unbind(-1):
        e1 = torch.exp((o1 + q1 * v).clamp(max=LARGEST_EXPONENT))
        e0 = torch.exp((o0 + q0 * v).clamp(max=LARGEST_EXPONENT))
        g = g_max / (1 + e1 * (1 + e0))
        u = u - (g + g_k) * u + ((g - g_rest) * drive + leak)
        samples.append(u)
    return over_time(samples, state), u.unsqueeze(-1)


@part
def block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Filter `n` samples in place: velocity in, potential above rest out.

    Coefficient rows from `c`: o1, q1, o0, q0, g_max, g_k, g_rest, drive, leak. State row `s`: u.
    """
    o1, q1 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    o0, q0 = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    g_max, g_k = vload(coef, (c + 4) * LANES), vload(coef, (c + 5) * LANES)
    g_rest, drive = vload(coef, (c + 6) * LANES), vload(coef, (c + 7) * LANES)
    leak = vload(coef, (c + 8) * LANES)
    one, most = vsplat(a, 1.0), vsplat(a, LARGEST_EXPONENT)
    u = vload(state, s * LANES)
    for t in range(n):
        v = vload(a, t * LANES)
        e1 = vexp(vmin(fma(q1, v, o1), most))
        e0 = vexp(vmin(fma(q0, v, o0), most))
        g = g_max / (one + e1 * (one + e0))
        u = (u - (g + g_k) * u) + fma(g - g_rest, drive, leak)
        vstore(a, t * LANES, u)
    vstore(state, s * LANES, u)
    return n


@part
def adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time.

    With l the gradient of u after the sample (its own gy added) and u the one before it:
    gg = l (drive - u),  gg_k -= l u,  gg_rest -= l drive,  gdrive += l (g - g_rest),  gleak += l,
    gp = g_max gg,  go1 = -gp p^2 e1 (1 + e0),  go0 = -gp p^2 e1 e0,  gv = q1 go1 + q0 go0,
    and before the sample l becomes l (1 - g - g_k). `scratch` holds u before each sample.
    """
    o1, q1 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    o0, q0 = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    g_max, g_k = vload(coef, (c + 4) * LANES), vload(coef, (c + 5) * LANES)
    g_rest, drive = vload(coef, (c + 6) * LANES), vload(coef, (c + 7) * LANES)
    leak = vload(coef, (c + 8) * LANES)
    one, zero = vsplat(x, 1.0), vsplat(x, 0.0)
    most = vsplat(x, LARGEST_EXPONENT)
    u = vload(state, s * LANES)
    for t in range(n):
        vstore(scratch, t * LANES, u)
        v = vload(x, t * LANES)
        e1 = vexp(vmin(fma(q1, v, o1), most))
        e0 = vexp(vmin(fma(q0, v, o0), most))
        g = g_max / (one + e1 * (one + e0))
        u = (u - (g + g_k) * u) + fma(g - g_rest, drive, leak)
    later = vload(gstate, s * LANES)
    for t in range(n - 1, -1, -1):
        v, u = vload(x, t * LANES), vload(scratch, t * LANES)
        a1, a0 = fma(q1, v, o1), fma(q0, v, o0)
        e1, e0 = vexp(vmin(a1, most)), vexp(vmin(a0, most))
        p = one / (one + e1 * (one + e0))
        g = g_max * p
        total = later + vload(gy, t * LANES)
        g_g = total * (drive - u)
        slope = zero - g_g * g * p * e1
        g_o1 = where_greater(most, a1, slope * (one + e0), zero)
        g_o0 = where_greater(most, a0, slope * e0, zero)
        vstore(gx, t * LANES, fma(q1, g_o1, q0 * g_o0))
        accumulate(gcoef, c, g_o1)
        accumulate(gcoef, c + 1, g_o1 * v)
        accumulate(gcoef, c + 2, g_o0)
        accumulate(gcoef, c + 3, g_o0 * v)
        accumulate(gcoef, c + 4, g_g * p)
        accumulate(gcoef, c + 5, zero - total * u)
        accumulate(gcoef, c + 6, zero - total * drive)
        accumulate(gcoef, c + 7, total * (g - g_rest))
        accumulate(gcoef, c + 8, total)
        later = total * (one - (g + g_k))
    vstore(gstate, s * LANES, later)


HAIR_CELL = ChainOperation(
    name="hair_cell",
    coefficients=always(9),
    states=always(1),
    reference=reference,
    block=block,
    adjoint=adjoint,
    taped=always(1),
    exponentials=True,
)
