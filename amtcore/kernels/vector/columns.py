"""Sums and extremes of the columns of a table of numbers, in one pass over it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from amtcore.kernels.vector.jit import kernel

Sums = NDArray[np.float64]


def add_columns(
    rows: NDArray[np.float32], sums: Sums, squares: Sums, low: Sums, high: Sums
) -> None:
    """Add (n, width) finite numbers to the sums, sums of squares and extremes of their columns,
    (width,) each: row after row, in float64."""
    into = (sums, squares, low, high)
    if not all(each.shape == rows.shape[1:] and each.dtype == np.float64 for each in into):
        raise ValueError(f"expected float64 of shape {rows.shape[1:]} to add to")
    _add_columns(np.ascontiguousarray(rows), *into)


@kernel
def _add_columns(rows, sums, squares, low, high):  # type: ignore[no-untyped-def]
    for t in range(len(rows)):
        row = rows[t]
        for c in range(len(row)):
            number = np.float64(row[c])
            sums[c] += number
            squares[c] += number * number
            low[c] = number if number < low[c] else low[c]
            high[c] = number if number > high[c] else high[c]
