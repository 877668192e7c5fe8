"""Levels per ERB and excitation patterns (Glasberg and Moore 1990).

    level of place t    10 log10 sum over j of I[j] W[j, t]
    channel k           10 log10 (sum over j of I[j] U[j, k]
                                  + sum over j with d[k, j] > 0 of I[j] (1 + x) exp(-x))
                        x = s[j] d[k, j],   s[j] = max(a X[j] + b, 0)

U are the weights of what lies at or above a channel's centre, d distances below it times the slope
there, and X levels of `W`: of each source, or linear between two.

The kernel takes LANES frames at a time. Sources (components, or nodes that stand for components)
are summed in groups of GROUP, from near to far. A group that cannot change a frame's sum is left
out. Its bound is the sum of its magnitudes times its largest weight; the limit is its share of
`NOTHING` times the sum so far. Each frame is tested separately, so frames do not affect each other.

The kernel computes float32 on the CPU without gradients. The plain form has gradients and runs
everywhere else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.vector.arrays import new_rows, over_frames
from amtcore.kernels.vector.arrays import rows_of as frame_rows_of
from amtcore.kernels.vector.elementary import LOG2_E, vdecay, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, store_samples
from amtcore.kernels.vector.simd import (
    LANES,
    any_greater,
    fma,
    narrow_lanes,
    vabs,
    vload,
    vload_narrow,
    vsplat,
    vstore,
    where_greater,
)

Array = NDArray[Any]

#: Floor of intensities: -100 dB.
LEAST = 1e-10
DB_PER_E = 10.0 / math.log(10.0)


class Tables(NamedTuple):
    """Constants of the filters.

    Args:
        away: d, (channel, source), ascending in channels and descending in sources.
        line: a and b, (2,).
        before: (source,), index of the level below each source; empty if each source has a level.
        share: (source,), weight of the level above it, for linear interpolation.
        upper: U, (source, channel).
        blocks: `upper` in the layout of `blocks_of`.
    """

    away: Tensor
    line: Tensor
    before: Tensor
    share: Tensor
    upper: Tensor
    blocks: Tensor


def _decibels(intensity: Tensor) -> Tensor:
    return DB_PER_E * torch.log(intensity.clamp(min=LEAST))


def plain_levels(intensity: Tensor, weights: Tensor) -> Tensor:
    """Return levels in dB: (frame, source) and (source, place) -> (frame, place)."""
    return _decibels(intensity @ weights)


def plain_pattern(intensity: Tensor, levels_db: Tensor, tables: Tables) -> Tensor:
    """Return excitation in dB, (frame, channel).

    `intensity` is (frame, source), `levels_db` (frame, source) or (frame, level).
    """
    level = levels_db
    if len(tables.before):
        low, high = (levels_db[:, tables.before + i] for i in (0, 1))
        level = torch.lerp(low, high, tables.share)
    slope = (level * tables.line[0] + tables.line[1]).clamp(min=0.0)
    x = slope[:, None] * tables.away.clamp(min=0.0)
    weight = torch.where(tables.away > 0, (1.0 + x) * torch.exp(-x), 0.0)
    below = (intensity[:, None] * weight).sum(-1)
    return _decibels(below + intensity @ tables.upper)


#: Sources that are kept or left out together, and sums that are computed side by side.
GROUP, SUMS = 8, 4
#: Largest share in a sum of all groups that are left out: half of its last digit.
NOTHING = 2.0**-25


@part
def _smaller(left: Any, right: Any) -> Any:
    return where_greater(left, right, right, left)


@part
def decibels(intensity: Any) -> Any:
    least = vsplat(intensity, LEAST)
    return vlog(where_greater(intensity, least, intensity, least)) * vsplat(intensity, DB_PER_E)


@part
def gather(x: Any, pitch: int, begin: int, sources: int, made: Any, sums: Any) -> None:
    """Gather LANES frames from frame `begin` on, from flat rows of `pitch` frames.

    The last group is padded with silence. `sums` gets the sum of magnitudes of every group.
    """
    zero = vsplat(x, 0.0)
    for first in range(0, sources, GROUP):
        total = zero
        for j in range(first, first + GROUP):
            value = vload(x, j * pitch + begin) if j < sources else zero
            vstore(made, j * LANES, value)
            total = total + vabs(value)
        vstore(sums, first // GROUP * LANES, total)


@part
def weigh(x: Any, sums: Any, blocks: Any, out: Any) -> None:
    """Compute out[t] = sum over s of weight[s, t] x[s] of rows of LANES frames; see `blocks_of`."""
    groups, size = blocks.shape[1], blocks.shape[2]
    flat, like = blocks.reshape(-1), vload_narrow(x, 0)
    zero, nothing = vsplat(like, 0.0), vsplat(like, NOTHING / groups)
    for block in range(blocks.shape[0]):
        to = block * SUMS * LANES
        for row in range(SUMS):
            vstore(out, to + row * LANES, vsplat(x, 0.0))
        for place in range(groups):
            at = (block * groups + place) * size
            group, peak = int(flat[at]), flat[at + 1]
            if peak == 0.0:
                break
            for lane in range(0, LANES, narrow_lanes()):
                bound = vload_narrow(sums, group * LANES + lane) * vsplat(like, peak)
                a, b = vload_narrow(out, to + lane), vload_narrow(out, to + lane + LANES)
                c = vload_narrow(out, to + lane + 2 * LANES)
                d = vload_narrow(out, to + lane + 3 * LANES)
                keep = _smaller(_smaller(a, b), _smaller(c, d)) * nothing
                if not any_greater(bound, keep):
                    continue
                own_a, own_b, own_c, own_d = zero, zero, zero, zero
                here = at + 2
                for j in range(group * GROUP, (group + 1) * GROUP):
                    value = vload_narrow(x, j * LANES + lane)
                    own_a = fma(value, vsplat(like, flat[here]), own_a)
                    own_b = fma(value, vsplat(like, flat[here + 1]), own_b)
                    own_c = fma(value, vsplat(like, flat[here + 2]), own_c)
                    own_d = fma(value, vsplat(like, flat[here + 3]), own_d)
                    here += SUMS
                vstore(out, to + lane, a + where_greater(bound, keep, own_a, zero))
                vstore(out, to + lane + LANES, b + where_greater(bound, keep, own_b, zero))
                vstore(out, to + lane + 2 * LANES, c + where_greater(bound, keep, own_c, zero))
                vstore(out, to + lane + 3 * LANES, d + where_greater(bound, keep, own_d, zero))


@part
def _slope_at(
    levels: Any, pitch: int, begin: int, j: int, before: Any, share: Any, line: Any
) -> Any:
    """Return the lower slope at source j, from its level or an interpolated level."""
    if len(before) == 0:
        level = vload(levels, j * pitch + begin)
    else:
        low = vload(levels, before[j] * pitch + begin)
        high = vload(levels, (before[j] + 1) * pitch + begin)
        level = fma(high - low, vsplat(low, share[j]), low)
    slope, zero = fma(level, vsplat(level, line[0]), vsplat(level, line[1])), vsplat(level, 0.0)
    return where_greater(slope, zero, slope, zero)


@part
def steepen(
    levels: Any, pitch: int, begin: int, sources: int, before: Any, share: Any, line: Any, x: Any,
    rates: Any, slanted: Any, gentlest: Any,
) -> None:  # fmt: skip
    """Compute the slopes of all sources, and the gentlest slope of every group.

    `rates` gets -slope log2(e), `slanted` the slope times the intensity.
    """
    for first in range(0, sources, GROUP):
        least = vsplat(x, 1e30)
        for j in range(first, min(first + GROUP, sources)):
            slope = _slope_at(levels, pitch, begin, j, before, share, line)
            least = _smaller(least, slope)
            vstore(rates, j * LANES, slope * vsplat(slope, -LOG2_E))
            vstore(slanted, j * LANES, slope * vload(x, j * LANES))
        vstore(gentlest, first // GROUP * LANES, least)


@part
def _given(x: Any, rates: Any, slanted: Any, j: int, away: float, total: Any) -> Any:
    """Add the part of source j at this distance to `total`: its intensity times (1 + x) exp(-x)."""
    distance = vsplat(x, away)
    level = fma(vload(slanted, j * LANES), distance, vload(x, j * LANES))
    return fma(level, vdecay(vload(rates, j * LANES) * distance), total)


@part
def _most(sums: Any, gentlest: Any, group: int, away: float) -> Any:
    """Bound the part of a group: its sum at its nearest source, with its gentlest slope."""
    x = vload(gentlest, group * LANES) * vsplat(sums, away)
    weight = (vsplat(x, 1.0) + x) * vdecay(x * vsplat(x, -LOG2_E))
    return vload(sums, group * LANES) * weight


@part
def skirts(
    x: Any, sums: Any, rates: Any, slanted: Any, gentlest: Any, bounds: Any, away: Any, out: Any
) -> None:
    """Add the parts of sources below a channel's centre to every row of `out`.

    Rates, `slanted` and `gentlest` come from `steepen`, `away` from `Tables`. In the scratch memory
    `bounds` the bound of a group holds for all later channels: weights fall with the distance.
    """
    sources, zero, below = away.shape[1], vsplat(x, 0.0), 0
    nothing = vsplat(x, NOTHING / (sources // GROUP + 1))
    for at in range(0, len(sums), LANES):
        vstore(bounds, at, vload(sums, at))
    for k in range(away.shape[0]):
        while below < sources and away[k, below] > 0.0:
            below += 1
        total, whole = vload(out, k * LANES), below // GROUP
        for j in range(whole * GROUP, below):
            total = _given(x, rates, slanted, j, away[k, j], total)
        for group in range(whole - 1, -1, -1):
            keep, before = total * nothing, vload(bounds, group * LANES)
            if not any_greater(before, keep):
                continue
            now = _most(sums, gentlest, group, away[k, (group + 1) * GROUP - 1])
            bound = where_greater(before, keep, now, before)
            vstore(bounds, group * LANES, bound)
            if any_greater(bound, keep):
                own = zero
                for j in range(group * GROUP, (group + 1) * GROUP):
                    own = _given(x, rates, slanted, j, away[k, j], own)
                total = total + where_greater(bound, keep, own, zero)
        vstore(out, k * LANES, total)


@part
def _room(rows: int, like: Any) -> Any:
    """Allocate rows of LANES numbers, with room to round up to whole groups and blocks."""
    return aligned((rows + GROUP) * LANES, like)


@kernel
def _run_levels(
    x: Any, pitch: int, begin: int, end: int, sources: int, blocks: Any, places: int, out: Any,
    out_pitch: int,
) -> None:  # fmt: skip
    """Compute levels of frames begin..end: flat (source, frame) -> flat (place, frame) in dB."""
    made, levels = _room(sources, x), _room(places, x)
    sums = aligned(-(-sources // GROUP) * LANES, x)
    for first in range(begin, end, LANES):
        gather(x, pitch, first, sources, made, sums)
        weigh(made, sums, blocks, levels)
        for t in range(places):
            vstore(out, t * out_pitch + first, decibels(vload(levels, t * LANES)))


@kernel
def _run_pattern(
    x: Any, pitch: int, levels: Any, level_pitch: int, begin: int, end: int, sources: int,
    away: Any, line: Any, before: Any, share: Any, blocks: Any, out: Any,
) -> None:  # fmt: skip
    """Compute excitation of frames begin..end: flat (source, frame) -> flat (frame, channel)."""
    made, rates, slanted = _room(sources, x), _room(sources, x), _room(sources, x)
    channels, groups = away.shape[0], -(-sources // GROUP)
    sums, bounds, gentlest = (
        aligned(groups * LANES, x), aligned(groups * LANES, x), aligned(groups * LANES, x)
    )  # fmt: skip
    patterns = _room(channels, x)
    for first in range(begin, end, LANES):
        gather(x, pitch, first, sources, made, sums)
        steepen(
            levels, level_pitch, first, sources, before, share, line, made, rates, slanted, gentlest
        )
        weigh(made, sums, blocks, patterns)
        skirts(made, sums, rates, slanted, gentlest, bounds, away, patterns)
        for k in range(channels):
            vstore(patterns, k * LANES, decibels(vload(patterns, k * LANES)))
        store_samples(patterns, channels, out, first)


def blocks_of(weights: Tensor) -> Tensor:
    """Convert weights (source, target) to the layout of `weigh`: (block, group, 2 + GROUP SUMS).

    A row of SUMS targets and GROUP sources holds the number of the group, the largest magnitude of
    its weights, and the weights (source, target). Groups are sorted by falling magnitude.
    """
    values = weights.detach().cpu().numpy()
    missing = -np.array(values.shape) % (GROUP, SUMS)
    padded = np.pad(values, [(0, n) for n in missing])
    shape = padded.shape[0] // GROUP, GROUP, padded.shape[1] // SUMS, SUMS
    blocks = padded.reshape(shape).transpose(2, 0, 1, 3).reshape(shape[2], shape[0], GROUP * SUMS)
    peaks = np.abs(blocks).max(2)
    groups = np.broadcast_to(np.arange(shape[0], dtype=values.dtype), peaks.shape)
    rows = np.concatenate((groups[..., None], peaks[..., None], blocks), 2)
    order = np.argsort(-peaks, 1, "stable")
    return torch.from_numpy(np.take_along_axis(rows, order[..., None], 1))


def _strange(*parts: Tensor) -> Array:
    """Return the indices of frames with non-finite numbers.

    The kernels leave some groups out and may miss such a number.
    """
    with np.errstate(all="ignore"):
        sums = sum(part.T.numpy().sum(0) for part in parts)
    return np.flatnonzero(~np.isfinite(sums))


def _cpu_levels(device: Device, intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Run the kernel; fastest if the frames of a source lie together. `blocks_of` made `blocks`."""
    leading, intensity = intensity.shape[:-1], intensity.detach().flatten(0, -2)
    weights = weights.detach()
    (rows, pitch), tables = frame_rows_of(intensity), blocks.numpy()
    (frames, sources), places = intensity.shape, weights.shape[1]
    out, out_pitch, made = new_rows(places, frames)

    def one(begin: int, end: int) -> None:
        _run_levels(rows, pitch, begin, end, sources, tables, places, out, out_pitch)

    over_frames(one, frames)
    strange = _strange(intensity)
    if len(strange):
        with torch.autocast("cpu", enabled=False):  # autocast would compute in half precision
            made[strange] = plain_levels(intensity[strange], weights)
    return made.unflatten(0, leading)


def _cpu_pattern(
    device: Device, intensity: Tensor, levels_db: Tensor, tables: list[Tensor]
) -> Tensor:
    filters = Tables(*tables)
    leading, intensity = intensity.shape[:-1], intensity.detach().flatten(0, -2)
    levels_db = levels_db.detach().flatten(0, -2)
    (rows, pitch), (levels, level_pitch) = frame_rows_of(intensity), frame_rows_of(levels_db)
    frames, sources = intensity.shape
    constants = [table.contiguous().numpy() for table in filters if table is not filters.upper]
    out = np.empty((frames + -frames % LANES, len(filters.away)), np.float32)

    def one(begin: int, end: int) -> None:
        _run_pattern(
            rows, pitch, levels, level_pitch, begin, end, sources, *constants, out.reshape(-1)
        )

    over_frames(one, frames)
    made = torch.from_numpy(out[:frames])
    strange = _strange(intensity, levels_db)
    if len(strange):
        with torch.autocast("cpu", enabled=False):
            made[strange] = plain_pattern(intensity[strange], levels_db[strange], filters)
    return made.unflatten(0, leading)


#: (.., source), weights (source, place) and `blocks_of(weights)` -> (.., place) in dB.
ERB_LEVELS = RowOperation(
    name="erb_levels",
    run=_cpu_levels,
    on_gpu=False,
    fake=lambda x, weights, blocks: x.new_empty(*x.shape[:-1], weights.shape[1]),
)
#: (.., source), (.., level) and `Tables` as a list -> (.., channel) in dB.
EXCITATION_PATTERN = RowOperation(
    name="excitation_pattern",
    run=_cpu_pattern,
    on_gpu=False,
    fake=lambda x, levels_db, tables: x.new_empty(*x.shape[:-1], tables[0].shape[0]),
)
