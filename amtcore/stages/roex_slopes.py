"""What the slopes of rounded-exponential filters may be, and what they are in dB per ERB.

    W = (1 + b d) exp(-b d) at d ERB from the centre, b = p ERB / f: far out 4.34 b dB per ERB
    b below the centre: b + c (X - 51) / 7.54, X the level in dB, c the change of p(1 kHz) per dB

Some interfaces state b and c in dB per ERB, and per dB; those numbers lie outside of these ranges.
"""

from __future__ import annotations

import math
from typing import Any

from amtcore.arguments import Number, plain_number
from amtcore.errors import ParameterError
from amtcore.scales import cam_bandwidth

#: Frequency over bandwidth at 1 kHz.
KHZ_PER_ERB = 1000.0 / float(cam_bandwidth(1000.0))
#: dB per ERB of a filter with b = 1, far from its centre.
DB_PER_ERB = 10.0 / math.log(10.0)
#: Level in dB where the lower slope is that of its base.
REFERENCE_LEVEL_DB = 51.0
#: Up to this level the lower slope stays above 0.
LOUDEST_DB = 130.0
_BASE = Number(above=0.0, most=10.0)


def slope_base(name: str, value: Any) -> float:
    """The rule for b: measured filters have about 4 (17 dB per ERB)."""
    number = plain_number(value)
    if number is None or not _BASE.fits(number):
        hint = "it is p ERB / f of the filter, 4 as published"
        if number is not None and number > 0:
            hint += f"; a slope of {number:g} dB per ERB is {number / DB_PER_ERB:.3g} here"
        raise ParameterError(f"{name} must be {_BASE.wanted()}, got {value!r}; {hint}")
    return float(number)


def slope_per_db(name: str, value: Any) -> float:
    """The rule for c: -0.35 to -0.38 as measured; filters widen with the level."""
    number = plain_number(value)
    if number is None or not -10.0 <= number <= 0.0:
        raise ParameterError(
            f"{name} must be a finite number at most 0 (the published change of p(1 kHz) per dB is "
            f"-0.35), got {value!r}"
        )
    return float(number)


def check_lower_slope(base: float, per_db: float) -> None:
    """Raises where the lower slope would vanish at levels that are heard."""
    least = -base * KHZ_PER_ERB / (LOUDEST_DB - REFERENCE_LEVEL_DB)
    if per_db < least:
        vanishes_db = REFERENCE_LEVEL_DB - base * KHZ_PER_ERB / per_db
        here = per_db * KHZ_PER_ERB / DB_PER_ERB
        raise ParameterError(
            f"lower_slope_per_db must be {least:.3g} or above with lower_slope_base {base:g}, so "
            f"that there is a lower slope up to {LOUDEST_DB:g} dB, got {per_db:g}, where it ends "
            f"at {vanishes_db:.0f} dB; it is the change of p(1 kHz) per dB, -0.35 as published: a "
            f"change of {per_db:g} dB per ERB is {here:.3g} here"
        )
