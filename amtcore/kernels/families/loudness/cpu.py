"""Nodes and specific loudness, LANES frames or channels at a time; equations in `reference`.

A frame's nodes and a channel's loudness do not depend on what is beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amtcore.kernels.families.loudness.reference import HIGH_EXCITATION, PER_DB
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

#: Nodes of a group of more components than that. Loudness changes by 1e-6 (traces of speech, noise
#: and tones; 1.2e-5 for a tone at 9 kHz near threshold), a tenth of that with four.
NODES = 3
#: Rows of a law's constants, see `specific`.
RATIO, ALPHA, SCALE, THRESHOLD, LOG_C = range(5)
#: exp(y) - 1 = y (1 + y (c[0] + c[1] y + ..)) below this y, by its Taylor series: 2e-9.
_SMALL = 0.5
_EXPM1 = tuple(float(1.0 / np.prod(np.arange(1.0, n + 1.0))) for n in range(2, 10))


@part
def _above(intensity: Any, at: int, least: Any) -> Any:
    """The intensities of one component that lie above the least; NaN stays."""
    value = vload(intensity, at)
    return where_greater_or_nan(value, least, value, vsplat(value, 0.0))


@part
def nodes(
    intensity: Any, pitch: int, begin: int, least: Any, starts: Any, weights: Any, out: Any,
    out_pitch: int,
) -> None:  # fmt: skip
    """Nodes of LANES frames from `begin` on: flat rows of all frames to rows of all frames."""
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
    """log(1 + value) for values from 0 on: what rounding took from the sum is put back by a
    ratio."""
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
    """Specific loudness of LANES channels from `at` on.

    Args:
        level_db: Excitations, a vector.
        law: Flat rows of `channels`, see `reference.law_rows`.
        high: Of the law at very high levels: log of the divisor, and exponent.
    """
    log_e = level_db * vsplat(level_db, PER_DB)
    e = vexp(log_e)
    ratio, alpha = vload(law, RATIO * channels + at), vload(law, ALPHA * channels + at)
    loudness = vload(law, SCALE * channels + at) * _expm1(alpha * _log1p(ratio * e))
    share = (e + e) / (e + vload(law, THRESHOLD * channels + at))
    share = vmin(share, vsplat(e, 1.0))
    loudness = loudness * (share * vsqrt(share))
    most = vsplat(e, HIGH_EXCITATION)
    if any_at_least(e, most):
        loud = (log_e - vsplat(e, high[0])) * vsplat(e, high[1])
        loudness = where_greater(most, e, loudness, vexp(loud + vload(law, LOG_C * channels + at)))
    return loudness


@kernel
def run_nodes(
    intensity: Any, pitch: int, begin: int, end: int, least: Any, starts: Any, weights: Any,
    out: Any, out_pitch: int,
) -> None:  # fmt: skip
    """Flat (component, frame) -> flat (node, frame), for some frames, LANES at a time."""
    for first in range(begin, end, LANES):
        nodes(intensity, pitch, first, least, starts, weights, out, out_pitch)


@kernel
def run_law(level_db: Any, channels: int, law: Any, high: Any, out: Any) -> None:
    """Flat (frame, channel), LANES channels or more."""
    for row in range(0, len(level_db), channels):
        for at in range(0, channels, LANES):
            # The last vector of a row begins earlier, where it would reach beyond it.
            place = min(at, channels - LANES)
            level = vload(level_db, row + place)
            vstore(out, row + place, specific(level, law, channels, place, high))
