"""The compiled loop of a chain over blocks, forward and backward, for a set of operations.

    for each block of samples:  load -> op 1 -> .. -> op n -> store
                                                           -> filters of a bank -> store or pool

A block (at most BLOCK samples of LANES channels) stays in the first-level cache from the waveform
to the frame sums. Output at full rate goes to memory in longer blocks.

Gradients of one operation or one bank first run forward over all blocks and keep the state at the
start of each. Then the adjoint runs on each block, from the last to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ParameterError
from amtcore.kernels.chain import Steps, first_rows
from amtcore.kernels.operation import ADJOINT_PARAMETERS, BLOCK_PARAMETERS, ChainOperation
from amtcore.kernels.operations.modulation_filters import FILTERS
from amtcore.kernels.pooling import (
    ADJOINT_BLOCK,
    POOL_BANK,
    STORE,
    STORE_BANK,
    first_frame,
    frame_bounds,
    pool_samples,
)
from amtcore.kernels.registry import BUILT_IN
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, copy_row, cut, cut_copy, transpose
from amtcore.kernels.vector.simd import LANES, align_frame, vload, vsplat, vsqrt, vstore

#: Samples per block: two buffers of 128 x 32 float32 are 32 kB, inside a 48 kB first-level cache.
BLOCK = ADJOINT_BLOCK
#: Samples that are loaded and stored at a time at full rate. The processor prefetches a few dozen
#: rows at once. Input, output and filters have more rows, so each row gets many samples in turn.
LONG_BLOCK = 16 * BLOCK


def picker(
    parts: Mapping[int, Any], parameters: str, arguments: str, missing: str, key: str = ""
) -> Any:
    """Return a part that calls `parts[row[0]]`, as generated text.

    Compiled code cannot look a function up in a dict, so the text is a list of comparisons, ending
    with `raise ParameterError(missing)`. A closure over a tuple of arguments would count
    references to every array for each entry, up to a quarter of an operation's time. The
    `arguments` of the called parts are written in terms of the `parameters`. The `key`
    distinguishes sets of parts with equal parameters in the cache.
    """
    lines = [f"def pick({parameters}):", "    align_frame()", "    code = row[0]"]
    for code in parts:
        lines += [f"    if code == {int(code)}:", f"        return part_{code}({arguments})"]
    lines += ["    raise ParameterError(missing)"]
    scope = {f"part_{code}": each for code, each in parts.items()}
    scope |= {"align_frame": align_frame, "missing": missing, "ParameterError": ParameterError}
    exec("\n".join(lines), scope)
    return part(scope["pick"], key=f"{parameters} {key}")


def _arguments(parameters: tuple[str, ...]) -> str:
    """Return the arguments of an operation's part in terms of a table row."""
    of_row = {"argument": "row[3]", "c": "row[1]", "s": "row[2]"}
    return ", ".join(of_row.get(name, name) for name in parameters)


_NO_FILTER = "a bank has no such filter: take a kind of FILTERS"
_FILTER = "row, x, y, n, coef, state"
_FILTER_ADJOINT = "row, x, gy, gx, n, coef, gcoef, state, gstate, scratch"
run_filter_block = picker(
    {kind: each.forward for kind, each in FILTERS.items()}, _FILTER, _FILTER, _NO_FILTER
)
run_filter_block_adjoint = picker(
    {kind: each.adjoint for kind, each in FILTERS.items()}, _FILTER_ADJOINT, _FILTER_ADJOINT,
    _NO_FILTER,
)  # fmt: skip


@part
def load_rows(x: Any, shared: bool, channels: int, t0: int, n: int, buffer: Any) -> None:
    """Load samples t0..t0+n of up to LANES rows of `x`, sample after sample.

    Missing rows repeat the last one; with `shared` all lanes take row 0.
    """
    if shared:
        for t in range(n):
            vstore(buffer, t * LANES, vsplat(buffer, x[0, t0 + t]))
        return
    transpose(x[0], t0, x.shape[1], channels, n, buffer, LANES, LANES)


@part
def _emit(filters: Any, columns: Any, pool: int, length: int, state: Any, out: Any) -> None:
    """Write one frame: the statistics of every filter that a channel has; then clear them."""
    weight = 1.0 / length if pool < 2 else 1.0
    for m in range(filters.shape[0]):
        s = filters[m, 3]
        value = vload(state, s * LANES) * vsplat(state, weight)
        vstore(state, s * LANES, vsqrt(value) if pool == 1 else value)
        for lane in range(columns.shape[1]):
            if columns[m, lane] >= 0:
                out[columns[m, lane]] = state[s * LANES + lane]
        vstore(state, s * LANES, vsplat(state, 0.0))


@part
def store_rows(buffer: Any, n: int, rows: Any, t0: int, out: Any, turned: Any) -> None:
    """Store each lane to row `rows[lane]` of `out`, or nowhere for -1; `turned` is scratch."""
    for begin in range(0, n, BLOCK):
        count = min(BLOCK, n - begin)
        transpose(buffer, begin * LANES, LANES, count, LANES, turned, BLOCK, count)
        for lane in range(rows.shape[0]):
            if rows[lane] >= 0:
                copy_row(turned, lane * BLOCK, out[rows[lane]], t0 + begin, count)


@part
def _load_gradient(gy: Any, rows: Any, t0: int, n: int, buffer: Any, turned: Any) -> None:
    """Load rows `rows[lane]` of `gy`; a lane without a row gets zeros and adds no gradient."""
    for lane in range(LANES):
        row = rows[lane] if lane < rows.shape[0] else -1
        if row >= 0:
            copy_row(gy[row], t0, turned, lane * BLOCK, n)
        else:
            turned[lane * BLOCK : lane * BLOCK + n] = 0.0
    transpose(turned, 0, BLOCK, LANES, n, buffer, LANES, LANES)


@dataclass(frozen=True)
class ChainLoop:
    """Compiled kernels for some operations; an operation's index is its code in kernel tables."""

    operations: tuple[ChainOperation, ...]
    run_chain: Any
    run_adjoint: Any


@functools.cache
def _loop_for(operations: tuple[ChainOperation, ...]) -> ChainLoop:
    key = "" if operations is BUILT_IN else repr(operations)  # each key has the sources of ours
    run_op_block = picker(
        {code: each.block for code, each in enumerate(operations)},
        "row, a, b, side, n, coef, state",
        _arguments(BLOCK_PARAMETERS),
        "the chain has no such operation",
        key,
    )
    run_op_block_adjoint = picker(
        {code: each.adjoint for code, each in enumerate(operations) if each.adjoint},
        "row, x, gy, gx, n, coef, gcoef, state, gstate, scratch",
        _arguments(ADJOINT_PARAMETERS),
        "the operation has no adjoint: differentiate its plain loop",
        key,
    )

    @part(key=key)
    def run_ops(ops: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
        """Run all operations, BLOCK samples at a time; return the number of outputs.

        Only a call with one block may change the rate.
        """
        count = n
        for begin in range(0, n, BLOCK):
            part, count = a[begin * LANES :], min(BLOCK, n - begin)
            for k in range(ops.shape[0]):
                count = run_op_block(ops[k], part, b, side, count, coef, state)
        return count if n <= BLOCK else n

    @kernel(key=key)
    def run_chain(
        x: Any, length: int, shared: bool, channels: int, ops: Any, coef: Any, state: Any,
        mode: int, filters: Any, rows: Any, pool: int, frame: Any, out: Any,
    ) -> None:  # fmt: skip
        """Run the chain over samples 0..length of one clip for one group of channels.

        The input x (rows, time) is contiguous. The flat arrays coef and state have LANES numbers a
        row. In rows (filter or 1, lane) is the output row or column, -1 for none. The output is
        (rows, time), or (frames, columns) when pooled.
        The numbers of `frame` are samples, frames, absolute start, stride and delay. Frame f begins
        at output ceil(f samples / frames). Output m is complete after sample m stride + delay.
        """
        block = BLOCK if mode == POOL_BANK else LONG_BLOCK
        room = aligned(2 * (block + BLOCK) * LANES + coef.shape[0] + state.shape[0], x)
        a, room = cut(room, block * LANES)
        b, room = cut(room, block * LANES)
        coef, room = cut_copy(room, coef)
        own, room = cut_copy(room, state)
        side, turned = cut(room, BLOCK * LANES)
        emitted, t = 0, 0  # frames and samples so far
        made, f, begin, end, last = first_frame(mode, frame)
        while t < length:
            n = min(block, length - t)
            if mode == POOL_BANK:
                n = min(n, last - t)
            load_rows(x, shared, channels, t, n, a)
            t += n
            n = run_ops(ops, a, b, side, n, coef, own)
            if mode == STORE:
                store_rows(a, n, rows[0], made, out, turned)
            for m in range(filters.shape[0]):
                run_filter_block(filters[m], a, b, n, coef, own)
                if mode == STORE_BANK:
                    store_rows(b, n, rows[m], made, out, turned)
                else:
                    pool_samples(b, n, pool, made == begin, own, filters[m, 3])
            made += n
            if mode == POOL_BANK and made == end:
                _emit(filters, rows, pool, end - begin, own, out[emitted])
                emitted += 1
                f += 1
                begin, end, last = frame_bounds(f, frame)
        copy_row(own, 0, state, 0, state.shape[0])

    @kernel(key=key)
    def run_adjoint(
        x: Any, gy: Any, gx: Any, shared: bool, channels: int, ops: Any, coef: Any, gcoef: Any,
        state: Any, gstate: Any, filters: Any, rows: Any, scratch_rows: int,
    ) -> None:  # fmt: skip
        """Compute the gradients of one operation or one bank, for one clip and group of channels.

        Arguments are as in the forward kernel; gx is (channel, time) of this group. The kernel adds
        to gcoef. In gstate the gradient of the last state becomes the gradient of the first. Either
        `ops` has one row and `filters` none, or the other way round.
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

    return ChainLoop(operations, run_chain, run_adjoint)


@functools.lru_cache(maxsize=256)
def loop_of(
    steps: Steps, rows: tuple[tuple[int, int], ...] | None = None
) -> tuple[ChainLoop, NDArray[np.int64]]:
    """Return the compiled loops for a chain, and its table.

    The table has a row (code, first coefficient row, first state row, argument) for each step. The
    argument `rows` gives these first rows if they do not lie side by side from row 0 on.
    """
    used = {operation for operation, _ in steps}
    own = tuple(sorted(used, key=lambda each: each.name))
    loop = _loop_for(BUILT_IN if used <= {*BUILT_IN} else own)
    table = [
        [loop.operations.index(operation), coef, state, argument]
        for (operation, argument), (coef, state) in zip(
            steps, rows or first_rows(steps), strict=True
        )
    ]
    return loop, np.array(table, np.int64).reshape(-1, 4)
