"""Sound pressure, decibels and the calibration of digital audio.

Models state the unit of their input. It is "pa" (sound pressure in Pa, reference 20 uPa),
"rms1=100dB" (an RMS of 1.0 is 100 dB SPL, so one unit is 2 Pa) or "rms1=104dB". The unit "digital"
is of samples as the file has them, full scale 1. Digital audio has no sound pressure of its own: a
`Calibration` gives it one, stated in the job and recorded with every row; "digital" models ignore
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ParameterError
from amtcore.plain_numbers import plain_number

REFERENCE_PA = 20e-6
#: Unit of samples that no calibration scales, with full scale 1.
DIGITAL = "digital"
#: Pascals per unit of each other input unit (RMS 1.0 at 100 dB SPL is 20e-6 * 10**5 = 2 Pa).
PA_PER_UNIT = {"pa": 1.0, "rms1=100dB": 2.0, "rms1=104dB": REFERENCE_PA * 10 ** (104 / 20)}


def db_to_pa(level_db_spl: float) -> float:
    """RMS sound pressure in Pa of a level in dB SPL."""
    return float(REFERENCE_PA * 10.0 ** (level_db_spl / 20.0))


def pa_to_db(rms_pa: float) -> float:
    """Level in dB SPL of an RMS sound pressure in Pa; -inf for silence."""
    return 20.0 * math.log10(rms_pa / REFERENCE_PA) if rms_pa > 0 else -math.inf


@dataclass(frozen=True)
class Calibration:
    """Sound pressure of a digital amplitude. Exactly one of the two is set.

    Args:
        rms1_db_spl: Level in dB SPL of a digital signal with an RMS of 1.0.
        level_db_spl: Every clip is scaled to this level in dB SPL (RMS over the whole clip).
            Digital silence has no level and is left as it is.
    """

    rms1_db_spl: float | None = None
    level_db_spl: float | None = None

    def __post_init__(self) -> None:
        given = self.to_dict()
        if len(given) != 1:
            raise ParameterError(
                "a calibration needs exactly one of rms1_db_spl and level_db_spl, "
                f"got {', '.join(given) or 'neither'}"
            )
        ((name, value),) = given.items()
        level = plain_number(value)
        if level is None or not -100 <= level <= 300:
            raise ParameterError(f"{name} must lie between -100 and 300 dB SPL, got {value!r}")
        object.__setattr__(self, name, level)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Build from a mapping with one of the two keys."""
        unknown = sorted(set(values) - {"rms1_db_spl", "level_db_spl"})
        if unknown:
            raise ParameterError(
                f"unknown calibration key {unknown[0]!r}: use rms1_db_spl or level_db_spl"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, float]:
        """The one key that is set."""
        return {k: v for k, v in vars(self).items() if v is not None}

    @property
    def needs_whole_clip(self) -> bool:
        """True when the gain depends on all samples, so that a long file needs two passes."""
        return self.level_db_spl is not None

    def gain(self, clip: NDArray[np.floating[Any]], input_unit: str) -> float:
        """Linear factor from digital amplitude to a model's input unit.

        Args:
            clip: 1-D digital samples; looked at only when the level is normalised.
            input_unit: A key of `PA_PER_UNIT`, or "digital", whose gain is 1.
        """
        return self.gain_for_rms(rms(clip) if self.needs_whole_clip else 1.0, input_unit)

    def gain_for_rms(self, clip_rms: float, input_unit: str) -> float:
        """Like `gain`, for a clip whose RMS is already known."""
        if input_unit == DIGITAL:
            return 1.0
        if input_unit not in PA_PER_UNIT:
            known = ", ".join((*PA_PER_UNIT, DIGITAL))
            raise ParameterError(f"unknown input unit {input_unit!r}: expected one of {known}")
        (level,) = self.to_dict().values()
        pascals = db_to_pa(level)
        if self.level_db_spl is not None:
            pascals = pascals / clip_rms if clip_rms else 0.0
        return pascals / PA_PER_UNIT[input_unit]


def rms(clip: NDArray[np.floating[Any]]) -> float:
    """Root mean square, summed in float64; 0 for an empty clip."""
    return math.sqrt(float(np.mean(np.square(clip, dtype=np.float64)))) if clip.size else 0.0
