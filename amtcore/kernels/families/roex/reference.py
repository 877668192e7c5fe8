"""Excitation by components below a filter's centre (Glasberg and Moore 1990), plainly.

    E[n, k] = sum over f[j] < fc[k] of I[n, j] (1 + x) exp(-x),   x = s[n, j] r[k] (fc[k] - f[j])

r is the slope of the filter per Hz at the reference level and s the factor by which the level at
the component changes it. Components above the centre have a fixed slope: a matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lower_skirt(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    """Excitation of every filter by the components below its centre.

    Args:
        intensity: (frame, component), 0 for a component that is not there.
        slope: (frame, component), 0 or more.
        rate: (filter,), per Hz.
        fc_hz: (filter,), ascending.
        f_hz: (component,), ascending.
    Returns:
        (frame, filter).
    """
    distance = fc_hz[:, None] - f_hz
    x = slope[:, None] * (rate[:, None] * distance).clamp(min=0.0)
    weight = torch.where(distance > 0, (1.0 + x) * torch.exp(-x), 0.0)
    return (intensity[:, None] * weight).sum(-1)


def lower_skirt_gradients(
    intensity: Tensor, slope: Tensor, gout: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of intensity, slope and rate, as automatic differentiation of the above has them.

    Args:
        gout: (frame, filter), the gradient of the excitation; the others as above.
    """
    distance = fc_hz[:, None] - f_hz
    away = rate[:, None] * distance
    x = slope[:, None] * away.clamp(min=0.0)
    e = torch.exp(-x)
    weight = torch.where(distance > 0, (1.0 + x) * e, 0.0)
    g_weight = torch.where(distance > 0, gout[..., None] * intensity[:, None], 0.0)
    g_x = g_weight * e - g_weight * (1.0 + x) * e
    g_away = torch.where(away >= 0, (g_x * slope[:, None]).sum(0), 0.0)
    return (
        (gout[..., None] * weight).sum(1),
        (g_x * away.clamp(min=0.0)).sum(1),
        (g_away * distance).sum(1),
    )
