"""Numbers of Python, numpy and torch as Python's own; imports no torch."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def plain_number(value: Any) -> int | float | None:
    """Return a number as int or float; None for anything else, also for True and False.

    An array or a tensor of one value is a number.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) == 1 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        return None
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:
        return math.inf
