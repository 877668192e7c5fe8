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
