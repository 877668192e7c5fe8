"""Binaural inhibition (Moore, Glasberg and Schlittenlacher 2016), see `stages.binaural_loudness`.

The kernel computes float32 on the CPU without gradients. The plain form has gradients and runs
everywhere else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.frames import over_frames
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

Array = NDArray[Any]

#: Added to the smoothed loudness, so that silence divides by something.
TINY = 1e-13
#: Ratio of the ears beyond which nothing changes: sech(40) is 1e-17.
LARGEST_RATIO = 40.0


def divisor(own: Tensor, other: Tensor, p: Tensor) -> Tensor:
    """Return the divisor of an ear's loudness.

    `own` and `other` are the smoothed loudness at this ear and at the other ear; p is the exponent.
    """
    ratio = (other / own).clamp(max=LARGEST_RATIO)
    sech = 2.0 * torch.exp(-ratio) / (1.0 + torch.exp(-2.0 * ratio))
    return 2.0 / (1.0 + sech**p)


#: Channels that are smoothed side by side.
SIDE = 4


@part
def smooth(left: Any, right: Any, channels: int, weights: Any, at: int, made: Any) -> None:
    """Smooth SIDE channels of both ears: rows of LANES frames, first the left ear's rows."""
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
    """Divide loudness by its divisor: sech^p = exp(p log(2 exp(-r) / (1 + exp(-2 r))))."""
    one, ratio, most = vsplat(loudness, 1.0), other / own, vsplat(loudness, LARGEST_RATIO)
    ratio = where_greater(ratio, most, most, ratio)
    log = vsplat(loudness, math.log(2.0)) - ratio - vlog(one + vexp(ratio * vsplat(ratio, -2.0)))
    half = loudness * vsplat(loudness, 0.5)
    return fma(half, vexp(log * vsplat(log, p)), half)


@part
def _load_rows(source: Any, pitch: int, channels: int, frames: int, begin: int, out: Any) -> None:
    """Load flat rows of `pitch` channels as rows of LANES frames; repeat the last frame."""
    transpose(source, begin * pitch, pitch, frames - begin, channels, out, LANES, LANES)


@kernel
def _run_inhibition(
    left: Any, right: Any, pitch: int, channels: int, frames: int, begin: int, end: int,
    weights: Any, p: Any, of_left: Any, of_right: Any,
) -> None:  # fmt: skip
    """Inhibit frames begin..end of both ears, LANES at a time, to flat (frame, channel).

    `left` and `right` are flat rows of `pitch` numbers that begin with the channels. Results have
    room for whole vectors of frames. `weights` is flat (part of SIDE channels, channel, SIDE).
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


def sides_of(smoothing: Tensor) -> Array:
    """Convert weights (channel, channel) to the layout of the kernel."""
    weights = torch.nn.functional.pad(smoothing.detach(), (0, -len(smoothing) % SIDE))
    flat: Array = weights.unflatten(1, (-1, SIDE)).transpose(0, 1).contiguous().numpy().ravel()
    return flat


def _cpu(
    device: Device, left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    sides, channels, frames = sides_of(smoothing), left.shape[-1], left[..., 0].numel()
    ears = [ear.detach().contiguous().numpy().ravel() for ear in (left, right)]
    made = _run(ears, channels, channels, frames, sides, p)
    return made[0].view(left.shape), made[1].view(right.shape)


def inhibition_of_rows(
    rows: Tensor, channels: int, sides: Array, p: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the operation on rows that hold the left ear's channels, then the right ear's.

    Args:
        rows: (frame, 2 channels or more).
        channels: Channels of an ear.
        sides: Weights from `sides_of`.
        p: Exponent.
    """
    flat = rows.numpy().reshape(-1)
    return _run([flat, flat[channels:]], rows.shape[1], channels, len(rows), sides, p)


def _run(
    ears: list[Array], pitch: int, channels: int, frames: int, sides: Array, p: Tensor
) -> tuple[Tensor, Tensor]:
    padded, exponent = frames + -frames % LANES, p.detach().reshape(1).numpy()
    made = [np.empty((padded, channels), np.float32) for _ in ears]
    flat_made = [ear.reshape(-1) for ear in made]

    def one(begin: int, end: int) -> None:
        _run_inhibition(*ears, pitch, channels, frames, begin, end, sides, exponent, *flat_made)

    over_frames(one, frames)
    of_left, of_right = (torch.from_numpy(ear[:frames]) for ear in made)
    return of_left, of_right


def _fake(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape)


#: (.., frame, channel) of both ears, weights (channel, channel) and the exponent.
INHIBITION = RowOperation(name="inhibition", cpu=_cpu, fake=_fake)
