"""The comparison helper must see an error wherever it is planted."""

from __future__ import annotations

import numpy as np
import pytest

from .compare import Tolerance, assert_close, relative_error

TOLERANCE = Tolerance(1e-3, "test")


@pytest.mark.parametrize("index", [0, 50, 99])
def test_planted_error_fails(index: int) -> None:
    expected = np.ones(100)
    got = expected.copy()
    got[index] += 0.011  # norm(expected) is 10: just above 1e-3 relative
    with pytest.raises(AssertionError, match="above"):
        assert_close(got, expected, TOLERANCE)
    got[index] -= 0.002
    assert_close(got, expected, TOLERANCE)


def test_shape_and_non_finite_fail() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.ones(3), np.ones(4), TOLERANCE)
    with pytest.raises(AssertionError, match="finite"):
        assert_close(np.array([np.nan]), np.ones(1), TOLERANCE)


def test_relative_error_of_zero_reference() -> None:
    assert relative_error([0.0], [0.0]) == 0.0
    assert relative_error([1.0], [0.0]) == float("inf")
