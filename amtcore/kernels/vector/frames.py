"""Values of many frames with the frames of a value side by side: what a vector of frames is read
from.

Rows lie an odd number of vectors apart: rows a power of two apart share a few places of the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.vector.simd import LANES

Array = NDArray[Any]


def new_rows(values: int, frames: int) -> tuple[Array, int, Tensor]:
    """Room for `values` rows of frames, whole vectors of them: flat, numbers from one row to the
    next, and as (frame, value) without what fills the last vector."""
    vectors = -(-frames // LANES)
    pitch = (vectors + 1 - vectors % 2) * LANES
    rows = np.empty((values, pitch), np.float32)
    return rows.reshape(-1), pitch, torch.from_numpy(rows).T[:frames]


def rows_of(x: Tensor) -> tuple[Array, int]:
    """(frame, value) as such rows, flat, and from one to the next; in the memory of x where that
    is so made."""
    frames, values = x.shape
    if x.stride(0) == 1 and frames % LANES == 0 and x.stride(1) >= frames:
        return _flat(x), x.stride(1)
    flat, pitch, rows = new_rows(values, frames)
    flat.reshape(values, pitch)[:, frames:] = 0.0
    rows.copy_(x)
    return flat, pitch


def _flat(x: Tensor) -> Array:
    """The memory from the first number of x to the last."""
    size = (x.shape[1] - 1) * x.stride(1) + x.shape[0] if x.numel() else 0
    memory: Array = x.as_strided((size,), (1,)).numpy()
    return memory
