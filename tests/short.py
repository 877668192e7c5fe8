"""Which cases of a test `make test` runs; `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def only(chosen: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the chosen ones in `make test`, the others in `make test-long`."""
    kept = list(chosen)
    return [one if one in kept else pytest.param(one, marks=pytest.mark.long) for one in cases]


def but(slow: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the slow ones in `make test-long`, the others in `make test`."""
    left = list(slow)
    return [pytest.param(one, marks=pytest.mark.long) if one in left else one for one in cases]


def spread(step: int, *axes: Iterable[Any]) -> list[Any]:
    """Combinations for `parametrize`: one in `step` in `make test`, the others in `make test-long`.

    Neighbours on one axis differ on the others: all values of an axis that is as long stay.
    """
    numbered = product(*(enumerate(axis) for axis in axes))
    split = (tuple(zip(*each, strict=True)) for each in numbered)
    return [
        pytest.param(*values, marks=[pytest.mark.long] * (sum(numbers) % step > 0))
        for numbers, values in split
    ]
