"""Chain operations by name, built in or registered by another distribution.

    [project.entry-points."amtcore.operations"]
    leaky_peak = "mypackage.leaky_peak:LEAKY_PEAK"

The CPU kernels are compiled for all built-in operations together. A chain with other operations
gets kernels for its own operations.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from amtcore.errors import ParameterError
from amtcore.kernels.operation import ChainOperation
from amtcore.kernels.operations.adaptation import ADAPTATION
from amtcore.kernels.operations.compression import BROKEN_STICK, SQUARE
from amtcore.kernels.operations.fir import DECIMATE
from amtcore.kernels.operations.hair_cell import HAIR_CELL
from amtcore.kernels.operations.one_pole import ONE_POLE_CASCADE, POLE_ZERO_CASCADE
from amtcore.kernels.operations.parallel_paths import ADD, SAVE, SWAP
from amtcore.kernels.operations.sections import FIRST_ORDER, STATE_VARIABLE

#: Entry points of operations.
GROUP = "amtcore.operations"
BUILT_IN: tuple[ChainOperation, ...] = (
    ONE_POLE_CASCADE, FIRST_ORDER, STATE_VARIABLE, ADAPTATION, POLE_ZERO_CASCADE, BROKEN_STICK,
    SQUARE, HAIR_CELL, SAVE, SWAP, ADD, DECIMATE,
)  # fmt: skip
_BUILT_IN = {operation.name: operation for operation in BUILT_IN}


@functools.cache
def get_operation(name: str) -> ChainOperation:
    """Return an operation by its name.

    Raises:
        ParameterError: The name is unknown, or two distributions claim it.
    """
    found = list(entry_points(group=GROUP, name=name))
    claims = ["amtcore"] * (name in _BUILT_IN) + [each.value for each in found]
    if len(claims) > 1:
        raise ParameterError(
            f"operation {name!r} is claimed by {' and '.join(claims)}; uninstall all but one"
        )
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if not found:
        known = ", ".join(sorted({*_BUILT_IN, *entry_points(group=GROUP).names}))
        raise ParameterError(
            f"no operation is called {name!r}: expected one of {known}; other distributions "
            f"register theirs as entry points of the group {GROUP!r}"
        )
    operation = found[0].load()
    if not isinstance(operation, ChainOperation) or operation.name != name:
        raise ParameterError(
            f"entry point {name} = {found[0].value!r} of {GROUP}: expected a ChainOperation called "
            f"{name!r}, got {operation!r}"
        )
    return operation
