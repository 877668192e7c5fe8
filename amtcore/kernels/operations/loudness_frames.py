"""Samples to specific loudness in one pass, LANES frames of all ears at a time.

    samples -> powers of components -> nodes -> level per ERB -> excitation -> specific loudness

Intermediate values stay in the caches. The parts of each operation are used unchanged, so the
result has the same bits as the operations one after another. A call takes one signal on its own
thread: `models.frame_blocks` already distributes signals to threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from amtcore.kernels.operations.excitation import (
    GROUP,
    Tables,
    decibels,
    gather,
    skirts,
    steepen,
    weigh,
)
from amtcore.kernels.operations.running_spectrum import (
    EVEN,
    ODD,
    REACH,
    SIDE,
    Factors,
    blocks_of,
    coefficients_of,
    powers_of_frames,
    room,
)
from amtcore.kernels.operations.specific_loudness import nodes, specific
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

#: Limit of sums of intensities. Near float32's largest number, a source that is left out could hide
#: an overflow.
LARGEST = 1e37


@part
def _faintest(components: Any, count: int, limits: Any) -> Any:
    """Return the threshold for components of LANES frames: max(strongest * a, b) * c."""
    strongest = vload(components, 0)
    for i in range(1, count):
        strongest = vmax(strongest, vload(components, i * LANES))
    strongest, floor = strongest * vsplat(strongest, limits[0]), vsplat(strongest, limits[1])
    return where_greater(floor, strongest, floor, strongest) * vsplat(floor, limits[2])


@part
def _is_too_much(sums: Any) -> bool:
    """Return True if the sum of a frame's magnitudes is NaN or above LARGEST."""
    total = vsplat(sums, 0.0)
    for at in range(0, len(sums), LANES):
        total = total + vload(sums, at)
    return any_greater_or_nan(total, vsplat(total, LARGEST))


@part
def _store_law(
    levels: Any, channels: int, frames: int, law: Any, high: Any, out: Any, to: int, pitch: int
) -> None:
    """Store specific loudness of flat (frame, channel) in dB, in rows of `pitch` numbers."""
    for frame in range(frames):
        for at in range(0, channels, LANES):
            # The last vector of a row begins earlier, to end with the row.
            place = min(at, channels - LANES)
            level = vload(levels, frame * channels + place)
            vstore(out, to + frame * pitch + place, specific(level, law, channels, place, high))


@kernel
def _run_ears(
    x: Any, reach: int, basis: Any, values: Any, plan: Any, columns: int, components: int,
    limits: Any, starts: Any, weights: Any, sources: int, level_blocks: Any, places: int,
    away: Any, line: Any, before: Any, share: Any, upper_blocks: Any, law: Any, high: Any,
    frames: int, out: Any, pitch: int,
) -> bool:  # fmt: skip
    """Compute `frames` rows of `pitch` numbers of one signal (ear, sample), ear beside ear.

    Returns True without a result if `_is_too_much`; the caller then runs the single operations.
    `limits` is as in `_faintest`.
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


class LoudnessKernel:
    """The kernel from samples to specific loudness, with its float32 constants.

    Args:
        factors: Transforms of the spectra.
        limits: (3,), a, b and c of the threshold max(strongest a, b) c of components.
        starts: First component of every group, and the end of the last group; int64.
        weights: (component, NODES).
        level_blocks: Weights of levels from `excitation.blocks_of`.
        places: Number of levels.
        tables: Constants of the excitation patterns, of LANES channels or more.
        law: Rows of `specific_loudness.law_rows`.
        high: Divisor and exponent of the law at very high levels.
    """

    def __init__(
        self, factors: Factors, limits: Tensor, starts: Tensor, weights: Tensor,
        level_blocks: Tensor, places: int, tables: Tables, law: Tensor, high: tuple[float, float],
    ) -> None:  # fmt: skip
        basis, values, plan = (table.numpy() for table in factors)
        columns = int((plan[:, REACH] * (plan[:, EVEN] + plan[:, ODD])).max()) + SIDE
        self.channels, sources = tables.away.shape
        rows = (tables.away, tables.line, tables.before, tables.share, tables.blocks, law)
        *patterns, law_rows = (table.contiguous().numpy() for table in rows)
        self._constants = (
            int(plan[:, REACH].max()), basis, values, plan, columns, int(starts[-1]),
            limits.numpy(), starts.numpy(), weights.numpy().ravel(), sources, level_blocks.numpy(),
            places, *patterns, law_rows.ravel(), np.array([math.log(high[0]), high[1]]),
        )  # fmt: skip

    def specific(self, x: Tensor, rows: Tensor) -> bool:
        """Write specific loudness of one signal (ear, sample) to rows (frame, ear channel or more).

        Returns False without a result if samples or their powers are not finite.
        """
        out = rows.numpy()
        return not _run_ears(
            x.contiguous().numpy(), *self._constants, len(out), out.reshape(-1), out.shape[1]
        )
