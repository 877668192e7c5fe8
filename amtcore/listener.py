"""A listener's hearing loss: the audiogram, and the share of the outer hair cells.

Between the frequencies of an audiogram the loss is linear in dB over the logarithm of frequency;
beyond them it is constant. In dB, the loss is the sum of a loss of cochlear gain, by outer hair
cells, and a loss by inner hair cells (Lopez-Poveda and Johannesen 2012). The share of outer hair
cells was 60 to 70 % on average over 68 listeners, from 0.5 to 6 kHz (Johannesen et al. 2014, Front.
Neurosci. 8). Single listeners differ widely from this average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ParameterError
from amtcore.plain_numbers import plain_number

Array = NDArray[np.float64]
#: Loss in dB HL by frequency in Hz, as a number or its text.
Audiogram = Mapping[str | float, float]

#: Part of the loss in dB that outer hair cells have.
OHC_SHARE = 2.0 / 3.0
#: Range of losses in dB HL: audiometers end at 120 dB, and -10 dB is the best hearing they measure.
LEAST_DB, MOST_DB = -20.0, 130.0


def checked_audiogram(name: str, value: Any) -> dict[str, float] | None:
    """Return an audiogram in ascending frequency, with the frequencies as text; None stays None.

    >>> checked_audiogram("audiogram", {4000: 50, 500.0: 15})
    {'500': 15.0, '4000': 50.0}
    """
    if value is None:
        return None
    points = dict[float, float]()
    for key, loss in value.items() if isinstance(value, Mapping) else ():
        hz, db = _frequency(key), plain_number(loss)
        if hz is None or hz in points or db is None or not LEAST_DB <= db <= MOST_DB:
            points.clear()
            break
        points[hz] = float(db)
    if not points:
        raise ParameterError(
            f"{name} must be dB HL by frequency in Hz, with at least one frequency, each above 0 "
            f"and once, and losses between {LEAST_DB:g} and {MOST_DB:g} dB, such as "
            f"{{500: 10, 4000: 50}}; got {value!r}"
        )
    return {f"{int(hz) if hz.is_integer() else hz}": points[hz] for hz in sorted(points)}


def _frequency(key: Any) -> float | None:
    """Return a frequency in Hz that is a number or its text; None for anything else."""
    try:
        hz = float(key) if isinstance(key, str) else plain_number(key)
    except ValueError:
        return None
    return float(hz) if hz is not None and 0.0 < hz < np.inf else None


def losses_db(audiogram: Audiogram, fc_hz: Array) -> Array:
    """Return the loss in dB at each frequency in Hz."""
    points = checked_audiogram("audiogram", audiogram) or {}
    at = np.log([float(hz) for hz in points])
    return np.interp(np.log(fc_hz), at, list(points.values()))
