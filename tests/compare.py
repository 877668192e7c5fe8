"""The one comparison of the suite: relative error over a whole array, with a named tolerance.

    error = norm(got - expected) <= relative * norm(expected) + absolute * sqrt(size)

`absolute` is for arrays that hold nothing but rounding noise (a channel below its threshold).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Bound on the error and the reason for it."""

    relative: float
    reason: str
    absolute: float = 0.0


#: Float64 stages against the stored references, which carry their own rounding.
FLOAT64 = Tolerance(1e-6, "direct-form filters of the reference program", 1e-12)
#: Float32 stages; the absolute part (model units, full range 100) is for channels below threshold.
FLOAT32 = Tolerance(1e-3, "single-precision recurrences", 1e-6)
FLOAT32_MODULATION = Tolerance(2e-3, "single-precision recurrences after modulation", 1e-6)
#: A fast kernel against the plain loop in the same precision: another order of rounding.
KERNEL32 = Tolerance(2e-6, "fused multiply-add and other summation order", 1e-7)
KERNEL64 = Tolerance(1e-12, "fused multiply-add and other summation order", 1e-15)


def relative_error(got: Any, expected: Any) -> float:
    """norm(got - expected) / norm(expected); 0 for two equal arrays."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    difference, size = np.linalg.norm(a - b), np.linalg.norm(b)
    return 0.0 if difference == 0 else float(difference / size) if size else float("inf")


def assert_close(got: Any, expected: Any, tolerance: Tolerance, what: str = "") -> None:
    """Raise AssertionError when shapes differ, values are not finite, or the error is too big."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    assert np.isfinite(a).all(), f"{what}: not finite"
    error = float(np.linalg.norm(a - b))
    bound = tolerance.relative * float(np.linalg.norm(b)) + tolerance.absolute * b.size**0.5
    assert error <= bound, (
        f"{what}: error {error:.3g} above {bound:.3g} (relative {relative_error(a, b):.3g}, "
        f"allowed {tolerance.relative:g} for {tolerance.reason})"
    )
