"""Functions written as text, so that what they call and pass on is constant: see `forward`."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numba import njit

_numbers = itertools.count()


def write(parameters: str, lines: Sequence[str], scope: Mapping[str, Any]) -> Callable[..., Any]:
    """A compiled function with these parameters and lines.

    Args:
        parameters: As between the parentheses of a definition.
        lines: The body; "pass" where there are none.
        scope: What the lines may name.
    """
    text = f"def written({parameters}):\n" + "".join(f"    {line}\n" for line in lines or ["pass"])
    # Where numba looks for the source it shows in its errors.
    name = f"<written {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace = dict(scope)
    exec(compile(text, name, "exec"), namespace)
    function: Callable[..., Any] = njit(namespace["written"])
    return function
