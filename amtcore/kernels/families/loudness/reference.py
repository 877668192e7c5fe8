"""Components to nodes and excitation to specific loudness, plainly; these have gradients.

See `amtcore.stages.component_nodes` and `amtcore.stages.specific_loudness` for what they mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Excitation where the law for very high levels begins.
HIGH_EXCITATION = 1e10
PER_DB = math.log(10.0) / 10.0


def audible(intensity: Tensor, least: Tensor) -> Tensor:
    """Components that lie above the least of their frame; the others are 0."""
    return intensity * (intensity.detach() > least)


def law_rows(c: Tensor, threshold_db: Tensor, alpha: Tensor, a: Tensor, flat_db: float) -> Tensor:
    """Constants of the compressive law by channel, (5, channel).

    Args:
        c: Scale in sone per Cam, a number.
        threshold_db: Excitation at threshold, (channel,); alpha and a likewise.
        flat_db: The threshold at 500 Hz and above.
    Returns:
        Gain / A, alpha, C A^alpha, excitation at threshold, log C.
    """
    ratio = torch.exp(PER_DB * (flat_db - threshold_db)) / a
    threshold = torch.exp(PER_DB * threshold_db)
    return torch.stack((ratio, alpha, c * a**alpha, threshold, torch.log(c).expand_as(a)))


def specific_loudness(
    level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float
) -> Tensor:
    """Excitation in dB SPL to sone per Cam.

    Args:
        level_db: (.., channel).
        rows: Of `law_rows`.
        high_divisor: Of the law at very high levels, as its exponent.
    Returns:
        The same shape as `level_db`.
    """
    ratio, alpha, scale, threshold, log_c = rows
    log_e = PER_DB * level_db
    e = torch.exp(log_e)
    # A^alpha ((1 + G E / A)^alpha - 1), without the cancellation of the published form.
    loudness = scale * torch.expm1(alpha * torch.log1p(ratio * e))
    faint = (2.0 * e / (e + threshold)).clamp(max=1.0) ** 1.5
    # log E is the input: no overflow, whatever the level.
    high = torch.exp(high_exponent * (log_e - math.log(high_divisor)) + log_c)
    return torch.where(e >= HIGH_EXCITATION, high, loudness * faint)
