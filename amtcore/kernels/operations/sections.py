"""First-order and second-order sections.

The second-order section is the state-variable form of the bilinear transform (Zavalishin, The Art
of VA Filter Design, 2018, section 4.4): with g = tan(pi f/fs), k = 1/Q and two integrator states

    a1 = 1 / (1 + g (g + k)),  a2 = g a1,  a3 = g a2
    v3 = x - i2,  band = a1 i1 + a2 v3,  low = i2 + a2 i1 + a3 v3
    i1 = 2 band - i1,  i2 = 2 low - i2,  y = m0 x + m1 band + m2 low

This filter equals the direct form b, a. Its coefficients keep their digits at 2 Hz and 44.1 kHz,
where 1 + a1 + a2 is 1e-7 and float32 direct-form coefficients are noise.
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
    fma,
    vload,
    vmax,
    vsplat,
    vstore,
    where_greater,
)


def first_order(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """y[t] = b0 x[t] + b1 x[t-1] - a1 y[t-1], transposed direct form; x half-wave rectified first
    where the argument is 1.

    Args:
        x: (batch, channel, time).
        coef: (channel, 3): b0, b1, a1.
        state: (batch, channel, 1).
    """
    b0, b1, a1 = coef.unbind(-1)
    z = state[..., 0]
    samples = []
    for sample in x.unbind(-1):
        value = sample.clamp(min=0) if argument == 1 else sample
        y = b0 * value + z
        z = b1 * value - a1 * y
        samples.append(y)
    return over_time(samples, state), z.unsqueeze(-1)


def state_variable(
    x: Tensor, coef: Tensor, state: Tensor, argument: int = 0
) -> tuple[Tensor, Tensor]:
    """Second-order section; x half-wave rectified first where the argument is 1.

    Args:
        x: (batch, channel, time).
        coef: (channel, 6): a1, a2, a3, m0, m1, m2.
        state: (batch, channel, 2): the two integrators.
    """
    a1, a2, a3, m0, m1, m2 = coef.unbind(-1)
    i1, i2 = state.unbind(-1)
    samples = []
    for raw in x.unbind(-1):
        sample = raw.clamp(min=0) if argument == 1 else raw
        v3 = sample - i2
        band = a1 * i1 + a2 * v3
        low = i2 + a2 * i1 + a3 * v3
        i1, i2 = 2 * band - i1, 2 * low - i2
        samples.append(m0 * sample + m1 * band + m2 * low)
    return over_time(samples, state), torch.stack((i1, i2), -1)


@part
def first_order_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Coefficient rows from `c`: b0, b1, a1. State row `s`."""
    b0, b1 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    zero = vsplat(coef, 0.0)
    minus_a1 = zero - vload(coef, (c + 2) * LANES)
    z = vload(state, s * LANES)
    for t in range(n):
        value = vload(a, t * LANES)
        if argument == 1:
            value = vmax(value, zero)
        out = fma(b0, value, z)
        z = fma(minus_a1, out, b1 * value)
        vstore(a, t * LANES, out)
    vstore(state, s * LANES, z)
    return n


@part
def state_variable_section(
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


@part
def first_order_adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time.

    From y = b0 v + z, z' = b1 v - a1 y with h the total gradient of y and l that of z':
    h = gy - a1 l,  gv = b0 h + b1 l,  gb0 += h v,  gb1 += l v,  ga1 -= l y,  and l becomes h.
    """
    b0, b1 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    zero = vsplat(coef, 0.0)
    minus_a1 = zero - vload(coef, (c + 2) * LANES)
    z = vload(state, s * LANES)
    for t in range(n):
        value = vload(x, t * LANES)
        if argument == 1:
            value = vmax(value, zero)
        out = fma(b0, value, z)
        z = fma(minus_a1, out, b1 * value)
        vstore(scratch, t * LANES, out)
    g_b0, g_b1 = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_a1, later = vload(gcoef, (c + 2) * LANES), vload(gstate, s * LANES)
    for t in range(n - 1, -1, -1):
        value = vload(x, t * LANES)
        total = fma(minus_a1, later, vload(gy, t * LANES))
        g_value = fma(b0, total, b1 * later)
        if argument == 1:
            g_value = where_greater(value, zero, g_value, zero)
            value = vmax(value, zero)
        vstore(gx, t * LANES, g_value)
        g_b0 = fma(total, value, g_b0)
        g_b1 = fma(later, value, g_b1)
        g_a1 = fma(zero - later, vload(scratch, t * LANES), g_a1)
        later = total
    vstore(gstate, s * LANES, later)
    vstore(gcoef, c * LANES, g_b0)
    vstore(gcoef, (c + 1) * LANES, g_b1)
    vstore(gcoef, (c + 2) * LANES, g_a1)


@part
def state_variable_section_adjoint(
    x: Any, gy: Any, gx: Any, n: int, rectify: bool, add: bool, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time; `gx` is added to when `add`.

    With l1, l2 the gradients of the integrators after the sample: gband = m1 gy + 2 l1,
    glow = m2 gy + 2 l2, gv3 = a2 gband + a3 glow, gx = m0 gy + gv3, and before the sample
    l1 = a1 gband + a2 glow - l1,  l2 = glow - gv3 - l2.
    """
    a1, a2 = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    a3, zero = vload(coef, (c + 2) * LANES), vsplat(coef, 0.0)
    m0, m1 = vload(coef, (c + 3) * LANES), vload(coef, (c + 4) * LANES)
    m2 = vload(coef, (c + 5) * LANES)
    i1, i2 = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    for t in range(n):
        value = vload(x, t * LANES)
        if rectify:
            value = vmax(value, zero)
        vstore(scratch, 2 * t * LANES, i1)
        vstore(scratch, (2 * t + 1) * LANES, i2)
        v3 = value - i2
        band, low = fma(a2, v3, a1 * i1), fma(a3, v3, fma(a2, i1, i2))
        i1, i2 = (band + band) - i1, (low + low) - i2
    l1, l2 = vload(gstate, s * LANES), vload(gstate, (s + 1) * LANES)
    g_a1, g_a2, g_a3 = zero, zero, zero
    g_m0, g_m1, g_m2 = zero, zero, zero
    for t in range(n - 1, -1, -1):
        value, upstream = vload(x, t * LANES), vload(gy, t * LANES)
        raw = value
        if rectify:
            value = vmax(value, zero)
        i1, i2 = vload(scratch, 2 * t * LANES), vload(scratch, (2 * t + 1) * LANES)
        v3 = value - i2
        band, low = fma(a2, v3, a1 * i1), fma(a3, v3, fma(a2, i1, i2))
        g_band, g_low = fma(m1, upstream, l1 + l1), fma(m2, upstream, l2 + l2)
        g_v3 = fma(a2, g_band, a3 * g_low)
        g_m0 = fma(upstream, value, g_m0)
        g_m1 = fma(upstream, band, g_m1)
        g_m2 = fma(upstream, low, g_m2)
        g_a1 = fma(g_band, i1, g_a1)
        g_a2 = fma(g_band, v3, fma(g_low, i1, g_a2))
        g_a3 = fma(g_low, v3, g_a3)
        l1 = fma(a1, g_band, a2 * g_low) - l1
        l2 = (g_low - g_v3) - l2
        g_value = fma(m0, upstream, g_v3)
        if rectify:
            g_value = where_greater(raw, zero, g_value, zero)
        if add:
            g_value = g_value + vload(gx, t * LANES)
        vstore(gx, t * LANES, g_value)
    vstore(gstate, s * LANES, l1)
    vstore(gstate, (s + 1) * LANES, l2)
    accumulate(gcoef, c, g_a1)
    accumulate(gcoef, c + 1, g_a2)
    accumulate(gcoef, c + 2, g_a3)
    accumulate(gcoef, c + 3, g_m0)
    accumulate(gcoef, c + 4, g_m1)
    accumulate(gcoef, c + 5, g_m2)


@part(forceinline=True)
def state_variable_block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    state_variable_section(a, a, n, argument == 1, coef, c, state, s)
    return n


@part(forceinline=True)
def state_variable_adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    state_variable_section_adjoint(
        x, gy, gx, n, argument == 1, False, coef, gcoef, c, state, gstate, s, scratch
    )


def _first_order_example() -> list[Example]:
    coef = 0.9 * torch.rand(5, 3, dtype=torch.float64)
    x, state = torch.randn(5, 300, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    return [Example(argument, coef, state, x) for argument in (0, 1)]


def _state_variable_example() -> list[Example]:
    g, k = torch.rand(5, dtype=torch.float64), 0.5 + torch.rand(5, dtype=torch.float64)
    a1 = 1 / (1 + g * (g + k))
    coef = torch.stack((a1, g * a1, g * g * a1, *torch.rand(3, 5, dtype=torch.float64)), 1)
    x, state = torch.randn(5, 300, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    return [Example(argument, coef, state, x) for argument in (0, 1)]


#: Argument: 1 to half-wave rectify the input.
FIRST_ORDER = ChainOperation(
    name="first_order",
    coefficients=always(3),
    states=always(1),
    reference=first_order,
    block=first_order_block,
    adjoint=first_order_adjoint,
    taped=always(1),
    example=_first_order_example,
)
#: Argument: as above.
STATE_VARIABLE = ChainOperation(
    name="state_variable",
    coefficients=always(6),
    states=always(2),
    reference=state_variable,
    block=state_variable_block,
    adjoint=state_variable_adjoint,
    taped=always(2),
    example=_state_variable_example,
)
