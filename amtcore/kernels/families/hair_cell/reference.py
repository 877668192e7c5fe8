"""Receptor potential of an inner hair cell (Paulick et al. 2024), forward Euler, plain loop.

With u the potential above rest, p the open probability of the transduction channels, v the
velocity of the basilar membrane and conductances in units of (fs Cm):

    p = 1 / (1 + e1 (1 + e0)),  e1 = exp(o1 + q1 v),  e0 = exp(o0 + q0 v)
    g = g_max p
    u = u - (g + g_k) u + (g - g_rest) drive + leak

This is V += -(G (V - EP) + Gkf (V - Ekf) + Gks (V - Eks)) / (fs Cm) with V = V_0 + u taken apart:
drive = EP - V_0, and leak is what is left at V_0 with the conductance at rest (almost nothing).
Working on u keeps float32's digits for the signal, which is 1e-6 of V at threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.over_time import over_time

#: The exponents end here, where the channel is closed for good (p < 1e-17).
LARGEST_EXPONENT = 40.0


def hair_cell(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the membrane.

    Args:
        x: (batch, channel, time), velocity.
        coef: (channel, 9): o1, q1, o0, q0, g_max, g_k, g_rest, drive, leak.
        state: (batch, channel, 1): u.
    """
    o1, q1, o0, q0, g_max, g_k, g_rest, drive, leak = coef.unbind(-1)
    u = state[..., 0]
    samples = []
    for v in x.unbind(-1):
        e1 = torch.exp((o1 + q1 * v).clamp(max=LARGEST_EXPONENT))
        e0 = torch.exp((o0 + q0 * v).clamp(max=LARGEST_EXPONENT))
        g = g_max / (1 + e1 * (1 + e0))
        u = u - (g + g_k) * u + ((g - g_rest) * drive + leak)
        samples.append(u)
    return over_time(samples, state), u.unsqueeze(-1)
