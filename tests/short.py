"""Which cases of a test `make test` runs; `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
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
