"""The ERB-number scale of ANSI S3.4-2007, in Cam, which the loudness models use.

    ERB(f) = 24.673 (0.004368 f + 1),   cam(f) = 21.366 log10(0.004368 f + 1)

Filterbanks in time use the LTFAT scale of `scales` instead; the two differ by 0.1 %.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amtcore.errors import ParameterError

Array = NDArray[np.float64]

CAM_SCALE = 21.366
CAM_SLOPE = 0.004368  # per Hz
CAM_FLOOR_HZ = 24.673


def cam_bandwidth(f_hz: ArrayLike) -> Array:
    """Equivalent rectangular bandwidth in Hz."""
    return CAM_FLOOR_HZ * (CAM_SLOPE * np.asarray(f_hz, np.float64) + 1.0)


def cam_number(f_hz: ArrayLike) -> Array:
    """ERB number in Cam of a frequency in Hz."""
    return CAM_SCALE * np.log10(CAM_SLOPE * np.asarray(f_hz, np.float64) + 1.0)


def cam_frequency(cam: ArrayLike) -> Array:
    """Frequency in Hz of an ERB number; the inverse of `cam_number`."""
    return (10.0 ** (np.asarray(cam, np.float64) / CAM_SCALE) - 1.0) / CAM_SLOPE


def cam_space(lower_cam: float, upper_cam: float, step_cam: float) -> Array:
    """Frequencies in Hz in steps of `step_cam` from `lower_cam` up to at most `upper_cam`."""
    if not (0 < lower_cam <= upper_cam and step_cam > 0):
        raise ParameterError(
            f"expected 0 < lower <= upper and a step above 0 Cam, got {lower_cam:g}, "
            f"{upper_cam:g} and {step_cam:g}"
        )
    # Rounding must not lose the last channel of a range of whole steps.
    steps = math.floor((upper_cam - lower_cam) / step_cam + 1e-9)
    return cam_frequency(lower_cam + step_cam * np.arange(steps + 1))
