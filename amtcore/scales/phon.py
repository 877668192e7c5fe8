"""Loudness level in phon: the level of the 1 kHz tone that is as loud.

By a table of a model's own loudness of steady 1 kHz tones, interpolated in log sone, so a 1 kHz
tone gets its own level back. The power law of Stevens (40 + 10 log2 N) agrees with that within
a few phon above 40 phon, and is wrong below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.units import db_to_pa

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


def table_levels() -> Tensor:
    """The levels of a table in dB SPL."""
    return torch.arange(LOWEST_DB, HIGHEST_DB + STEP_DB, STEP_DB, dtype=torch.float64)


def tones(levels_db: Tensor, fs: float, samples: int) -> Tensor:
    """(level, samples): 1 kHz tones in Pa."""
    t = torch.arange(samples, dtype=torch.float64)
    peak = db_to_pa(0.0) * math.sqrt(2.0) * 10.0 ** (levels_db / 20.0)
    return peak[:, None] * torch.sin(2.0 * math.pi * TONE_HZ / fs * t)


def stevens_phon(sone: Tensor) -> Tensor:
    """40 + 10 log2 N: the definition of the sone, good for 1 kHz tones above 40 phon."""
    return 40.0 + 10.0 * torch.log2(sone.clamp(min=LEAST_SONE))


def phon_by(method: str, table: PhonTable, sone: Tensor) -> Tensor:
    """Loudness level by a named method: "table" or "power"."""
    if method == "table":
        return table.phon(sone)
    if method == "power":
        return stevens_phon(sone)
    raise ParameterError(f"method must be 'table' or 'power', got {method!r}")
