"""Gradients of one recurrence or one bank: backwards over blocks, states recomputed on the way.

    forward over all blocks, keeping only the state at the start of each
    for blocks from the last to the first:  the family's adjoint on the block and its start state

Memory is that of the signals plus one state a block, whatever the length; no time step is ever a
node of a graph. The families' adjoint functions hold the equations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from amtcore.kernels.families.adaptation.cpu import adaptation_adjoint
from amtcore.kernels.families.biquad.cpu import (
    first_order_adjoint,
    state_variable_adjoint,
    state_variable_block,
)
from amtcore.kernels.families.compression.cpu import broken_stick_adjoint
from amtcore.kernels.families.hair_cell.cpu import hair_cell_adjoint
from amtcore.kernels.families.one_pole.cpu import (
    modulation_adjoint,
    one_pole_cascade_adjoint,
    pole_zero_cascade_adjoint,
)
from amtcore.kernels.fused.cpu import (
    ADAPTATION,
    BANK_IDENTITY,
    BANK_MODULUS,
    BANK_STATE_VARIABLE,
    BANK_TWO_SECTIONS,
    BLOCK,
    BROKEN_STICK,
    FIRST_ORDER,
    HAIR_CELL,
    ONE_POLE_CASCADE,
    POLE_ZERO_CASCADE,
    STATE_VARIABLE,
    load_rows,
    run_filter_block,
    run_op_block,
    store_rows,
)
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import LANES, vload, vstore
from amtcore.kernels.vector.source_digest import sources_digest
from amtcore.kernels.vector.transpose import copy_row, transpose

#: Codes of the operations that `_op_adjoint` knows.
WITH_ADJOINT = (
    ONE_POLE_CASCADE,
    FIRST_ORDER,
    STATE_VARIABLE,
    ADAPTATION,
    POLE_ZERO_CASCADE,
    BROKEN_STICK,
    HAIR_CELL,
)


@njit
def _op_adjoint(
    op: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    code, c, s, argument = op[0], op[1], op[2], op[3]
    if code == ONE_POLE_CASCADE:
        one_pole_cascade_adjoint(x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch)
    elif code == FIRST_ORDER:
        first_order_adjoint(x, gy, gx, n, argument == 1, coef, gcoef, c, state, gstate, s, scratch)
    elif code == STATE_VARIABLE:
        state_variable_adjoint(
            x, gy, gx, n, argument == 1, False, coef, gcoef, c, state, gstate, s, scratch
        )
    elif code == POLE_ZERO_CASCADE:
        pole_zero_cascade_adjoint(x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch)
    elif code == BROKEN_STICK:
        broken_stick_adjoint(x, gy, gx, n, coef, gcoef, c)
    elif code == HAIR_CELL:
        hair_cell_adjoint(x, gy, gx, n, coef, gcoef, c, state, gstate, s, scratch)
    elif code == ADAPTATION:
        adaptation_adjoint(
            x, gy, gx, n, argument // 2, argument % 2 == 1, coef, gcoef, c, state, gstate, s,
            scratch,
        )  # fmt: skip


@njit
def _two_sections_adjoint(
    x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, c: int, state: Any, gstate: Any,
    s: int, scratch: Any,
) -> None:  # fmt: skip
    """Two second-order sections in series; `gx` is added to and `state` left as it is."""
    middle = scratch[2 * BLOCK * LANES : 3 * BLOCK * LANES]
    g_middle = scratch[3 * BLOCK * LANES : 4 * BLOCK * LANES]
    i1, i2 = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    state_variable_block(x, middle, n, False, coef, c, state, s)
    vstore(state, s * LANES, i1)
    vstore(state, (s + 1) * LANES, i2)
    state_variable_adjoint(
        middle, gy, g_middle, n, False, False, coef, gcoef, c + 6, state, gstate, s + 2, scratch
    )
    state_variable_adjoint(
        x, g_middle, gx, n, False, True, coef, gcoef, c, state, gstate, s, scratch
    )


@njit
def _filter_adjoint(
    filter_: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any,
    gstate: Any, scratch: Any,
) -> None:  # fmt: skip
    """As above for one filter of a bank; `gx` is added to."""
    code, c, s = filter_[0], filter_[1], filter_[2]
    if code == BANK_STATE_VARIABLE:
        state_variable_adjoint(x, gy, gx, n, False, True, coef, gcoef, c, state, gstate, s, scratch)
    elif code == BANK_TWO_SECTIONS:
        _two_sections_adjoint(x, gy, gx, n, coef, gcoef, c, state, gstate, s, scratch)
    elif code == BANK_IDENTITY:
        gx[: n * LANES] += gy[: n * LANES]
    else:
        modulation_adjoint(
            x, gy, gx, n, code == BANK_MODULUS, coef, gcoef, c, state, gstate, s, scratch
        )


@njit
def _load_gradient(gy: Any, rows: Any, t0: int, n: int, buffer: Any, turned: Any) -> None:
    """As `load_rows`, but lanes without a row get zeros: they must not contribute."""
    for lane in range(LANES):
        row = rows[lane] if lane < rows.shape[0] else -1
        if row >= 0:
            copy_row(gy[row], t0, turned, lane * BLOCK, n)
        else:
            turned[lane * BLOCK : lane * BLOCK + n] = 0.0
    transpose(turned, 0, BLOCK, LANES, n, buffer, LANES, LANES)


def _build(digest: str) -> Any:
    @njit(nogil=True, cache=True)
    def run(
        x: Any,
        gy: Any,
        gx: Any,
        shared: bool,
        channels: int,
        ops: Any,
        coef: Any,
        gcoef: Any,
        state: Any,
        gstate: Any,
        filters: Any,
        rows: Any,
        scratch_rows: int,
    ) -> None:
        """Gradients of one clip and one group of channels.

        x, gy (rows, time) as in the forward kernel; gx (channel, time) of this group; gcoef flat,
        added to; gstate flat, gradient of the last state in, of the first state out. One operation
        (ops has one row and filters none) or one bank (the other way round).
        """
        if digest == "":
            return
        length = x.shape[1]
        blocks = -(-length // BLOCK)
        a, b = aligned(BLOCK * LANES, x), aligned(BLOCK * LANES, x)
        g, ga = aligned(BLOCK * LANES, x), aligned(BLOCK * LANES, x)
        turned, scratch = aligned(BLOCK * LANES, x), aligned(scratch_rows * LANES, x)
        starts = aligned(blocks * state.shape[0], x).reshape(blocks, -1)
        for i in range(blocks):
            starts[i] = state
            n = min(BLOCK, length - i * BLOCK)
            load_rows(x, shared, channels, i * BLOCK, n, a)
            for m in range(filters.shape[0]):
                run_filter_block(filters[m], a, b, n, coef, state)
            for k in range(ops.shape[0]):
                run_op_block(ops[k], a, b, b, n, coef, state)
        own = np.full((1, LANES), -1, np.int64)
        for lane in range(channels):
            own[0, lane] = lane
        for i in range(blocks - 1, -1, -1):
            n = min(BLOCK, length - i * BLOCK)
            load_rows(x, shared, channels, i * BLOCK, n, a)
            for k in range(ops.shape[0]):
                _load_gradient(gy, rows[0], i * BLOCK, n, g, turned)
                _op_adjoint(ops[k], a, g, ga, n, coef, gcoef, starts[i], gstate, scratch)
            if filters.shape[0] > 0:
                ga[:] = 0.0
            for m in range(filters.shape[0]):
                _load_gradient(gy, rows[m], i * BLOCK, n, g, turned)
                _filter_adjoint(filters[m], a, g, ga, n, coef, gcoef, starts[i], gstate, scratch)
            store_rows(ga, n, own[0], i * BLOCK, gx, turned)

    return run


run_adjoint = _build(sources_digest())
