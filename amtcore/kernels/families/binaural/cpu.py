"""Binaural inhibition, LANES frames at a time; equations in `reference`."""

from __future__ import annotations

import math
from typing import Any

from amtcore.kernels.families.binaural.reference import LARGEST_RATIO, TINY
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    narrow_lanes,
    vload,
    vload_narrow,
    vsplat,
    vstore,
    where_greater,
)
from amtcore.kernels.vector.transpose import store_samples, transpose

#: Channels whose smoothed loudness is made side by side.
SIDE = 4


@part
def smooth(left: Any, right: Any, channels: int, weights: Any, at: int, made: Any) -> None:
    """SIDE channels of both ears, smoothed: rows of LANES frames, those of the left ear first."""
    begin = at
    for lane in range(0, LANES, narrow_lanes()):
        at, start = begin, vsplat(vload_narrow(left, 0), TINY)
        a, b, c, d = start, start, start, start
        s, t, u, v = start, start, start, start
        for channel in range(channels):
            one, other = (
                vload_narrow(left, channel * LANES + lane),
                vload_narrow(right, channel * LANES + lane),
            )
            first, second = vsplat(start, weights[at]), vsplat(start, weights[at + 1])
            third, fourth = vsplat(start, weights[at + 2]), vsplat(start, weights[at + 3])
            a, s = fma(one, first, a), fma(other, first, s)
            b, t = fma(one, second, b), fma(other, second, t)
            c, u = fma(one, third, c), fma(other, third, u)
            d, v = fma(one, fourth, d), fma(other, fourth, v)
            at += SIDE
        vstore(made, lane, a)
        vstore(made, lane + LANES, b)
        vstore(made, lane + 2 * LANES, c)
        vstore(made, lane + 3 * LANES, d)
        vstore(made, lane + 4 * LANES, s)
        vstore(made, lane + 5 * LANES, t)
        vstore(made, lane + 6 * LANES, u)
        vstore(made, lane + 7 * LANES, v)


@part
def inhibited(loudness: Any, own: Any, other: Any, p: float) -> Any:
    """Loudness over its divisor: sech^p = exp(p log(2 exp(-r) / (1 + exp(-2 r))))."""
    one, ratio, most = vsplat(loudness, 1.0), other / own, vsplat(loudness, LARGEST_RATIO)
    ratio = where_greater(ratio, most, most, ratio)
    log = vsplat(loudness, math.log(2.0)) - ratio - vlog(one + vexp(ratio * vsplat(ratio, -2.0)))
    half = loudness * vsplat(loudness, 0.5)
    return fma(half, vexp(log * vsplat(log, p)), half)


@part
def _load_rows(source: Any, pitch: int, channels: int, frames: int, begin: int, out: Any) -> None:
    """Flat rows of `pitch` channels -> rows of LANES frames; beyond the last frame it is
    repeated."""
    transpose(source, begin * pitch, pitch, frames - begin, channels, out, LANES, LANES)


@kernel
def run_inhibition(
    left: Any, right: Any, pitch: int, channels: int, frames: int, begin: int, end: int,
    weights: Any, p: Any, of_left: Any, of_right: Any,
) -> None:  # fmt: skip
    """Both ears, for some frames, LANES at a time -> flat (frame, channel) of each.

    Args:
        left: Flat rows of `pitch` numbers, the first of them channels; as right.
        frames: That the ears have; results have room for whole vectors of frames.
        weights: Flat (part of SIDE channels, channel, SIDE).
        p: (1,).
    """
    size = (channels + SIDE) * LANES
    one, other, made = aligned(size, left), aligned(size, left), aligned(2 * SIDE * LANES, left)
    out_one, out_other = aligned(size, left), aligned(size, left)
    for first in range(begin, end, LANES):
        _load_rows(left, pitch, channels, frames, first, one)
        _load_rows(right, pitch, channels, frames, first, other)
        for k in range(0, channels, SIDE):
            smooth(one, other, channels, weights, k * channels, made)
            for i in range(min(SIDE, channels - k)):
                at = (k + i) * LANES
                own, against = vload(made, i * LANES), vload(made, (SIDE + i) * LANES)
                vstore(out_one, at, inhibited(vload(one, at), own, against, p[0]))
                vstore(out_other, at, inhibited(vload(other, at), against, own, p[0]))
        store_samples(out_one, channels, of_left, first)
        store_samples(out_other, channels, of_right, first)
