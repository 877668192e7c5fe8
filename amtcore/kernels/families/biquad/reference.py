"""First-order and second-order sections, as plain loops over time.

The second-order section is the state-variable form of the bilinear transform (Zavalishin, The Art
of VA Filter Design, 2018, section 4.4): with g = tan(pi f/fs), k = 1/Q and two integrator states

    a1 = 1 / (1 + g (g + k)),  a2 = g a1,  a3 = g a2
    v3 = x - i2,  band = a1 i1 + a2 v3,  low = i2 + a2 i1 + a3 v3
    i1 = 2 band - i1,  i2 = 2 low - i2,  y = m0 x + m1 band + m2 low

It is the same filter as b, a, but its coefficients keep their digits at 2 Hz and 44.1 kHz, where
1 + a1 + a2 is 1e-7 and float32 direct-form coefficients are noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.over_time import over_time


def first_order(x: Tensor, coef: Tensor, state: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    """y[t] = b0 x[t] + b1 x[t-1] - a1 y[t-1], transposed direct form; x half-wave rectified first
    when `rectify`.

    Args:
        x: (batch, channel, time).
        coef: (channel, 3): b0, b1, a1.
        state: (batch, channel, 1).
    """
    b0, b1, a1 = coef.unbind(-1)
    z = state[..., 0]
    samples = []
    for sample in x.unbind(-1):
        value = sample.clamp(min=0) if rectify else sample
        y = b0 * value + z
        z = b1 * value - a1 * y
        samples.append(y)
    return over_time(samples, state), z.unsqueeze(-1)


def state_variable(
    x: Tensor, coef: Tensor, state: Tensor, rectify: bool = False
) -> tuple[Tensor, Tensor]:
    """Second-order section; x half-wave rectified first when `rectify`.

    Args:
        x: (batch, channel, time).
        coef: (channel, 6): a1, a2, a3, m0, m1, m2.
        state: (batch, channel, 2): the two integrators.
    """
    a1, a2, a3, m0, m1, m2 = coef.unbind(-1)
    i1, i2 = state.unbind(-1)
    samples = []
    for raw in x.unbind(-1):
        sample = raw.clamp(min=0) if rectify else raw
        v3 = sample - i2
        band = a1 * i1 + a2 * v3
        low = i2 + a2 * i1 + a3 * v3
        i1, i2 = 2 * band - i1, 2 * low - i2
        samples.append(m0 * sample + m1 * band + m2 * low)
    return over_time(samples, state), torch.stack((i1, i2), -1)
