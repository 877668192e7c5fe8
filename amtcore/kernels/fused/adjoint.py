"""Gradients of one recurrence or one bank: backwards over blocks, states recomputed on the way.

    forward over all blocks, keeping only the state at the start of each
    for blocks from the last to the first:  the family's adjoint on the block and its start state

Memory is that of the signals plus one state a block, whatever the length; no time step is ever a
node of a graph. The adjoints are those of `operations` and `filters`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amtcore.kernels.fused.cpu import BLOCK, load_rows, store_rows
from amtcore.kernels.fused.filters import run_filter_block, run_filter_block_adjoint
from amtcore.kernels.fused.operations import run_op_block, run_op_block_adjoint
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.transpose import copy_row, transpose


@part
def _load_gradient(gy: Any, rows: Any, t0: int, n: int, buffer: Any, turned: Any) -> None:
    """As `load_rows`, but lanes without a row get zeros: they must not contribute."""
    for lane in range(LANES):
        row = rows[lane] if lane < rows.shape[0] else -1
        if row >= 0:
            copy_row(gy[row], t0, turned, lane * BLOCK, n)
        else:
            turned[lane * BLOCK : lane * BLOCK + n] = 0.0
    transpose(turned, 0, BLOCK, LANES, n, buffer, LANES, LANES)


@kernel
def run_adjoint(
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
            run_op_block_adjoint(ops[k], a, g, ga, n, coef, gcoef, starts[i], gstate, scratch)
        if filters.shape[0] > 0:
            ga[:] = 0.0
        for m in range(filters.shape[0]):
            _load_gradient(gy, rows[m], i * BLOCK, n, g, turned)
            run_filter_block_adjoint(
                filters[m], a, g, ga, n, coef, gcoef, starts[i], gstate, scratch
            )
        store_rows(ga, n, own[0], i * BLOCK, gx, turned)
