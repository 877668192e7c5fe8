"""Frames of a clip: which lie in a stretch of time, and their values in the unit of the stream."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

# Seconds times frames per second lands this close to a whole frame by rounding alone.
FRAME_EPSILON = 1e-6


def unscaled(stored: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """Stored values in their unit; exact in float32, as scales are powers of two."""
    if scale == 1.0:
        return stored.astype(dtype, copy=False)
    exact = np.result_type(stored.dtype, np.float32, dtype)
    return (stored.astype(exact) * exact.type(scale)).astype(dtype, copy=False)


def frame_range(
    stream: StreamInfo, n_frames: int, start_s: float, stop_s: float
) -> tuple[int, int]:
    """Frames [first, last) of a clip that overlap [start_s, stop_s); numbers of a clip always."""
    if stream.frame_rate_hz == 0:
        return 0, n_frames
    first = math.floor(start_s * stream.frame_rate_hz + FRAME_EPSILON)
    last = min(n_frames, math.ceil(min(stop_s * stream.frame_rate_hz, n_frames) - FRAME_EPSILON))
    return min(first, n_frames), max(min(first, n_frames), last)
