"""Levels per ERB and excitation patterns (Glasberg and Moore 1990), plainly.

    level of place t    10 log10 sum over j of I[j] W[j, t]
    channel k           10 log10 (sum over j of I[j] U[j, k]
                                  + sum over j with d[k, j] > 0 of I[j] (1 + x) exp(-x))
                        x = s[j] d[k, j],   s[j] = max(a X[j] + b, 0)

U are the weights of what lies at or above a channel's centre, d distances below it times the slope
there, and X levels of `W`: of each source, or linear between two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Intensities below this are this: -100 dB.
LEAST = 1e-10
DB_PER_E = 10.0 / math.log(10.0)


class Tables(NamedTuple):
    """What the filters are.

    Args:
        away: d, (channel, source), ascending in channels and descending in sources.
        line: a and b, (2,).
        before: (source,), the level before each source; empty where every source has its own.
        share: (source,), the share of the level after that.
        upper: U, (source, channel).
        blocks: The same as `runner.blocks_of` has it.
    """

    away: Tensor
    line: Tensor
    before: Tensor
    share: Tensor
    upper: Tensor
    blocks: Tensor


def _decibels(intensity: Tensor) -> Tensor:
    return DB_PER_E * torch.log(intensity.clamp(min=LEAST))


def levels_db(intensity: Tensor, weights: Tensor) -> Tensor:
    """(frame, source) and (source, place) -> (frame, place)."""
    return _decibels(intensity @ weights)


def pattern(intensity: Tensor, levels_db: Tensor, tables: Tables) -> Tensor:
    """(frame, source) and levels in dB, (frame, source) or (frame, level) -> (frame, channel)."""
    level = levels_db
    if len(tables.before):
        low, high = (levels_db[:, tables.before + i] for i in (0, 1))
        level = torch.lerp(low, high, tables.share)
    slope = (level * tables.line[0] + tables.line[1]).clamp(min=0.0)
    x = slope[:, None] * tables.away.clamp(min=0.0)
    weight = torch.where(tables.away > 0, (1.0 + x) * torch.exp(-x), 0.0)
    below = (intensity[:, None] * weight).sum(-1)
    return _decibels(below + intensity @ tables.upper)
