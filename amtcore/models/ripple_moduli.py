"""Moduli of responses to ripples: inverse transforms along the channels, LANES frames at a time.

A response X is 0 at negative frequencies and from 2 POINTS on, and the first 2 POINTS channels are
wanted. So four transforms of POINTS are enough. A turn e[n] is exp(2 pi i / n). Indices r and s are
0 or 1.

    x[2 m + r] = sum over s of e[2 POINTS]^(s m) Z_rs[m].
    Z_rs[m] = sum over j of X[2 j + s] e[4 POINTS]^(r (2 j + s)) e[POINTS]^(j m).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.vector.arrays import empty
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    narrow_lanes,
    vload_narrow,
    vsplat,
    vsqrt,
    vstore,
)
from amtcore.kernels.vector.threads import parallel_for

#: Points of a transform, a power of 4, and the length that four of them make.
POINTS = 64
LENGTH = 4 * POINTS
_ANGLES = 2 * np.pi * np.arange(LENGTH) / LENGTH
#: Cosines and sines of a full turn in LENGTH steps, (step, 2).
_TURNS = np.stack((np.cos(_ANGLES), np.sin(_ANGLES)), -1).astype(np.float32)


@part
def _turned(re: Any, im: Any, turns: Any, step: int) -> Any:
    """Return a complex number times a turn by `step`."""
    c, s = vsplat(re, turns[step, 0]), vsplat(re, turns[step, 1])
    minus = vsplat(re, 0.0) - s
    return fma(c, re, minus * im), fma(s, re, c * im)


@part
def _transform(x: Any, y: Any, turns: Any) -> Any:
    """Transform POINTS complex numbers of all lanes by Stockham's method, radix 4.

    Rows are real and imaginary part. The result lies in `x` or `y`, which it returns.
    """
    width = narrow_lanes()
    row, points, stride = 2 * width, POINTS, 1
    while points > 1:
        apart = stride * points // 4 * row
        for p in range(points // 4):
            for q in range(stride):
                i, to = (q + stride * p) * row, (q + 4 * stride * p) * row
                a_re, a_im = vload_narrow(x, i), vload_narrow(x, i + width)
                c_re, c_im = vload_narrow(x, i + 2 * apart), vload_narrow(x, i + 2 * apart + width)
                even_re, even_im = a_re + c_re, a_im + c_im
                odd_re, odd_im = a_re - c_re, a_im - c_im
                i += apart
                b_re, b_im = vload_narrow(x, i), vload_narrow(x, i + width)
                d_re, d_im = vload_narrow(x, i + 2 * apart), vload_narrow(x, i + 2 * apart + width)
                sum_re, sum_im = b_re + d_re, b_im + d_im
                # j (b - d)
                turn_re, turn_im = d_im - b_im, b_re - d_re
                vstore(y, to, even_re + sum_re)
                vstore(y, to + width, even_im + sum_im)
                for k in range(1, 4):
                    re, im = even_re - sum_re, even_im - sum_im
                    if k == 1:
                        re, im = odd_re + turn_re, odd_im + turn_im
                    elif k == 3:
                        re, im = odd_re - turn_re, odd_im - turn_im
                    if p:
                        re, im = _turned(re, im, turns, 4 * k * p * stride)
                    vstore(y, to + k * stride * row, re)
                    vstore(y, to + k * stride * row + width, im)
        x, y = y, x
        points //= 4
        stride *= 4
    return x


@part
def _half(x: Any, t: int, gains: Any, r: int, s: int, turns: Any, room: Any) -> Any:
    """Return Z_rs of the lanes from frame `t` on; `room` has two blocks of POINTS rows."""
    width = narrow_lanes()
    row = 2 * width
    for j in range(POINTS):
        o, at = 2 * j + s, j * row
        re, im = vload_narrow(x[o, 0], t), vload_narrow(x[o, 1], t)
        gain = vsplat(re, gains[o])
        re, im = re * gain, im * gain
        if r:
            re, im = _turned(re, im, turns, o)
        vstore(room, at, re)
        vstore(room, at + width, im)
    size = POINTS * row
    return _transform(room[:size], room[size : 2 * size], turns)


@kernel
def run_moduli(x: Any, gains: Any, turns: Any, out: Any) -> None:
    """Write moduli of frames, whole vectors of LANES.

    Shapes: x (o, 2, frame) of real and imaginary parts, gains (scale, o), out (scale, channel,
    frame).
    """
    width = narrow_lanes()
    row, scales, channels = 2 * width, out.shape[0], out.shape[1]
    room = aligned(2 * POINTS * row, gains), aligned(2 * POINTS * row, gains)
    for t in range(0, x.shape[2], width):
        for k in range(scales):
            for r in range(2):
                a = _half(x, t, gains[k], r, 0, turns, room[0])
                b = _half(x, t, gains[k], r, 1, turns, room[1])
                for m in range((channels - r + 1) // 2):
                    b_re, b_im = vload_narrow(b, m * row), vload_narrow(b, m * row + width)
                    b_re, b_im = _turned(b_re, b_im, turns, 2 * m)
                    re = vload_narrow(a, m * row) + b_re
                    im = vload_narrow(a, m * row + width) + b_im
                    vstore(out[k, 2 * m + r], t, vsqrt(fma(re, re, im * im)))


def ripple_moduli(responses: Tensor, gains: Tensor, channels: int) -> Tensor:
    """Return the moduli (row, scale, channel, frame) of inverse transforms of LENGTH.

    Args:
        responses: (row, LENGTH / 2, frame), complex64.
        gains: (scale, o), float32.
        channels: At most LENGTH / 2.
    """
    rows, count, frames = responses.shape
    padded = frames + -frames % LANES
    x = responses.real.new_zeros(rows, count, 2, padded)
    x[..., :frames] = torch.view_as_real(responses).movedim(-1, -2)
    out = empty((rows, len(gains), channels, padded), x)
    own, made, tables = x.numpy(), out.numpy(), (gains.numpy(), _TURNS)
    parallel_for(lambda row: run_moduli(own[row], *tables, made[row]), rows)
    return out[..., :frames]
