"""Adaptation loops (Dau, Pueschel and Kohlrausch 1996, section II; limiter of 1997).

Per loop j, with the divisor s_j as state and y the output of loop j-1 (the input floored at the
minimum level for the first loop):

    y = y / s_j
    y = 2 m_j / (1 + exp(-2 (y - 1) / m_j)) - (m_j - 1)   where y > 1 and the limiter is on
    s_j = s_j + (1 - a_j) (y - s_j)

The output is scaled so that the minimum level maps to 0 and an input of 1 (100 dB) to 100.

The block function runs all loops in one pass, each loop one sample behind the loop before it. The
loops are then independent, so the processor overlaps their divisions. The limiter runs only when
some lane overshoots; a lane's result does not depend on the other lanes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import ChainOperation, Example, over_time
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


def reference(x: Tensor, coef: Tensor, state: Tensor, argument: int) -> tuple[Tensor, Tensor]:
    """Run the loops.

    Args:
        x: (batch, channel, time).
        coef: (channel, 3 + 3 loops): minimum level, output offset c, output scale 100 / (1 - c),
            then 1 - a_j, m_j and -2 / m_j of each loop (the last two unused without `limit`).
        state: (batch, channel, loop): the divisors.
        argument: 2 loops, and 1 more where overshoot is limited.
    """
    limit = argument % 2 == 1
    floor, offset, scale = coef[:, :3].unbind(-1)
    rise, most, steepness = coef[:, 3::3], coef[:, 4::3], coef[:, 5::3]
    s = list(state.unbind(-1))
    samples = []
    for sample in x.unbind(-1):
        y = torch.maximum(sample, floor)
        for j in range(len(s)):
            y = y / s[j]
            if limit:
                m = most[:, j]
                # Up to 1 the limiter is off, and exp might overflow, which has no gradient. (The
                # gradient of clamp is 0 at NaN.)
                power = steepness[:, j] * (y - 1)
                power = torch.where(power > 0, torch.zeros_like(power), power)
                limited = 2 * m / (1 + torch.exp(power)) - (m - 1)
                y = torch.where(y > 1, limited, y)
            s[j] = s[j] + rise[:, j] * (y - s[j])
        samples.append((y - offset) * scale)
    return over_time(samples, state), torch.stack(s, -1)


@part
def _limited(y: Any, one: Any, m: Any, steepness: Any) -> Any:
    soft = (m + m) / (one + vexp(steepness * (y - one))) - (m - one)
    return where_greater(y, one, soft, y)


@part
def block(
    a: Any, b: Any, side: Any, n: int, argument: int, coef: Any, c: int, state: Any, s: int
) -> int:
    """Filter `n` samples in place.

    Coefficient rows from `c`: minimum level, output offset, output scale; then per loop 1 - a, m
    and -2 / m.
    State rows from `s`: one divisor per loop.
    """
    loops, limit = argument // 2, argument % 2 == 1
    floor, one = vload(coef, c * LANES), vsplat(a, 1.0)
    for i in range(n + loops - 1):
        for j in range(min(loops, i + 1) - 1, max(0, i - n + 1) - 1, -1):
            at, row = (i - j) * LANES, c + 3 + 3 * j
            y, divisor = vload(a, at), vload(state, (s + j) * LANES)
            if j == 0:
                y = vmax(y, floor)
            y = y / divisor
            if limit and any_greater(y, one):
                m, steepness = vload(coef, (row + 1) * LANES), vload(coef, (row + 2) * LANES)
                y = _limited(y, one, m, steepness)
            rise = vload(coef, row * LANES)
            vstore(state, (s + j) * LANES, fma(rise, y - divisor, divisor))
            vstore(a, at, y)
    offset, scale = vload(coef, (c + 1) * LANES), vload(coef, (c + 2) * LANES)
    for t in range(n):
        vstore(a, t * LANES, (vload(a, t * LANES) - offset) * scale)
    return n


@part
def adjoint(
    x: Any, gy: Any, gx: Any, n: int, argument: int, coef: Any, gcoef: Any, c: int, state: Any,
    gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one block, backwards in time.

    Per loop, with u = y_in / s, y = limiter(u), s' = s + r (y - s) and l the gradient of s':
    gy += r l,  gr += l (y - s),  gu = gy limiter'(u),  gy_in = gu / s,
    and before the sample l = (1 - r) l - gu u / s.
    """
    floor = vload(coef, c * LANES)
    loops, limit = argument // 2, argument % 2 == 1
    offset, scale = vload(coef, (c + 1) * LANES), vload(coef, (c + 2) * LANES)
    one, zero = vsplat(x, 1.0), vsplat(x, 0.0)
    rows = 2 * loops  # per sample: each loop's divisor before it, and its input over the divisor
    _tape(x, n, loops, limit, coef, c, state, s, scratch)
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
def _tape(
    x: Any, n: int, loops: int, limit: bool, coef: Any, c: int, state: Any, s: int, tape: Any
) -> None:
    """Run the forward pass, writing each loop's divisor and quotient; `state` is unchanged."""
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
    # Up to 1 the limiter is off. There a hard limiter (m below 0.02) would take exp beyond float32,
    # and infinity times 0 would make the gradient NaN.
    power = steepness * past
    e = vexp(where_greater(power, zero, zero, power))
    inverse = one / (one + e)
    slope = zero - (m + m) * e * inverse * inverse  # dy / d(k (u - 1))
    over = where_greater_or_nan(u, one, g_y, zero)
    g_u = where_greater_or_nan(u, one, g_y * slope * steepness, g_y)
    return g_u, over * (inverse + inverse - one), over * slope * past


def _example() -> list[Example]:
    rest = 1e-5 ** (0.5 ** torch.arange(1, 6, dtype=torch.float64))
    m = (1 - rest**2) * 10 - 1
    loops = torch.stack((0.02 * torch.rand(5, dtype=torch.float64), m, -2 / m), 1).flatten()
    fixed = torch.stack((rest[0] ** 2, rest[-1], 100 / (1 - rest[-1])))
    coef = torch.cat((fixed, loops)).repeat(5, 1)
    x = torch.randn(5, 300, dtype=torch.float64).square()
    return [Example(argument, coef, rest.repeat(5, 1), x) for argument in (10, 11)]


#: Argument: 2 loops, and 1 more where overshoot is limited.
ADAPTATION = ChainOperation(
    name="adaptation",
    coefficients=lambda argument: 3 + 3 * (argument // 2),
    states=lambda argument: argument // 2,
    reference=reference,
    block=block,
    adjoint=adjoint,
    taped=lambda argument: 2 * (argument // 2),
    example=_example,
)
