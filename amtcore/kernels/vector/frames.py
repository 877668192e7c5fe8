"""Arrays (value, frame), from which kernels read vectors of frames.

Rows lie an odd number of vectors apart. Rows a power of two apart would share a few cache sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

Array = NDArray[Any]

#: Frames of one work item.
ITEM_FRAMES = 128


def over_frames(one: Callable[[int, int], None], frames: int) -> None:
    """Call `one(begin, end)` on the pool for ranges of frames, rounded up to whole vectors."""
    padded = frames + -frames % LANES

    def item(i: int) -> None:
        one(i * ITEM_FRAMES, min((i + 1) * ITEM_FRAMES, padded))

    parallel_for(item, -(-padded // ITEM_FRAMES))


def new_rows(values: int, frames: int) -> tuple[Array, int, Tensor]:
    """Allocate `values` rows of whole vectors of frames.

    Returns the flat array, the distance of rows, and a view (frame, value) without padding.
    """
    vectors = -(-frames // LANES)
    pitch = (vectors + 1 - vectors % 2) * LANES
    rows = np.empty((values, pitch), np.float32)
    return rows.reshape(-1), pitch, torch.from_numpy(rows).T[:frames]


def rows_of(x: Tensor) -> tuple[Array, int]:
    """Return (frame, value) as flat rows, and their distance; a view if x has that layout."""
    frames, values = x.shape
    if x.stride(0) == 1 and frames % LANES == 0 and x.stride(1) >= frames:
        return _flat(x), x.stride(1)
    flat, pitch, rows = new_rows(values, frames)
    flat.reshape(values, pitch)[:, frames:] = 0.0
    rows.copy_(x)
    return flat, pitch


def _flat(x: Tensor) -> Array:
    """Return the memory from the first number of x to the last."""
    size = (x.shape[1] - 1) * x.stride(1) + x.shape[0] if x.numel() else 0
    memory: Array = x.as_strided((size,), (1,)).numpy()
    return memory
