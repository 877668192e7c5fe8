"""Numbers for the tests of PTX instructions, and how results are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RNG = np.random.default_rng(12)
N = 32 * 16


def floats(kind: Any, *edges: float) -> Array:
    """Random bits, so of every size, and edges."""
    width = np.dtype(kind).itemsize
    x = RNG.integers(0, 256, N * width, np.uint8).view(kind)
    x[: len(edges)] = edges
    return RNG.permutation(x)


EDGES = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**31, -(2.0**31), 0.5)


def same(got: Array, want: Array) -> None:
    """Equal, NaN where NaN is wanted, and zeros of the same sign."""
    np.testing.assert_array_equal(got, want)
    if got.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def flushed(x: Array) -> Array:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)
