"""Rates of nerve fibres by the level of a pressure p.

    rate = spont + driven fine / (1 + exp(-(gain ln p + bias))).

With a quadrature signal y of the low-passed signal x, p is the envelope and fine is x / p. Without,
p is max(x, 0) and fine is 1. A pressure that counts as none has the rate `spont`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.torch_state import can_compute
from amtcore.kernels.vector.arrays import empty
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, copy_row, transpose
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    narrow_lanes,
    vload_narrow,
    vmax,
    vsplat,
    vsqrt,
    vstore,
    where_greater_or_nan,
)
from amtcore.kernels.vector.threads import parallel_for

#: Pressure in Pa that counts as none (-506 dB SPL), and argument of the sigmoid below which it is 0
#: (1e-35). Smaller numbers are denormal, and some threads round them to 0.
FAINTEST_PA, LEAST_ARGUMENT = 1e-30, -80.0
#: Frames that are computed before they are transposed, and frames of a work item.
_TILE, _ITEM = 128, 8192


def pressure(x: Tensor, y: Tensor | None) -> Tensor:
    """Return the pressure p of x and its quadrature signal; the root has no slope at 0."""
    if y is None:
        return x.clamp(min=0.0)
    power = y.square() + x.square()
    return torch.where(power > 0, power, 1.0).sqrt() * (power > 0)


def _reference(x: Tensor, y: Tensor | None, law: Tensor, exponents: Tensor) -> Tensor:
    p = pressure(x, y)
    heard = p > FAINTEST_PA
    level = torch.where(heard, p, 1.0)
    fine = heard.to(x.dtype) if y is None else x / level * heard
    log_p = (level.log() * exponents.unsqueeze(-1)).unsqueeze(1)
    spont, driven, gain, bias = law[:, :, None, None]
    argument = torch.addcmul(bias, log_p, gain)
    share = torch.sigmoid(argument) * (argument > LEAST_ARGUMENT) * driven
    return torch.addcmul(spont, share, fine.unsqueeze(1)).flatten(1, 2).mT


@part
def _tile(
    x: Any, y: Any, begin: int, frames: int, law: Any, exponents: Any, own: Any, room: Any
) -> None:
    """Write rates of frames from `begin` on to flat (kind cf, _TILE); `own` is scratch."""
    count, both = x.shape[0], y.shape[1] > 0
    zero = vsplat(vload_narrow(room, 0), 0.0)
    one, faintest = vsplat(zero, 1.0), vsplat(zero, FAINTEST_PA)
    least = vsplat(zero, LEAST_ARGUMENT)
    for c in range(count):
        copy_row(x[c], begin, own, 0, frames)
        if both:
            copy_row(y[c], begin, own, _TILE, frames)
        for f in range(0, frames, narrow_lanes()):
            a = vload_narrow(own, f)
            if both:
                b = vload_narrow(own, _TILE + f)
                p = vsqrt(fma(b, b, a * a))
            else:
                p, a = vmax(a, zero), one
            level = where_greater_or_nan(p, faintest, p, one)
            fine = where_greater_or_nan(p, faintest, a / level if both else a, zero)
            log_p = vlog(level) * vsplat(zero, exponents[c])
            for k in range(law.shape[1]):
                argument = fma(log_p, vsplat(zero, law[2, k]), vsplat(zero, law[3, k]))
                share = vsplat(zero, law[1, k]) / (one + vexp(zero - argument))
                share = where_greater_or_nan(argument, least, share, zero)
                rate = fma(share, fine, vsplat(zero, law[0, k]))
                vstore(room, (k * count + c) * _TILE + f, rate)


@kernel
def run_rates(x: Any, y: Any, begin: int, end: int, law: Any, exponents: Any, out: Any) -> None:
    """Write rates of frames begin..end-1.

    Shapes: x and y (cf, frame), y without frames if there is none, law (4, kind), out flat
    (frame, kind cf).
    """
    columns = law.shape[1] * x.shape[0]
    width = columns + -columns % LANES
    room, turned = aligned(width * _TILE, x), aligned(_TILE * width, x)
    own = aligned(2 * _TILE, x)
    own[:] = 0.0
    for first in range(begin, end, _TILE):
        frames = min(_TILE, end - first)
        _tile(x, y, first, frames, law, exponents, own, room)
        transpose(room, 0, _TILE, columns, frames, turned, width, width)
        for f in range(frames):
            copy_row(turned, f * width, out, (first + f) * columns, columns)


def fibre_rates(x: Tensor, y: Tensor | None, law: Tensor, exponents: Tensor) -> Tensor:
    """Return rates (row, frame, kind cf) in spikes/s.

    Args:
        x: Low-passed signals (row, cf, frame) in Pa.
        y: Their quadrature signals, or None.
        law: spont, driven, gain and bias, (4, kind).
        exponents: (cf,), exponents of the pressure before the level.
    """
    if not can_compute(x, law, exponents):
        return _reference(x, y, law, exponents)
    rows, _, frames = x.shape
    out = empty((rows, frames, law.shape[1] * x.shape[1]), x)
    own, other = x.contiguous().numpy(), (x[..., :0] if y is None else y).contiguous().numpy()
    made, tables = out.flatten(1).numpy(), (law.numpy(), exponents.numpy())
    parts = -(-frames // _ITEM)

    def one(item: int) -> None:
        row, begin = item // parts, item % parts * _ITEM
        run_rates(own[row], other[row], begin, min(begin + _ITEM, frames), *tables, made[row])

    parallel_for(one, rows * parts)
    return out
