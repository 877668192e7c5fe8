"""Components to nodes, and excitation to specific loudness.

For the model see `amtcore.stages.component_nodes` and `amtcore.stages.specific_loudness`.

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
from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.frames import ITEM_FRAMES, new_rows, over_frames
from amtcore.kernels.vector.frames import rows_of as frame_rows_of
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
    """Constants of the compressive law by channel, (5, channel).

    Args:
        c: Scale in sone per Cam, a number.
        threshold_db: Excitation at threshold, (channel,); alpha and a likewise.
        flat_db: The threshold at 500 Hz and above.
    Returns:
        Gain / A, alpha, C A^alpha, excitation at threshold, log C.
    """
    ratio = torch.exp(PER_DB * (flat_db - threshold_db)) / a
    threshold = torch.exp(PER_DB * threshold_db)
    return torch.stack((ratio, alpha, c * a**alpha, threshold, torch.log(c).expand_as(a)))


def reference(level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float) -> Tensor:
    """Excitation in dB SPL to sone per Cam.

    Args:
        level_db: (.., channel).
        rows: Of `law_rows`.
        high_divisor: Of the law at very high levels, as its exponent.
    Returns:
        The same shape as `level_db`.
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
    series = fma(series, value, vsplat(value, _EXPM1[-2]))
    series = fma(series, value, vsplat(value, _EXPM1[-3]))
    series = fma(series, value, vsplat(value, _EXPM1[-4]))
    series = fma(series, value, vsplat(value, _EXPM1[-5]))
    series = fma(series, value, vsplat(value, _EXPM1[-6]))
    series = fma(series, value, vsplat(value, _EXPM1[-7]))
    series = fma(series, value, vsplat(value, _EXPM1[-8]))
    series = value * fma(series, value, one)
    return where_greater_or_nan(value, vsplat(value, _SMALL), vexp(value) - one, series)


@part
def specific(level_db: Any, law: Any, channels: int, at: int, high: Any) -> Any:
    """Return specific loudness of LANES channels from `at` on.

    Args:
        level_db: Excitations, a vector.
        law: Flat rows of `channels` numbers, see `law_rows`.
        high: Log of the divisor, and exponent, of the law at very high levels.
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


@kernel
def _run_law(level_db: Any, channels: int, law: Any, high: Any, out: Any) -> None:
    """Apply the law to flat (frame, channel) of LANES channels or more."""
    for row in range(0, len(level_db), channels):
        for at in range(0, channels, LANES):
            # The last vector of a row begins earlier, to end with the row.
            place = min(at, channels - LANES)
            level = vload(level_db, row + place)
            vstore(out, row + place, specific(level, law, channels, place, high))


def _cpu_nodes(
    device: Device, intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int
) -> Tensor:
    """Replace components above the least of their frame by the nodes of their groups.

    Args:
        intensity: (.., component); fastest if a component's frames lie together.
        least: (.., 1).
        starts: First component of every group, and the end of the last group; int64.
        weights: (component, NODES), used for groups of more components than NODES.
        count: Nodes of all groups.
    Returns:
        (.., node); a node's frames lie together.
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


def _fake_nodes(
    intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int
) -> Tensor:
    return intensity.new_empty(*intensity.shape[:-1], count)


def _fake_law(level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float) -> Tensor:
    return level_db.new_empty(level_db.shape)


#: Components above the least of their frame, at the nodes of their groups; see `_cpu_nodes`.
NODES_OF_AUDIBLE = RowOperation(name="loudness_nodes", cpu=_cpu_nodes, fake=_fake_nodes)
#: Excitation to specific loudness; see `reference`.
SPECIFIC_LOUDNESS = RowOperation(
    name="specific_loudness", cpu=_cpu_law, fake=_fake_law, reference=reference, numbers_only=True
)
