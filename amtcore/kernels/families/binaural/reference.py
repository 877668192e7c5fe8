"""Binaural inhibition (Moore, Glasberg and Schlittenlacher 2016), plainly; this has gradients.

See `amtcore.stages.binaural_loudness` for what it means.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Added to the smoothed loudness, so that silence divides by something.
TINY = 1e-13
#: Ratio of the ears beyond which nothing changes: sech(40) is 1e-17.
LARGEST_RATIO = 40.0


def divisor(own: Tensor, other: Tensor, p: Tensor) -> Tensor:
    """What an ear's loudness is divided by where the smoothed loudness is `own`, and `other` at the
    other ear; p is the exponent, a number."""
    ratio = (other / own).clamp(max=LARGEST_RATIO)
    sech = 2.0 * torch.exp(-ratio) / (1.0 + torch.exp(-2.0 * ratio))
    return 2.0 / (1.0 + sech**p)
