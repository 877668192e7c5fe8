"""A table of events (frame, channel, count) taken apart into its columns, in one pass over it.

numpy goes over the table once for every column, and over every column twice more to say between
which values it lies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from amtcore.kernels.vector.jit import kernel, read_only

COLUMNS = 3
# Lowest and highest frame, lowest and highest channel; of no events, those of an empty range.
Extremes = tuple[int, int, int, int]
Columns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]


def split(table: NDArray[np.int32]) -> tuple[Columns, Extremes]:
    """Fresh arrays of frames, channels and counts, and between which values the first two lie."""
    if table.ndim != 2 or table.shape[1] != COLUMNS or table.dtype != np.int32:
        raise ValueError(f"expected int32 (events, {COLUMNS}), got {table.dtype} {table.shape}")
    flat = read_only(np.ascontiguousarray(table).reshape(-1))
    columns = (
        np.empty(len(table), np.int64),
        np.empty(len(table), np.int32),
        np.empty(len(table), np.int32),
    )
    return columns, _split(flat, *columns)


@kernel
def _split(flat, frame, channel, count):  # type: ignore[no-untyped-def]
    first = lowest = np.int32(2**31 - 1)
    last = highest = np.int32(-(2**31))
    for k in range(len(frame)):
        step, neuron = flat[3 * k], flat[3 * k + 1]
        frame[k], channel[k], count[k] = step, neuron, flat[3 * k + 2]
        first, last = min(first, step), max(last, step)
        lowest, highest = min(lowest, neuron), max(highest, neuron)
    return first, last, lowest, highest
