"""The operations of the fused kernel: everything there is to know of each, in one table.

A program holds one row an operation: code, first coefficient row, first state row, and an integer
argument, whose meaning is the operation's own. The functions here read the row and call the block
functions of the families, which hold the equations. Operations act on the `n` samples in `a`; SAVE,
SWAP and ADD with a second buffer make two parallel paths of a signal.

    forward  (row, a, b, side, n, coef, state) -> samples after it; `b` is scratch
    adjoint  (row, x, gy, gx, n, coef, gcoef, state, gstate, scratch)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amtcore.errors import ParameterError
from amtcore.kernels.families.adaptation.cpu import adaptation_adjoint, adaptation_block
from amtcore.kernels.families.biquad.cpu import (
    first_order_adjoint,
    first_order_block,
    state_variable_adjoint,
    state_variable_block,
)
from amtcore.kernels.families.compression.cpu import (
    broken_stick_adjoint,
    broken_stick_block,
    square_block,
)
from amtcore.kernels.families.fir.cpu import decimate_block
from amtcore.kernels.families.hair_cell.cpu import hair_cell_adjoint, hair_cell_block
from amtcore.kernels.families.one_pole.cpu import (
    one_pole_cascade_adjoint,
    one_pole_cascade_block,
    pole_zero_cascade_adjoint,
    pole_zero_cascade_block,
)
from amtcore.kernels.fused.dispatch import dispatcher
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, vload, vstore

Size = Callable[[int], int]

# Codes, and what the argument says.
ONE_POLE_CASCADE = 0  # order
FIRST_ORDER = 1  # 1 to half-wave rectify the input
STATE_VARIABLE = 2  # as above
ADAPTATION = 3  # 2 * loops + limiter on
POLE_ZERO_CASCADE = 4  # order
BROKEN_STICK = 5
SQUARE = 6
HAIR_CELL = 7
SAVE = 8  # copy the signal aside
SWAP = 9  # exchange the signal with the one aside
ADD = 10  # add the one aside to the signal
DECIMATE = 11  # taps * 2**16 + samples per output


@dataclass(frozen=True)
class Operation:
    """One operation of the fused kernel.

    Args:
        name: What it is.
        forward: Its compiled function, see the module.
        coefs: Argument -> coefficients of a channel.
        values: Argument -> state values of a channel.
        adjoint: The compiled function of its gradients; None where there is none.
        taped: Argument -> rows of scratch a sample that the adjoint writes down.
    """

    name: str
    forward: Any
    coefs: Size
    values: Size
    adjoint: Any = None
    taped: Size = lambda argument: 0


def _always(count: int) -> Size:
    return lambda argument: count


def _twice(argument: int) -> int:
    """Real and imaginary part of each section."""
    return 2 * argument


@part(forceinline=True)
def _one_pole(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    one_pole_cascade_block(a, b, n, row[3], coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _one_pole_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    one_pole_cascade_adjoint(
        x, gy, gx, n, row[3], coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _first_order(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    first_order_block(a, a, n, row[3] == 1, coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _first_order_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    first_order_adjoint(
        x, gy, gx, n, row[3] == 1, coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _state_variable(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    state_variable_block(a, a, n, row[3] == 1, coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _state_variable_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    state_variable_adjoint(
        x, gy, gx, n, row[3] == 1, False, coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _adaptation(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    adaptation_block(a, n, row[3] // 2, row[3] % 2 == 1, coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _adaptation_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    adaptation_adjoint(
        x, gy, gx, n, row[3] // 2, row[3] % 2 == 1, coef, gcoef, row[1], state, gstate, row[2],
        scratch,
    )  # fmt: skip


@part(forceinline=True)
def _pole_zero(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    pole_zero_cascade_block(a, n, row[3], coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _pole_zero_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    pole_zero_cascade_adjoint(
        x, gy, gx, n, row[3], coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _broken_stick(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    broken_stick_block(a, n, coef, row[1])
    return n


@part(forceinline=True)
def _broken_stick_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    broken_stick_adjoint(x, gy, gx, n, coef, gcoef, row[1])


@part(forceinline=True)
def _square(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    square_block(a, n, coef, row[1])
    return n


@part(forceinline=True)
def _hair_cell(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    hair_cell_block(a, n, coef, row[1], state, row[2])
    return n


@part(forceinline=True)
def _hair_cell_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    hair_cell_adjoint(x, gy, gx, n, coef, gcoef, row[1], state, gstate, row[2], scratch)


@part(forceinline=True)
def _save(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    for t in range(n):
        vstore(side, t * LANES, vload(a, t * LANES))
    return n


@part(forceinline=True)
def _swap(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    for t in range(n):
        value = vload(a, t * LANES)
        vstore(a, t * LANES, vload(side, t * LANES))
        vstore(side, t * LANES, value)
    return n


@part(forceinline=True)
def _add(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    for t in range(n):
        vstore(a, t * LANES, vload(a, t * LANES) + vload(side, t * LANES))
    return n


@part(forceinline=True)
def _decimate(row: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    taps, stride = row[3] // 65536, row[3] % 65536
    return decimate_block(a, b, n, taps, stride, coef, row[1], state, row[2])


_NONE, _ONE, _TWO = _always(0), _always(1), _always(2)

OPERATIONS: dict[int, Operation] = {
    ONE_POLE_CASCADE: Operation(
        "one-pole cascade", _one_pole, _always(3), _twice, _one_pole_adjoint, _twice
    ),
    FIRST_ORDER: Operation(
        "first-order section", _first_order, _always(3), _ONE, _first_order_adjoint, _ONE
    ),
    STATE_VARIABLE: Operation(
        "second-order section", _state_variable, _always(6), _TWO, _state_variable_adjoint, _TWO
    ),
    ADAPTATION: Operation(
        "adaptation loops",
        _adaptation,
        lambda argument: 3 + 3 * (argument // 2),
        lambda argument: argument // 2,
        _adaptation_adjoint,
        lambda argument: 2 * (argument // 2),
    ),
    POLE_ZERO_CASCADE: Operation(
        "pole-zero cascade", _pole_zero, _always(3), _twice, _pole_zero_adjoint, _twice
    ),
    BROKEN_STICK: Operation(
        "broken stick", _broken_stick, _always(4), _NONE, _broken_stick_adjoint
    ),
    SQUARE: Operation("square", _square, _ONE, _NONE),
    HAIR_CELL: Operation("hair cell", _hair_cell, _always(9), _ONE, _hair_cell_adjoint, _ONE),
    SAVE: Operation("save", _save, _NONE, _NONE),
    SWAP: Operation("swap", _swap, _NONE, _NONE),
    ADD: Operation("add", _add, _NONE, _NONE),
    DECIMATE: Operation(
        "decimation", _decimate, lambda argument: argument >> 16, lambda argument: argument >> 16
    ),
}


def get_operation(code: int) -> Operation:
    """An operation by its code; raises where there is none."""
    if code not in OPERATIONS:
        known = ", ".join(f"{code} {each.name}" for code, each in OPERATIONS.items())
        raise ParameterError(f"the fused kernel has no operation {code}: expected one of {known}")
    return OPERATIONS[code]


def get_adjoint(code: int) -> Operation:
    """An operation that has gradients, by its code; raises where there is none."""
    operation = get_operation(code)
    if operation.adjoint is None:
        known = ", ".join(each.name for each in OPERATIONS.values() if each.adjoint is not None)
        raise ParameterError(
            f"operation {code} ({operation.name}) has no adjoint: expected one of {known}"
        )
    return operation


def forward_kernel(table: dict[int, Operation]) -> Any:
    """The compiled function that runs the operation of a row; raises where there is none."""
    kernels = {code: operation.forward for code, operation in table.items()}
    return dispatcher(kernels, "the fused kernel has no such operation: take a code of OPERATIONS")


def adjoint_kernel(table: dict[int, Operation]) -> Any:
    """The compiled function of the gradients of a row's operation; raises where it has none."""
    kernels = {code: operation.adjoint for code, operation in table.items() if operation.adjoint}
    return dispatcher(kernels, "the operation has no adjoint: differentiate its plain loop")


run_op_block, run_op_block_adjoint = forward_kernel(OPERATIONS), adjoint_kernel(OPERATIONS)
