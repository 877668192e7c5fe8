"""Cascades of n equal complex one-pole sections, as a plain loop over time.

    all-pole gammatone:   z_1[t] = p z_1[t-1] + x[t],        y[t] = g Re z_n[t]
                          z_k[t] = p z_k[t-1] + z_{k-1}[t]
    pole-zero gammatone:  z_k[t] = p z_k[t-1] + y_{k-1}[t],  y_k[t] = g Re z_k[t],  y_0 = x

The polynomial (direct) form of the same filters loses digits because an n-fold pole splits under
rounding. Taking the real part in between gives each section a zero at Re p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.biquad.reference import state_variable
from amtcore.kernels.families.over_time import over_time

# Kinds of modulation filter.
STATE_VARIABLE = 0
REAL = 1
MODULUS = 2
TWO_SECTIONS = 4


def one_pole_cascade(x: Tensor, coef: Tensor, state: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Run the cascade.

    Args:
        x: (batch, channel, time) or (batch, 1, time), real.
        coef: (channel, 3): real and imaginary part of the pole, gain.
        state: (batch, channel, 2 * order): real and imaginary part of each section.
        order: Number of sections.
    Returns:
        y (batch, channel, time) and the state after the last sample.
    """
    p_re, p_im, gain = coef.unbind(-1)
    z = list(state.unflatten(-1, (order, 2)).unbind(-2))
    samples = []
    for sample in x.unbind(-1):
        value = torch.stack((sample, torch.zeros_like(sample)), -1)
        for k in range(order):
            value = z[k] = _turned(p_re, p_im, z[k]) + value
        samples.append(gain * z[-1][..., 0])
    return over_time(samples, state), torch.stack(z, -2).flatten(-2)


def _turned(p_re: Tensor, p_im: Tensor, z: Tensor) -> Tensor:
    """p z, real and imaginary parts on the last axis: torch's own complex numbers make NaN of both
    parts where one is infinite."""
    re, im = z.unbind(-1)
    return torch.stack((p_re * re - p_im * im, p_re * im + p_im * re), -1)


def pole_zero_cascade(x: Tensor, coef: Tensor, state: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Run the cascade whose sections pass on their real parts; arguments as above, the gain being
    that of one section."""
    p_re, p_im, gain = coef.unbind(-1)
    z = list(state.unflatten(-1, (order, 2)).unbind(-2))
    samples = []
    for sample in x.unbind(-1):
        value = sample
        for k in range(order):
            z[k] = _with_real(_turned(p_re, p_im, z[k]), value)
            value = gain * z[k][..., 0]
        samples.append(value)
    return over_time(samples, state), torch.stack(z, -2).flatten(-2)


def _with_real(z: Tensor, value: Tensor) -> Tensor:
    """z + value of a real value."""
    return torch.stack((z[..., 0] + value, z[..., 1]), -1)


def modulation_bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor]:
    """Filters of all channels side by side: filter w of channel f takes x[:, f].

    Args:
        x: (batch, channel, time).
        coef: (filter, 6); the complex kinds use pole real, pole imaginary, input gain, output
            gain, the state-variable kind its six; (filter, 12) for two sections in series.
        state: (batch, filter, 2), or 4 for two sections.
        kinds: What the m-th filter of every channel is: `STATE_VARIABLE`, `REAL`, `MODULUS` or
            `TWO_SECTIONS`.
        offsets: (channel + 1), cuts the filters into channels.
    Returns:
        y (batch, filter, time) and the state after the last sample.
    """
    outputs, states = [], []
    for channel in range(x.shape[1]):
        for w in range(offsets[channel], offsets[channel + 1]):
            kind, part = kinds[w - offsets[channel]], slice(w, w + 1)
            source, before = x[:, channel : channel + 1], state[:, part]
            if kind == STATE_VARIABLE:
                y, after = state_variable(source, coef[part], before)
            elif kind == TWO_SECTIONS:
                middle, first = state_variable(source, coef[part, :6], before[..., :2])
                y, second = state_variable(middle, coef[part, 6:], before[..., 2:])
                after = torch.cat((first, second), -1)
            else:
                y, after = _complex_filter(source, coef[w], before, kind == MODULUS)
            outputs.append(y)
            states.append(after)
    return torch.cat(outputs, 1), torch.cat(states, 1)


def _complex_filter(x: Tensor, coef: Tensor, state: Tensor, modulus: bool) -> tuple[Tensor, Tensor]:
    """y = g_out (Re z | |z|) with z[t] = p z[t-1] + g_in x[t]."""
    z, samples = state, []
    for sample in x.unbind(-1):
        z = _with_real(_turned(coef[0], coef[1], z), coef[2] * sample)
        size = torch.linalg.vector_norm(z, dim=-1) if modulus else z[..., 0]
        samples.append(coef[3] * size)
    return over_time(samples, state), z
