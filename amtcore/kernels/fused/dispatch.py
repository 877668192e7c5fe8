"""From a table of compiled functions to one compiled function that picks by code.

Compiled code calls what was known when it was compiled: it cannot look a function up in a dict. So
`dispatcher` composes, once at import, from every entry of a table

    if the row's code is this entry's:  this entry's function      else:  the entries after it

and lets the last one raise. The calls are static and may be inlined, as in a chain of `elif` that
is written by hand; but what is not in the table has no function to fall into. A block holds
hundreds of samples, so the comparisons in front of it cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba import njit

from amtcore.errors import ParameterError


def dispatcher(kernels: Mapping[int, Any], missing: str) -> Any:
    """The compiled function (row, *arguments) that calls `kernels[row[0]]` with the same.

    Args:
        kernels: Code -> compiled function; all take the same arguments and return the same type.
        missing: What to raise, as a `ParameterError`, where the row has another code.
    """
    entries = list(kernels.items())
    pick = _last(*entries.pop(), missing)
    while entries:
        pick = _either(*entries.pop(), pick)
    return pick


def _last(code: int, kernel: Any, missing: str) -> Any:
    @njit
    def pick(row: Any, *arguments: Any) -> Any:
        if row[0] != code:
            raise ParameterError(missing)
        return kernel(row, *arguments)

    return pick


def _either(code: int, kernel: Any, otherwise: Any) -> Any:
    @njit
    def pick(row: Any, *arguments: Any) -> Any:
        if row[0] == code:
            return kernel(row, *arguments)
        return otherwise(row, *arguments)

    return pick
