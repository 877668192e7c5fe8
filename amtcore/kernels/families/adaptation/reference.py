"""Adaptation loops (Dau, Pueschel and Kohlrausch 1996, section II; limiter of 1997), plain loop.

Per loop j, with the divisor s_j as state and y the output of loop j-1 (the input floored at the
minimum level for the first loop):

    y = y / s_j
    y = 2 m_j / (1 + exp(-2 (y - 1) / m_j)) - (m_j - 1)   where y > 1 and the limiter is on
    s_j = s_j + (1 - a_j) (y - s_j)

The output is scaled so that the minimum level maps to 0 and an input of 1 (100 dB) to 100.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.over_time import over_time


def adaptation(x: Tensor, coef: Tensor, state: Tensor, limit: bool) -> tuple[Tensor, Tensor]:
    """Run the loops.

    Args:
        x: (batch, channel, time).
        coef: (channel, 3 + 3 loops): minimum level, output offset c, output scale 100 / (1 - c),
            then 1 - a_j, m_j and -2 / m_j of each loop (the last two unused without `limit`).
        state: (batch, channel, loop): the divisors.
        limit: Whether overshoot is limited.
    """
    floor, offset, scale = coef[:, :3].unbind(-1)
    rise, most, steepness = coef[:, 3::3], coef[:, 4::3], coef[:, 5::3]
    s = list(state.unbind(-1))
    samples = []
    for sample in x.unbind(-1):
        y = torch.maximum(sample, floor)
        for j in range(len(s)):
            y = y / s[j]
            if limit:
                m = most[:, j]
                # Up to 1 the limiter is off, and exp might overflow, which has no gradient. (The
                # gradient of clamp is 0 at NaN.)
                power = steepness[:, j] * (y - 1)
                power = torch.where(power > 0, torch.zeros_like(power), power)
                limited = 2 * m / (1 + torch.exp(power)) - (m - 1)
                y = torch.where(y > 1, limited, y)
            s[j] = s[j] + rise[:, j] * (y - s[j])
        samples.append((y - offset) * scale)
    return over_time(samples, state), torch.stack(s, -1)
