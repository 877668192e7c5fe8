"""The vector exponential against numpy's, over its whole range."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from amtcore.recurrence.simd import LANES, vexp, vload, vstore


@njit
def _exp(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x) // LANES):
        vstore(out, i * LANES, vexp(vload(x, i * LANES)))


@pytest.mark.parametrize(("dtype", "low", "ulps"), [("float32", -79, 4), ("float64", -699, 4)])
def test_exponential(dtype: str, low: float, ulps: int) -> None:
    x = np.linspace(low, 79, 1000 * LANES).astype(dtype)
    out = np.empty_like(x)
    _exp(x, out)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(out.astype(np.float64) - expected) / expected
    # The argument reduction keeps the relative error near the rounding of x * log2(e).
    assert error.max() < ulps * np.finfo(dtype).eps
