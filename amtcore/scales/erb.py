"""ERB-number scales: where the filters sit.

`erb_*` is the LTFAT scale that every filterbank here uses, after Glasberg and Moore (1990, eqs. 3
and 4) with rounded constants; the loudness models use the ANSI S3.4-2007 constants instead.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amtcore.errors import ParameterError

Array = NDArray[np.float64]

ERB_NUMBER_SCALE = 9.2645
ERB_NUMBER_SLOPE = 0.00437  # per Hz
ERB_FLOOR_HZ = 24.7
ERB_Q = 9.265


def erb_number(f_hz: ArrayLike) -> Array:
    """ERB number of a frequency: 9.2645 ln(1 + 0.00437 f)."""
    return ERB_NUMBER_SCALE * np.log1p(ERB_NUMBER_SLOPE * np.asarray(f_hz, np.float64))


def erb_frequency(number: ArrayLike) -> Array:
    """Frequency in Hz of an ERB number; the inverse of `erb_number`."""
    return np.expm1(np.asarray(number, np.float64) / ERB_NUMBER_SCALE) / ERB_NUMBER_SLOPE


def erb_bandwidth(f_hz: ArrayLike) -> Array:
    """Equivalent rectangular bandwidth in Hz: 24.7 + f / 9.265."""
    return ERB_FLOOR_HZ + np.asarray(f_hz, np.float64) / ERB_Q


def erb_space(flow_hz: float, fhigh_hz: float, n: int) -> Array:
    """`n` frequencies evenly spaced in ERB number, both ends exact."""
    _check_range(flow_hz, fhigh_hz)
    if n < 1:
        raise ParameterError(f"the number of frequencies must be 1 or more, got {n}")
    low, high = erb_number([flow_hz, fhigh_hz])
    frequencies = erb_frequency(np.linspace(low, high, n))
    frequencies[0] = flow_hz
    if n > 1:
        frequencies[-1] = fhigh_hz
    return frequencies


def erb_space_bw(
    flow_hz: float, fhigh_hz: float, bw: float = 1.0, hitme_hz: float | None = None
) -> Array:
    """Frequencies in steps of `bw` ERB between two limits.

    Without `hitme_hz` the points are centred in the range (half of the remainder at each end);
    with it they are whole steps away from that frequency, which is then one of them.
    """
    _check_range(flow_hz, fhigh_hz)
    if not bw > 0:
        raise ParameterError(f"the spacing must be above 0 ERB, got {bw}")
    low, high = erb_number([flow_hz, fhigh_hz])
    if hitme_hz is None:
        steps = math.floor((high - low) / bw)
        start = low + ((high - low) - steps * bw) / 2
        return erb_frequency(start + bw * np.arange(steps + 1))
    if not flow_hz <= hitme_hz <= fhigh_hz:
        raise ParameterError(
            f"the base frequency must lie in {flow_hz:g}..{fhigh_hz:g} Hz, got {hitme_hz:g} Hz"
        )
    hit = float(erb_number(hitme_hz))
    below, above = math.floor((hit - low) / bw), math.floor((high - hit) / bw)
    frequencies = erb_frequency(hit + bw * np.arange(-below, above + 1))
    frequencies[below] = hitme_hz
    return frequencies


def _check_range(flow_hz: float, fhigh_hz: float) -> None:
    if not 0 <= flow_hz <= fhigh_hz:
        raise ParameterError(
            f"expected 0 <= flow <= fhigh, got flow {flow_hz:g} Hz and fhigh {fhigh_hz:g} Hz"
        )


#: Names of these functions in torch_amt and in toolboxes for MATLAB.
fc2erb, erb2fc, audfiltbw = erb_number, erb_frequency, erb_bandwidth
erbspace, erbspacebw = erb_space, erb_space_bw
