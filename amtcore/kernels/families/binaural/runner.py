"""From tensors to the kernel: frames go to threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.families.binaural.cpu import SIDE, run_inhibition
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

#: Frames of one work item.
_ITEM_FRAMES = 128


def inhibition(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Both ears over their divisors.

    Args:
        left: (frame, channel), as right.
        smoothing: (channel, channel).
        p: Exponent, a number.
    """
    frames, channels = left.shape
    weights = torch.nn.functional.pad(smoothing, (0, -channels % SIDE))
    flat = weights.unflatten(1, (-1, SIDE)).transpose(0, 1).contiguous().numpy().ravel()
    ears = [ear.contiguous().numpy().ravel() for ear in (left, right)]
    padded, exponent = frames + -frames % LANES, p.reshape(1).numpy()
    made = [np.empty((padded, channels), np.float32) for _ in ears]
    flat_made = [ear.reshape(-1) for ear in made]

    def one(item: int) -> None:
        begin, end = item * _ITEM_FRAMES, min((item + 1) * _ITEM_FRAMES, padded)
        run_inhibition(*ears, channels, frames, begin, end, flat, exponent, *flat_made)

    parallel_for(one, -(-padded // _ITEM_FRAMES))
    of_left, of_right = (torch.from_numpy(ear[:frames]) for ear in made)
    return of_left, of_right
