"""Which cases of a test `make test` runs; `make test-long` runs the others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

#: `make test-long` sets it, and runs the tests of drawn examples with all of them.
IS_LONG = bool(os.environ.get("EARMILL_TEST_LONG"))


def only(chosen: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the chosen ones in `make test`, the others in `make test-long`."""
    kept = list(chosen)
    return [one if one in kept else pytest.param(one, marks=pytest.mark.long) for one in cases]


def but(slow: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the slow ones in `make test-long`, the others in `make test`."""
    left = list(slow)
    return [pytest.param(one, marks=pytest.mark.long) if one in left else one for one in cases]


def some(step: int, cases: Iterable[Any], start: int = 0) -> list[Any]:
    """Cases for `parametrize`: one in `step` in `make test`, the others in `make test-long`.

    Tests of the same cases take different `start`s below `step`, so that each case is in some test.
    """
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=[pytest.mark.long] * (number % step != start),
        )
        for number, one in enumerate(cases)
    ]


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


def drawn(examples: int, **options: Any) -> settings:
    """Settings of Hypothesis: a third of the examples in `make test`, all in `make test-long`.

    No example has a deadline: the machine may be busy.
    """
    count = examples if IS_LONG else max(5, examples // 3)
    return settings(max_examples=count, deadline=None, **options)
