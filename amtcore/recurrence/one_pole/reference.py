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

from ..biquad.reference import state_variable

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
    p = torch.complex(coef[:, 0], coef[:, 1])
    z = list(torch.view_as_complex(state.reshape(*state.shape[:2], order, 2)).unbind(-1))
    samples = []
    for sample in x.unbind(-1):
        value = sample.to(p.dtype)
        for k in range(order):
            value = z[k] = p * z[k] + value
        samples.append(coef[:, 2] * z[-1].real)
    last = torch.view_as_real(torch.stack(z, -1)).reshape(state.shape)
    return torch.stack(samples, -1), last


def pole_zero_cascade(x: Tensor, coef: Tensor, state: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Run the cascade whose sections pass on their real parts; arguments as above, the gain being
    that of one section."""
    p = torch.complex(coef[:, 0], coef[:, 1])
    z = list(torch.view_as_complex(state.reshape(*state.shape[:2], order, 2)).unbind(-1))
    samples = []
    for sample in x.unbind(-1):
        value = sample
        for k in range(order):
            z[k] = p * z[k] + value
            value = coef[:, 2] * z[k].real
        samples.append(value)
    last = torch.view_as_real(torch.stack(z, -1)).reshape(state.shape)
    return torch.stack(samples, -1), last


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
    p = torch.complex(coef[0], coef[1])
    z = torch.complex(state[..., 0], state[..., 1])
    samples = []
    for sample in x.unbind(-1):
        z = p * z + coef[2] * sample
        samples.append(coef[3] * (z.abs() if modulus else z.real))
    return torch.stack(samples, -1), torch.view_as_real(z)
