"""From samples to specific loudness, LANES frames of all ears at a time.

    samples -> powers of components -> nodes -> level per ERB -> excitation -> specific loudness

What lies between stays in the caches. Each step is that of its family, number by number, so the
result is the same as that of the families' own kernels one after another.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.families.excitation.cpu import (
    GROUP,
    decibels,
    gather,
    skirts,
    steepen,
    weigh,
)
from amtcore.kernels.families.loudness.cpu import nodes, specific
from amtcore.kernels.families.spectrum.cpu import (
    blocks_of,
    coefficients_of,
    powers_of_frames,
    room,
)
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    any_greater_or_nan,
    vload,
    vmax,
    vsplat,
    vstore,
    where_greater,
)
from amtcore.kernels.vector.transpose import store_samples

#: Sums of intensities beyond this are not computed here: what is left out of them might be no
#: number.
LARGEST = 1e37


@part
def _faintest(components: Any, count: int, limits: Any) -> Any:
    """What components of LANES frames must be above: (strongest * a, at least b) * c."""
    strongest = vload(components, 0)
    for i in range(1, count):
        strongest = vmax(strongest, vload(components, i * LANES))
    strongest, floor = strongest * vsplat(strongest, limits[0]), vsplat(strongest, limits[1])
    return where_greater(floor, strongest, floor, strongest) * vsplat(floor, limits[2])


@part
def _is_too_much(sums: Any) -> bool:
    """Whether the magnitudes of a frame's nodes add up to something strange."""
    total = vsplat(sums, 0.0)
    for at in range(0, len(sums), LANES):
        total = total + vload(sums, at)
    return any_greater_or_nan(total, vsplat(total, LARGEST))


@part
def _store_law(
    levels: Any, channels: int, frames: int, law: Any, high: Any, out: Any, to: int, pitch: int
) -> None:
    """Flat (frame, channel) in dB -> specific loudness in rows of `pitch` numbers from `to` on."""
    for frame in range(frames):
        for at in range(0, channels, LANES):
            # The last vector of a row begins earlier, where it would reach beyond it.
            place = min(at, channels - LANES)
            level = vload(levels, frame * channels + place)
            vstore(out, to + frame * pitch + place, specific(level, law, channels, place, high))


@kernel
def run_ears(
    x: Any, reach: int, basis: Any, values: Any, plan: Any, columns: int, components: int,
    limits: Any, starts: Any, weights: Any, sources: int, level_blocks: Any, places: int,
    away: Any, line: Any, before: Any, share: Any, upper_blocks: Any, law: Any, high: Any,
    frames: int, out: Any, pitch: int,
) -> bool:  # fmt: skip
    """One signal, (ear, sample) -> rows of `pitch` numbers, ear beside ear; true where it is left
    to the families' own kernels, as sums are no numbers.

    Args:
        limits: See `_faintest`.
        frames: That are wanted; rows of all ears lie beside each other.
    """
    ears, channels, groups = x.shape[0], away.shape[0], -(-sources // GROUP)
    work, size = room(columns, x), components * LANES
    powers = aligned(ears * size, x)
    own = aligned((sources + GROUP) * LANES, x)
    rates, slanted = aligned((sources + GROUP) * LANES, x), aligned((sources + GROUP) * LANES, x)
    sums, bounds = aligned(groups * LANES, x), aligned(groups * LANES, x)
    gentlest, levels = aligned(groups * LANES, x), aligned((places + GROUP) * LANES, x)
    patterns, tile = aligned((channels + GROUP) * LANES, x), aligned(channels * LANES, x)
    count = blocks_of(frames, reach)
    known = count * basis.shape[0]
    made, least = aligned(ears * known, x), aligned(LANES, x)
    for ear in range(ears):
        coefficients_of(x[ear], 0, count, basis, made[ear * known :])
    for frame in range(0, frames, LANES):
        for ear in range(ears):
            powers_of_frames(
                made[ear * known :], count, frame + reach, values, plan, work, powers, ear * size,
                LANES,
            )  # fmt: skip
        vstore(least, 0, _faintest(powers, ears * components, limits))
        for ear in range(ears):
            nodes(powers[ear * size :], LANES, 0, least, starts, weights, own, LANES)
            gather(own, LANES, 0, sources, own, sums)
            if _is_too_much(sums):
                return True
            weigh(own, sums, level_blocks, levels)
            for t in range(places):
                vstore(levels, t * LANES, decibels(vload(levels, t * LANES)))
            steepen(levels, LANES, 0, sources, before, share, line, own, rates, slanted, gentlest)
            weigh(own, sums, upper_blocks, patterns)
            skirts(own, sums, rates, slanted, gentlest, bounds, away, patterns)
            for k in range(channels):
                vstore(patterns, k * LANES, decibels(vload(patterns, k * LANES)))
            store_samples(patterns, channels, tile, 0)
            _store_law(
                tile, channels, min(LANES, frames - frame), law, high, out,
                frame * pitch + ear * channels, pitch,
            )  # fmt: skip
    return False
