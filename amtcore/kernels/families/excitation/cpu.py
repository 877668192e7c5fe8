"""Levels and excitation patterns, LANES frames at a time; equations in `reference`.

Sources (components, or nodes that stand for them) go by GROUP, from near to far. What a group gives
is left out of a frame's sum where it is certain to be nothing there: where its bound, the sum of
its magnitudes times the largest of its weights, is no more than its share of `NOTHING` times what
the sum already has. Every frame is asked for itself: its values do not depend on those beside it.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.families.excitation.reference import DB_PER_E, LEAST
from amtcore.kernels.vector.elementary import LOG2_E, vdecay, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
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
from amtcore.kernels.vector.transpose import store_samples

#: Sources that are kept or left out together, and sums that are made side by side.
GROUP, SUMS = 8, 4
#: What all groups that are left out may add to a sum: half of its last digit.
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
    """LANES frames from `begin` on of flat rows of `pitch` frames, side by side, filled up to whole
    groups with silence; and the sum of magnitudes of every group."""
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
    """Rows of LANES frames: out[t] = sum over s of weight[s, t] x[s]; `runner.blocks_of`."""
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
def _slope(levels: Any, pitch: int, begin: int, j: int, before: Any, share: Any, line: Any) -> Any:
    """Factor of the lower slope at source j: of its own level, or of those it lies between."""
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
    """Of every source the slope as power of two, and that times its intensity; of every group the
    gentlest slope."""
    for first in range(0, sources, GROUP):
        least = vsplat(x, 1e30)
        for j in range(first, min(first + GROUP, sources)):
            slope = _slope(levels, pitch, begin, j, before, share, line)
            least = _smaller(least, slope)
            vstore(rates, j * LANES, slope * vsplat(slope, -LOG2_E))
            vstore(slanted, j * LANES, slope * vload(x, j * LANES))
        vstore(gentlest, first // GROUP * LANES, least)


@part
def _given(x: Any, rates: Any, slanted: Any, j: int, away: float, total: Any) -> Any:
    """`total` and what source j gives at this distance: (1 + x) exp(-x) of its intensity."""
    distance = vsplat(x, away)
    level = fma(vload(slanted, j * LANES), distance, vload(x, j * LANES))
    return fma(level, vdecay(vload(rates, j * LANES) * distance), total)


@part
def _most(sums: Any, gentlest: Any, group: int, away: float) -> Any:
    """What a group gives at most: all of it at its nearest source, with its gentlest slope."""
    x = vload(gentlest, group * LANES) * vsplat(sums, away)
    weight = (vsplat(x, 1.0) + x) * vdecay(x * vsplat(x, -LOG2_E))
    return vload(sums, group * LANES) * weight


@part
def skirts(
    x: Any, sums: Any, rates: Any, slanted: Any, gentlest: Any, bounds: Any, away: Any, out: Any
) -> None:
    """Add to every channel's row what the sources below its centre give it.

    Args:
        sums: Of every group, the sum of its magnitudes.
        rates: Of `steepen`, as `slanted` and `gentlest`.
        bounds: Room of the size of `sums`. What bounds a group's part in one channel holds for all
            later ones: away from a source its weights fall.
        away: (channel, source), see `reference.Tables`; what is above 0 lies below a centre.
        out: What the sources above give.
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
    """LANES numbers a row, of whole groups and blocks."""
    return aligned((rows + GROUP) * LANES, like)


@kernel
def run_levels(
    x: Any, pitch: int, begin: int, end: int, sources: int, blocks: Any, places: int, out: Any,
    out_pitch: int,
) -> None:  # fmt: skip
    """Flat (source, frame) -> flat (place, frame) in dB, for some frames, LANES at a time."""
    made, levels = _room(sources, x), _room(places, x)
    sums = aligned(-(-sources // GROUP) * LANES, x)
    for first in range(begin, end, LANES):
        gather(x, pitch, first, sources, made, sums)
        weigh(made, sums, blocks, levels)
        for t in range(places):
            vstore(out, t * out_pitch + first, decibels(vload(levels, t * LANES)))


@kernel
def run_pattern(
    x: Any, pitch: int, levels: Any, level_pitch: int, begin: int, end: int, sources: int,
    away: Any, line: Any, before: Any, share: Any, blocks: Any, out: Any,
) -> None:  # fmt: skip
    """Flat (source, frame) and the levels that set the slopes -> flat (frame, channel) in dB."""
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
