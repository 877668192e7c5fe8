"""From tensors to the kernel: frames go to threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.families.binaural.cpu import SIDE, run_inhibition
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

Array = NDArray[Any]

#: Frames of one work item.
_ITEM_FRAMES = 128


def sides_of(smoothing: Tensor) -> Array:
    """Weights (channel, channel) as the kernel reads them."""
    weights = torch.nn.functional.pad(smoothing.detach(), (0, -len(smoothing) % SIDE))
    flat: Array = weights.unflatten(1, (-1, SIDE)).transpose(0, 1).contiguous().numpy().ravel()
    return flat


def inhibition(left: Tensor, right: Tensor, smoothing: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Both ears over their divisors.

    Args:
        left: (frame, channel), as right.
        smoothing: (channel, channel).
        p: Exponent, a number.
    """
    (frames, channels), sides = left.shape, sides_of(smoothing)
    ears = [ear.contiguous().numpy().ravel() for ear in (left, right)]
    return _run(ears, channels, channels, frames, sides, p)


def inhibition_of_rows(
    rows: Tensor, channels: int, sides: Array, p: Tensor
) -> tuple[Tensor, Tensor]:
    """As `inhibition`, of rows (frame, channel or more), those of the left ear before those of the
    right.

    Args:
        channels: Of an ear.
        sides: Of `sides_of`.
    """
    flat = rows.numpy().reshape(-1)
    return _run([flat, flat[channels:]], rows.shape[1], channels, len(rows), sides, p)


def _run(
    ears: list[Array], pitch: int, channels: int, frames: int, sides: Array, p: Tensor
) -> tuple[Tensor, Tensor]:
    padded, exponent = frames + -frames % LANES, p.detach().reshape(1).numpy()
    made = [np.empty((padded, channels), np.float32) for _ in ears]
    flat_made = [ear.reshape(-1) for ear in made]

    def one(item: int) -> None:
        begin, end = item * _ITEM_FRAMES, min((item + 1) * _ITEM_FRAMES, padded)
        run_inhibition(*ears, pitch, channels, frames, begin, end, sides, exponent, *flat_made)

    parallel_for(one, -(-padded // _ITEM_FRAMES))
    of_left, of_right = (torch.from_numpy(ear[:frames]) for ear in made)
    return of_left, of_right
