"""Attack and release (Glasberg and Moore 2002), plain loop.

    y[t] = y[t-1] + c (x[t] - y[t-1]),   c = attack where x[t] > y[t-1], else release

The same as y[t] = c x[t] + (1 - c) y[t-1]; written so that a steady input is a fixed point exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attack_release(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Smooth every channel.

    Args:
        x: (batch, frame, channel).
        coef: (channel, 2): attack and release, 0..1.
        state: (batch, channel): the output before the first frame.
    Returns:
        y (batch, frame, channel) and the state after the last frame.
    """
    attack, release = coef.unbind(-1)
    y, frames = state, []
    for frame in x.unbind(1):
        y = y + torch.where(frame > y, attack, release) * (frame - y)
        frames.append(y)
    return (torch.stack(frames, 1) if frames else x.clone()), y.clone()
