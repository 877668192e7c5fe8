"""Envelopes of two rows from their samples and their Hilbert transforms, in two passes.

The first adds up the powers of the samples and of the analytic signals, the second writes the
envelopes. The two rows lie side by side, as real and imaginary parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import LANES, fma, vload, vmax, vsplat, vsqrt, vstore

#: Numbers that are summed before their sum joins the total, which is in float64.
_PART = 128 * LANES


@part
def _powers(z: Any, turned: Any, begin: int, end: int, sums: Any) -> None:
    """Add up z^2 in the first LANES of `sums` and z^2 + turned^2 in the next, which also goes to
    `turned`. Lanes with an even index belong to the first row, the others to the second."""
    own = both = vsplat(z, 0.0)
    for i in range(begin, end, LANES):
        value, quadrature = vload(z, i), vload(turned, i)
        square = value * value
        power = fma(quadrature, quadrature, square)
        vstore(turned, i, power)
        own, both = own + square, both + power
    vstore(sums, 0, own)
    vstore(sums, LANES, both)


@kernel
def run_envelope(z: Any, turned: Any, tiny: float, first: Any, second: Any) -> None:
    """z, turned flat (2 time), the latter overwritten; first, second (time).

    Each envelope is scaled to the power of its row; powers below `tiny` count as that.
    """
    count, samples = z.shape[0], first.shape[0]
    whole = count - count % LANES
    sums, totals = aligned(2 * LANES, z), np.zeros((2, 2))
    for begin in range(0, whole, _PART):
        _powers(z, turned, begin, min(begin + _PART, whole), sums)
        for lane in range(2 * LANES):
            totals[lane // LANES, lane % 2] += sums[lane]
    for i in range(whole, count):
        totals[0, i % 2] += z[i] * z[i]
        turned[i] = z[i] * z[i] + turned[i] * turned[i]
        totals[1, i % 2] += turned[i]
    gains = aligned(LANES, z)
    for lane in range(LANES):
        own, both = totals[0, lane % 2] / samples, totals[1, lane % 2] / samples
        gains[lane] = math.sqrt(max(own / max(both, tiny), tiny))
    gain, least = vload(gains, 0), vsplat(z, tiny)
    for i in range(0, whole, LANES):
        vstore(turned, i, gain * vsqrt(vmax(vload(turned, i), least)))
    for i in range(whole, count):
        turned[i] = gains[i % 2] * math.sqrt(max(turned[i], tiny))
    for t in range(samples):
        first[t] = turned[2 * t]
        second[t] = turned[2 * t + 1]
