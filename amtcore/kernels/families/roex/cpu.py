"""Lower skirts, LANES components at a time; equations in `reference`.

Components of zero intensity are left out first, so quiet frames cost little. Both frequency axes
ascend: the components below a filter's centre are a prefix, and only the last vector of a prefix
holds some that are not (their distance is negative, they get no weight), so that the others need
not ask. A frame's sums have a fixed order, whatever its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amtcore.kernels.vector.elementary import LOG2_E, vdecay, vexp
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    add_once,
    fma,
    vload,
    vmax,
    vsplat,
    vsum,
    where_greater,
)


@part
def _present(intensity: Any, slope: Any, f_hz: Any, where: Any, i: Any, s: Any, f: Any) -> int:
    """Put the components that are there side by side; returns how many.

    `where` gets their places. The rest of the last vector is filled with silence at a high
    frequency.
    """
    count = 0
    for j in range(f_hz.shape[0]):
        if intensity[j] != 0:
            where[count] = j
            i[count], s[count], f[count] = intensity[j], slope[j], f_hz[j]
            count += 1
    for j in range(count, count + (-count) % LANES):
        i[j], s[j], f[j] = 0.0, 0.0, f_hz[-1]
    return count


@part
def _weight(slope: Any, away: Any) -> Any:
    """(1 + x) exp(-x), x = slope away."""
    x = slope * away
    return (vsplat(x, 1.0) + x) * vdecay(x * vsplat(x, -LOG2_E))


@part
def skirts(count: int, i: Any, s: Any, f: Any, rate: Any, fc_hz: Any, out: Any) -> None:
    zero, below = vsplat(i, 0.0), 0
    for k in range(fc_hz.shape[0]):
        while below < count and f[below] < fc_hz[k]:
            below += 1
        centre, per_hz, total = vsplat(i, fc_hz[k]), vsplat(i, rate[k]), zero
        whole = below - below % LANES
        for j in range(0, whole, LANES):
            away = per_hz * (centre - vload(f, j))
            total = fma(vload(i, j), _weight(vload(s, j), away), total)
        if whole < below:
            away = per_hz * (centre - vload(f, whole))
            away = where_greater(away, zero, away, zero)
            level = where_greater(away, zero, vload(i, whole), zero)
            total = fma(level, _weight(vload(s, whole), away), total)
        out[k] = vsum(total)


@part
def skirts_adjoint(
    count: int, i: Any, s: Any, f: Any, rate: Any, fc_hz: Any, gout: Any, gi: Any, gs: Any,
    grate: Any,
) -> None:  # fmt: skip
    """With w = (1 + x) exp(-x): dw/dx = -x exp(-x), and x = s r d gives ds = r d dx, dr = s d dx.

    `gi`, `gs` and `grate` are added to.
    """
    zero, one, below = vsplat(i, 0.0), vsplat(i, 1.0), 0
    for k in range(fc_hz.shape[0]):
        while below < count and f[below] < fc_hz[k]:
            below += 1
        centre, per_hz, upstream = vsplat(i, fc_hz[k]), vsplat(i, rate[k]), vsplat(i, gout[k])
        total = zero
        for j in range(0, below, LANES):
            distance = centre - vload(f, j)
            passes = where_greater(distance, zero, upstream, zero)
            slope = where_greater(distance, zero, vload(s, j), zero)
            level = where_greater(distance, zero, vload(i, j), zero)
            distance = vmax(distance, zero)
            x = slope * (per_hz * distance)
            e = vexp(zero - x)
            accumulate(gi, j // LANES, passes * ((one + x) * e))
            g_x = (zero - passes) * level * x * e * distance
            accumulate(gs, j // LANES, g_x * per_hz)
            total = fma(g_x, slope, total)
        add_once(grate, k, vsum(total))


@kernel
def run_lower_skirt(intensity: Any, slope: Any, rate: Any, fc_hz: Any, f_hz: Any, out: Any) -> None:
    """Excitation of a few frames: (frame, component) twice -> out (frame, filter)."""
    room = f_hz.shape[0] + LANES
    where = np.empty(room, np.int64)
    i, s, f = aligned(room, intensity), aligned(room, intensity), aligned(room, intensity)
    for n in range(intensity.shape[0]):
        count = _present(intensity[n], slope[n], f_hz, where, i, s, f)
        skirts(count, i, s, f, rate, fc_hz, out[n])


@kernel
def run_lower_skirt_adjoint(
    intensity: Any, slope: Any, rate: Any, fc_hz: Any, f_hz: Any, gout: Any, gintensity: Any,
    gslope: Any, grate: Any,
) -> None:  # fmt: skip
    """Gradients of a few frames; components that are not there get none."""
    room = f_hz.shape[0] + LANES
    where = np.empty(room, np.int64)
    i, s, f = aligned(room, intensity), aligned(room, intensity), aligned(room, intensity)
    gi, gs = aligned(room, intensity), aligned(room, intensity)
    grate[:] = 0.0
    for n in range(intensity.shape[0]):
        count = _present(intensity[n], slope[n], f_hz, where, i, s, f)
        gi[:] = 0.0
        gs[:] = 0.0
        skirts_adjoint(count, i, s, f, rate, fc_hz, gout[n], gi, gs, grate)
        gintensity[n] = 0.0
        gslope[n] = 0.0
        for j in range(count):
            gintensity[n, where[j]] = gi[j]
            gslope[n, where[j]] = gs[j]
