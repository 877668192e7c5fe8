"""Binaural inhibition (Moore, Glasberg and Schlittenlacher 2016), see `stages.loudness`.

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
from amtcore.kernels.vector.arrays import over_frames
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, store_samples, transpose
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    four_sums,
    vload,
    vsplat,
    vstore,
    where_greater,
)

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
def inhibited(loudness: Any, own: Any, other: Any, p: float) -> Any:
    """Divide loudness by its divisor: sech^p = exp(p log(2 exp(-r) / (1 + exp(-2 r))))."""
    one, ratio, most = vsplat(loudness, 1.0), other / own, vsplat(loudness, LARGEST_RATIO)
    ratio = where_greater(ratio, most, most, ratio)
    log = vsplat(loudness, math.log(2.0)) - ratio - vlog(one + vexp(ratio * vsplat(ratio, -2.0)))
    half = loudness * vsplat(loudness, 0.5)
    return fma(half, vexp(log * vsplat(log, p)), half)


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
        # Rows of LANES frames; the last frame is repeated.
        at, rest = first * pitch, frames - first
        transpose(left, at, pitch, rest, channels, one, LANES, LANES)
        transpose(right, at, pitch, rest, channels, other, LANES, LANES)
        for k in range(0, channels, SIDE):
            at = k * channels
            four_sums(one, 0, LANES, channels, weights, at, SIDE, 1, TINY, made, 0, LANES)
            four_sums(
                other, 0, LANES, channels, weights, at, SIDE, 1, TINY, made, SIDE * LANES, LANES
            )
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
    """Run the operation on rows that begin with the channels of the left ear, then of the right.

    `sides` are weights from `sides_of`.
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


#: (.., frame, channel) of both ears, weights (channel, channel) and the exponent.
INHIBITION = RowOperation(
    name="inhibition",
    run=_cpu,
    on_gpu=False,
    fake=lambda *args: tuple(ear.new_empty(ear.shape) for ear in args[:2]),
)
