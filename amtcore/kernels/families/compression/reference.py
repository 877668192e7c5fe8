"""The broken stick, in torch: the check for the kernel, and what runs on other devices.

    |x| > knee:  y = sign(x) b |x|^c      else:  y = a x

With knee = (b/a)^(1/(1-c)) and c < 1 this is sign(x) min(a |x|, b |x|^c) (Meddis, O'Mard and
Lopez-Poveda 2001, eq. 1); with knee = 0 it is a power law.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Amplitudes below this count as this in the power law: it is float32's smallest normal number.
SMALLEST = 1.2e-38


def broken_stick(x: Tensor, coef: Tensor) -> Tensor:
    """Compress every sample on its own.

    Args:
        x: (batch, channel, time).
        coef: (channel, 4): a, b, c, knee. The knee has no gradient: both pieces agree there.
    """
    a, b, c, knee = coef.unsqueeze(-1).unbind(-2)
    size = x.abs()
    above = size > knee
    # Below the knee the power law is not used; 1 keeps its gradient finite.
    base = torch.where(above, size, 1.0).clamp(min=SMALLEST)
    power = b * torch.exp(c * torch.log(base))
    return torch.where(above, power * x.sign(), a * x)
