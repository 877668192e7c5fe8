"""The filters of a bank: everything there is to know of each kind, in one table.

A bank holds one row a filter: kind, first coefficient row, first state row, and the state row of
its frame statistic. Filters read one block and write another.

    forward  (row, x, y, n, coef, state)
    adjoint  (row, x, gy, gx, n, coef, gcoef, state, gstate, scratch); `gx` is added to
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amtcore.errors import ParameterError
from amtcore.kernels.families.biquad.cpu import state_variable_adjoint, state_variable_block
from amtcore.kernels.families.one_pole.cpu import modulation_adjoint, modulation_block
from amtcore.kernels.fused.dispatch import dispatcher
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, vload, vstore

#: Coefficient rows and state rows of one section.
FILTER_COEFS, FILTER_STATES = 6, 2

# Kinds.
BANK_STATE_VARIABLE = 0
BANK_REAL = 1
BANK_MODULUS = 2
BANK_IDENTITY = 3
BANK_TWO_SECTIONS = 4


@dataclass(frozen=True)
class Filter:
    """One kind of filter.

    Args:
        name: What it is.
        forward: Its compiled function, see the module.
        adjoint: The compiled function of its gradients.
        taped: Rows of scratch a sample that the adjoint writes down.
    """

    name: str
    forward: Any
    adjoint: Any
    taped: int


@part(forceinline=True)
def _state_variable(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    state_variable_block(x, y, n, False, coef, row[1], state, row[2])


@part(forceinline=True)
def _state_variable_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    state_variable_adjoint(
        x, gy, gx, n, False, True, coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _real(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    modulation_block(x, y, n, False, coef, row[1], state, row[2])


@part(forceinline=True)
def _real_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    modulation_adjoint(x, gy, gx, n, False, coef, gcoef, row[1], state, gstate, row[2], scratch)


@part(forceinline=True)
def _modulus(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    modulation_block(x, y, n, True, coef, row[1], state, row[2])


@part(forceinline=True)
def _modulus_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    modulation_adjoint(x, gy, gx, n, True, coef, gcoef, row[1], state, gstate, row[2], scratch)


@part(forceinline=True)
def _identity(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    for t in range(n):
        vstore(y, t * LANES, vload(x, t * LANES))


@part(forceinline=True)
def _identity_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    for t in range(n):
        vstore(gx, t * LANES, vload(gx, t * LANES) + vload(gy, t * LANES))


@part(forceinline=True)
def _two_sections(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    c, s = row[1], row[2]
    state_variable_block(x, y, n, False, coef, c, state, s)
    state_variable_block(y, y, n, False, coef, c + FILTER_COEFS, state, s + FILTER_STATES)


@part(forceinline=True)
def _two_sections_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """`state` is left as it is; a section's adjoint needs the first half of the scratch, the signal
    between the sections and its gradient are in the other."""
    c, s = row[1], row[2]
    middle = scratch[2 * n * LANES : 3 * n * LANES]
    g_middle = scratch[3 * n * LANES : 4 * n * LANES]
    i1, i2 = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    state_variable_block(x, middle, n, False, coef, c, state, s)
    vstore(state, s * LANES, i1)
    vstore(state, (s + 1) * LANES, i2)
    state_variable_adjoint(
        middle, gy, g_middle, n, False, False, coef, gcoef, c + FILTER_COEFS, state, gstate,
        s + FILTER_STATES, scratch,
    )  # fmt: skip
    state_variable_adjoint(
        x, g_middle, gx, n, False, True, coef, gcoef, c, state, gstate, s, scratch
    )


FILTERS: dict[int, Filter] = {
    BANK_STATE_VARIABLE: Filter(
        "second-order section", _state_variable, _state_variable_adjoint, 2
    ),
    BANK_REAL: Filter("real part of a complex section", _real, _real_adjoint, 2),
    BANK_MODULUS: Filter("modulus of a complex section", _modulus, _modulus_adjoint, 2),
    BANK_IDENTITY: Filter("identity", _identity, _identity_adjoint, 0),
    BANK_TWO_SECTIONS: Filter("two sections", _two_sections, _two_sections_adjoint, 4),
}


def get_filter(kind: int) -> Filter:
    """A kind of filter by its code; raises where there is none."""
    if kind not in FILTERS:
        known = ", ".join(f"{kind} {each.name}" for kind, each in FILTERS.items())
        raise ParameterError(f"a bank has no filter of kind {kind}: expected one of {known}")
    return FILTERS[kind]


_MISSING = "a bank has no such filter: take a kind of FILTERS"
run_filter_block = dispatcher({kind: each.forward for kind, each in FILTERS.items()}, _MISSING)
run_filter_block_adjoint = dispatcher(
    {kind: each.adjoint for kind, each in FILTERS.items()}, _MISSING
)
