"""Frequency scales of the filters, and loudness level in phon.

`erb_*` is the LTFAT scale of the filterbanks: Glasberg and Moore (1990, eqs. 3 and 4), constants
rounded. The `cam_*` scale is the ERB-number scale of ANSI S3.4-2007 in Cam, for the loudness
models; the scales differ by 0.1 %:

    ERB(f) = 24.673 (0.004368 f + 1),   cam(f) = 21.366 log10(0.004368 f + 1).

Phon is the level of the 1 kHz tone of equal loudness. A `PhonTable` interpolates a model's own
loudness of steady 1 kHz tones in log sone, so a 1 kHz tone gets its own level back. The power law
of Stevens (40 + 10 log2 N) agrees within a few phon above 40 phon, and is wrong below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.units import db_to_pa

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
    frequencies[-1], frequencies[0] = fhigh_hz, flow_hz
    return frequencies


def erb_space_bw(
    flow_hz: float, fhigh_hz: float, bw: float = 1.0, hitme_hz: float | None = None
) -> Array:
    """Frequencies in steps of `bw` ERB between two limits.

    Without `hitme_hz` the points are centred in the range (half of the remainder at each end).
    With it they are whole steps away from that frequency, which is then one of them.
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


TONE_HZ = 1000.0
#: Levels of the table in dB SPL. Softer and louder sounds get its ends.
LOWEST_DB, HIGHEST_DB, STEP_DB = -10, 130, 1
#: Loudness that counts as the least above none, so that its logarithm exists.
LEAST_SONE = 1e-30


@dataclass(frozen=True)
class PhonTable:
    """Loudness of steady 1 kHz tones.

    Args:
        level_db: Levels in dB SPL, ascending.
        sone: Loudness of each, strictly ascending.
    """

    level_db: Tensor
    sone: Tensor

    def phon(self, sone: Tensor) -> Tensor:
        """Loudness level of any loudness, of the same shape."""
        known = self.sone.to(sone).clamp(min=LEAST_SONE).log()
        levels = self.level_db.to(sone)
        asked = sone.clamp(min=LEAST_SONE).log().clamp(known[0], known[-1])
        place = torch.searchsorted(known, asked.detach()).clamp(1, len(known) - 1)
        share = (asked - known[place - 1]) / (known[place] - known[place - 1])
        return levels[place - 1] + share * (levels[place] - levels[place - 1])


def tones(fs: float, samples: int) -> tuple[Tensor, Tensor]:
    """Return the levels of a table in dB SPL, and 1 kHz tones of these levels in Pa."""
    levels_db = torch.arange(LOWEST_DB, HIGHEST_DB + STEP_DB, STEP_DB, dtype=torch.float64)
    t = torch.arange(samples, dtype=torch.float64)
    peak = db_to_pa(0.0) * math.sqrt(2.0) * 10.0 ** (levels_db / 20.0)
    return levels_db, peak[:, None] * torch.sin(2.0 * math.pi * TONE_HZ / fs * t)


def phon_by(method: str, table: PhonTable, sone: Tensor) -> Tensor:
    """Loudness level by a named method: "table" or "power".

    "power" is 40 + 10 log2 N, the definition of the sone, good for 1 kHz tones above 40 phon.
    """
    if method == "table":
        return table.phon(sone)
    if method == "power":
        return 40.0 + 10.0 * torch.log2(sone.clamp(min=LEAST_SONE))
    raise ParameterError(f"method must be 'table' or 'power', got {method!r}")
