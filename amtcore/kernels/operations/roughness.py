"""Kernels of roughness: excitation of the channels, and low bins of their envelopes.

Components of a frame lie in vectors. The plain forms are `models.roughness.RoughnessDanielWeber`'s,
which has the constants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amtcore.kernels.vector.elementary import vexp, vlog
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    any_greater,
    fma,
    vabs,
    vload,
    vload_16,
    vmax,
    vmin,
    vsplat,
    vstore,
    where_greater,
)

#: Slopes of excitation in dB/Bark: below a component, and above it, per dB of its level.
LOWER, UPPER_DB = -27.0, 0.2
#: Factor from dB to the exponent of an amplitude, and from the logarithm of a power to dB.
EXPONENT, DB = math.log(10.0) / 20.0, 10.0 / math.log(10.0)
#: Level of 1 Pa in dB SPL.
PASCAL_DB = -20.0 * math.log10(20e-6)
#: Least power of a component in Pa^2, for its level.
LEAST_POWER = 1e-30
#: Outputs to which a sample adds in `lower_rate`.
OUTPUTS = 16
#: Rows of the table of components.
EAR, THRESHOLD, STEEPNESS, HALVES, WHOLE, REST = range(6)


def outputs_of(samples: int, hop: int) -> int:
    """Return the number of outputs of `lower_rate`."""
    return -(-samples // (4 * hop)) * 4 + OUTPUTS - 1


@part
def _factors(
    level: Any, slope: Any, table: Any, begin: int, end: int, edge: float, least: float,
    upper: bool, out: Any,
) -> None:  # fmt: skip
    """Store the factors of components begin to end - 1, which excite a channel from one side.

    Slopes are read at `edge`, where `least` is the threshold. With `upper` the channel lies above
    the components. Factors after the last are undefined.
    """
    c, low, zero = vsplat(level, EXPONENT), vsplat(level, least), vsplat(level, 0.0)
    at, steep = vsplat(level, edge), vsplat(level, -LOWER)
    whole, rest = table[WHOLE], table[REST]
    for k in range(begin, end, LANES):
        gain = vload(slope, k) if upper else steep
        gain = gain * ((at - vload(whole, k)) - vload(rest, k))
        reached, factor = vload(level, k) + gain, zero
        if any_greater(reached, low):
            factor = where_greater(reached, low, vexp(gain * c), zero)
        vstore(out, k, factor)


@kernel
def excite(spectrum: Any, table: Any, near: Any, least: Any, out: Any) -> None:
    """Compute the spectra of all channels, see `RoughnessDanielWeber.spectra`.

    Args:
        spectrum: (2 * component + 2), of the frame.
        table: (6, component + LANES or more), see `_tables`.
        near: (channel, 2), the first component beside a channel, and the first above it.
        least: (channel, 2), least level of components below and above a channel.
        out: (channel, 2 * component + 2).
    """
    components, size = out.shape[1] // 2 - 1, table.shape[1]
    level, slope, factor = aligned(size, table), aligned(size, table), aligned(size, table)
    re, im = aligned(size, table), aligned(size, table)
    re[components:], im[components:] = 0.0, 0.0
    ear, threshold, steepness = table[EAR], table[THRESHOLD], table[STEEPNESS]
    for k in range(components):
        re[k], im[k] = ear[k] * spectrum[2 * k], ear[k] * spectrum[2 * k + 1]
    zero, db = vsplat(re, 0.0), vsplat(re, DB)
    tiny, shift = vsplat(re, LEAST_POWER), vsplat(re, PASCAL_DB)
    for k in range(0, components, LANES):
        a, b = vload(re, k), vload(im, k)
        loud = fma(vlog(vmax(fma(a, a, b * b), tiny)), db, shift)
        half = where_greater(loud, vload(threshold, k), vload(table[HALVES], k), zero)
        vstore(level, k, loud)
        vstore(slope, k, vmin(fma(loud, vsplat(re, UPPER_DB), vload(steepness, k)), zero))
        vstore(re, k, half * a)
        vstore(im, k, half * b)
    for i in range(out.shape[0]):
        begin, end, row = near[i, 0], near[i, 1], out[i]
        _factors(level, slope, table, 0, begin, 0.5 * i, least[i, 0], True, factor)
        _factors(level, slope, table, end, components, 0.5 * i + 1.0, least[i, 1], False, factor)
        factor[begin:end] = 1.0
        for k in range(components):
            row[2 * k], row[2 * k + 1] = factor[k] * re[k], factor[k] * im[k]
        row[2 * components :] = 0.0


@kernel
def lower_rate(x: Any, low_pass: Any, out: Any) -> None:
    """Low-pass the magnitudes of (channel, sample), one output a row of `low_pass` (hop, OUTPUTS).

    Each sample adds to OUTPUTS outputs (channel, output). Samples after the last are zeros.
    """
    hop, taps, samples = low_pass.shape[0], low_pass.reshape(-1), x.shape[1]
    whole, end = samples - samples % LANES, (out.shape[1] - OUTPUTS + 1) * hop
    sizes, step, zero = aligned(end, x), np.uint64(hop), vsplat(vload_16(taps, 0), 0.0)
    sizes[whole:] = 0.0
    for i in range(x.shape[0]):
        row, y = x[i], out[i]
        y[:] = 0.0
        for t in range(0, whole, LANES):
            vstore(sizes, t, vabs(vload(row, t)))
        for t in range(whole, samples):
            sizes[t] = abs(row[t])
        for to in range(0, y.shape[0] - OUTPUTS + 1, 4):
            a, b, c, d, at = zero, zero, zero, zero, to * hop
            for r in range(hop):
                tap, place = vload_16(taps, r * OUTPUTS), np.uint64(at + r)  # has no sign to check
                a = fma(vsplat(tap, sizes[place]), tap, a)
                b = fma(vsplat(tap, sizes[place + step]), tap, b)
                c = fma(vsplat(tap, sizes[place + step + step]), tap, c)
                d = fma(vsplat(tap, sizes[place + step + step + step]), tap, d)
            vstore(y, to, vload_16(y, to) + a)
            vstore(y, to + 1, vload_16(y, to + 1) + b)
            vstore(y, to + 2, vload_16(y, to + 2) + c)
            vstore(y, to + 3, vload_16(y, to + 3) + d)
