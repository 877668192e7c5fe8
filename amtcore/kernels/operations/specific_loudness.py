"""Components to nodes, and excitation to specific loudness.

For the model see `amtcore.stages.excitation` and `amtcore.stages.loudness`.

The kernels take LANES frames or channels at a time, which do not affect each other. They compute
float32 on the CPU without gradients. The plain form has gradients and runs everywhere else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.vector.arrays import ITEM_FRAMES, new_rows, over_frames
from amtcore.kernels.vector.arrays import rows_of as frame_rows_of
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.simd import (
    LANES,
    any_at_least,
    fma,
    vload,
    vmin,
    vsplat,
    vsqrt,
    vstore,
    where_greater,
    where_greater_or_nan,
)
from amtcore.kernels.vector.threads import parallel_for

#: Excitation where the law for very high levels begins.
HIGH_EXCITATION = 1e10
PER_DB = math.log(10.0) / 10.0


def audible(intensity: Tensor, least: Tensor) -> Tensor:
    """Components that lie above the least of their frame; the others are 0."""
    return intensity * (intensity.detach() > least)


def law_rows(c: Tensor, threshold_db: Tensor, alpha: Tensor, a: Tensor, flat_db: float) -> Tensor:
    """Return rows by channel: gain / A, alpha, C A^alpha, excitation at threshold, log C.

    C is the scale in sone per Cam, and `flat_db` the threshold at 500 Hz and above. The threshold,
    alpha and A are (channel,).
    """
    ratio = torch.exp(PER_DB * (flat_db - threshold_db)) / a
    threshold = torch.exp(PER_DB * threshold_db)
    return torch.stack((ratio, alpha, c * a**alpha, threshold, torch.log(c).expand_as(a)))


def reference(level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float) -> Tensor:
    """Convert excitation in dB SPL, (.., channel), to sone per Cam.

    `rows` are from `law_rows`; divisor and exponent belong to the law at very high levels.
    """
    ratio, alpha, scale, threshold, log_c = rows
    log_e = PER_DB * level_db
    e = torch.exp(log_e)
    # A^alpha ((1 + G E / A)^alpha - 1), without the cancellation of the published form.
    loudness = scale * torch.expm1(alpha * torch.log1p(ratio * e))
    faint = (2.0 * e / (e + threshold)).clamp(max=1.0) ** 1.5
    # log E is the input: no overflow, whatever the level.
    high = torch.exp(high_exponent * (log_e - math.log(high_divisor)) + log_c)
    return torch.where(e >= HIGH_EXCITATION, high, loudness * faint)


#: Nodes of a group of more components than that. Loudness changes by 1e-6 (traces of speech, noise
#: and tones; 1.2e-5 for a tone at 9 kHz near threshold), a tenth of that with four.
NODES = 3
#: Rows of a law's constants, see `specific`.
_RATIO, _ALPHA, _SCALE, _THRESHOLD, _LOG_C = range(5)
#: exp(y) - 1 = y (1 + y (c[0] + c[1] y + ..)) below this y, by its Taylor series: 2e-9.
_SMALL = 0.5
_EXPM1 = tuple(float(1.0 / np.prod(np.arange(1.0, n + 1.0))) for n in range(2, 10))


@part
def _above(intensity: Any, at: int, least: Any) -> Any:
    """Return the intensities of one component above the limit, else 0; NaN stays NaN."""
    value = vload(intensity, at)
    return where_greater_or_nan(value, least, value, vsplat(value, 0.0))


@part
def nodes(
    intensity: Any, pitch: int, begin: int, least: Any, starts: Any, weights: Any, out: Any,
    out_pitch: int,
) -> None:  # fmt: skip
    """Compute nodes of LANES frames from `begin` on, between flat rows of all frames."""
    limit, place = vload(least, begin), begin
    for group in range(len(starts) - 1):
        first, last = starts[group], starts[group + 1]
        if last - first <= NODES:
            for i in range(first, last):
                vstore(out, place, _above(intensity, i * pitch + begin, limit))
                place += out_pitch
            continue
        zero = vsplat(limit, 0.0)
        a, b, c = zero, zero, zero
        for i in range(first, last):
            value = _above(intensity, i * pitch + begin, limit)
            a = fma(value, vsplat(value, weights[NODES * i]), a)
            b = fma(value, vsplat(value, weights[NODES * i + 1]), b)
            c = fma(value, vsplat(value, weights[NODES * i + 2]), c)
        vstore(out, place, a)
        vstore(out, place + out_pitch, b)
        vstore(out, place + 2 * out_pitch, c)
        place += NODES * out_pitch


@part
def _log1p(value: Any) -> Any:
    """Return log(1 + value) for values from 0 on; a ratio corrects the rounding of the sum."""
    one = vsplat(value, 1.0)
    total = one + value
    left = total - one
    return where_greater(left, vsplat(value, 0.0), vlog(total) * (value / left), value)


@part
def _expm1(value: Any) -> Any:
    """exp(value) - 1 for values from 0 on."""
    one = vsplat(value, 1.0)
    series = vsplat(value, _EXPM1[-1])
    for k in range(2, 9):
        series = fma(series, value, vsplat(value, _EXPM1[-k]))
    series = value * fma(series, value, one)
    return where_greater_or_nan(value, vsplat(value, _SMALL), vexp(value) - one, series)


@part
def _specific(level_db: Any, law: Any, channels: int, at: int, high: Any) -> Any:
    """Return specific loudness of LANES channels from `at` on.

    The law is the flat rows of `law_rows`. For very high levels, `high` has the log of the divisor,
    and the exponent.
    """
    log_e = level_db * vsplat(level_db, PER_DB)
    e = vexp(log_e)
    ratio, alpha = vload(law, _RATIO * channels + at), vload(law, _ALPHA * channels + at)
    loudness = vload(law, _SCALE * channels + at) * _expm1(alpha * _log1p(ratio * e))
    share = (e + e) / (e + vload(law, _THRESHOLD * channels + at))
    share = vmin(share, vsplat(e, 1.0))
    loudness = loudness * (share * vsqrt(share))
    most = vsplat(e, HIGH_EXCITATION)
    if any_at_least(e, most):
        loud = (log_e - vsplat(e, high[0])) * vsplat(e, high[1])
        loudness = where_greater(most, e, loudness, vexp(loud + vload(law, _LOG_C * channels + at)))
    return loudness


@kernel
def _run_nodes(
    intensity: Any, pitch: int, begin: int, end: int, least: Any, starts: Any, weights: Any,
    out: Any, out_pitch: int,
) -> None:  # fmt: skip
    """Compute nodes of frames begin..end: flat (component, frame) -> flat (node, frame)."""
    for first in range(begin, end, LANES):
        nodes(intensity, pitch, first, least, starts, weights, out, out_pitch)


@part
def store_law(
    levels: Any, channels: int, frames: int, law: Any, high: Any, out: Any, to: int, pitch: int
) -> None:
    """Store specific loudness of flat (frame, channel) in dB, in rows of `pitch` numbers.

    There are LANES channels or more.
    """
    for frame in range(frames):
        for at in range(0, channels, LANES):
            # The last vector of a row begins earlier, to end with the row.
            place = min(at, channels - LANES)
            level = vload(levels, frame * channels + place)
            vstore(out, to + frame * pitch + place, _specific(level, law, channels, place, high))


@kernel
def _run_law(level_db: Any, channels: int, law: Any, high: Any, out: Any) -> None:
    """Apply the law to flat (frame, channel)."""
    frames = len(level_db) // channels
    store_law(level_db, channels, frames, law, high, out, 0, channels)


def _cpu_nodes(
    device: Device, intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int
) -> Tensor:
    """Replace components (.., component) above the least (.., 1) of their frame by nodes.

    Group g has the components from starts[g] to starts[g + 1]. The weights (component, NODES) are
    for groups of more components than NODES. The kernel is fastest if the frames of a component lie
    together. The frames of each of the `count` nodes do.
    """
    leading = intensity.shape[:-1]
    least = least.detach().expand(*leading, 1).flatten()
    intensity = intensity.detach().flatten(0, -2)
    frames = len(intensity)
    rows, pitch = frame_rows_of(intensity)
    limits = torch.nn.functional.pad(least, (0, -frames % LANES)).contiguous().numpy()
    groups, of_groups = starts.numpy(), weights.numpy().ravel()
    out, out_pitch, made = new_rows(count, frames)

    def one(begin: int, end: int) -> None:
        _run_nodes(rows, pitch, begin, end, limits, groups, of_groups, out, out_pitch)

    over_frames(one, frames)
    return made.unflatten(0, leading)


def _cpu_law(
    device: Device, level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float
) -> Tensor:
    level_db, rows = level_db.detach(), rows.detach()
    channels = level_db.shape[-1]
    missing = max(LANES - channels, 0)
    levels = torch.nn.functional.pad(level_db, (0, missing)).contiguous().numpy()
    law = torch.nn.functional.pad(rows, (0, missing), value=1.0).contiguous().numpy().ravel()
    out, high = np.empty_like(levels), np.array([math.log(high_divisor), high_exponent])
    flat, made, size = levels.reshape(-1), out.reshape(-1), ITEM_FRAMES * (channels + missing)

    def one(item: int) -> None:
        part = slice(item * size, (item + 1) * size)
        _run_law(flat[part], channels + missing, law, high, made[part])

    parallel_for(one, -(-len(flat) // size))
    return torch.from_numpy(out)[..., :channels].contiguous()


#: Components above the least of their frame, at the nodes of their groups; see `_cpu_nodes`.
NODES_OF_AUDIBLE = RowOperation(
    name="loudness_nodes",
    run=_cpu_nodes,
    on_gpu=False,
    fake=lambda x, least, starts, weights, count: x.new_empty(*x.shape[:-1], count),
)
#: Excitation to specific loudness; see `reference`.
SPECIFIC_LOUDNESS = RowOperation(
    name="specific_loudness",
    run=_cpu_law,
    on_gpu=False,
    fake=lambda level_db, *_: level_db.new_empty(level_db.shape),
    reference=reference,
    numbers_only=True,
)
