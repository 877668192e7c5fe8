"""The fused kernel: a program of block operations over one clip and one group of channels.

    for each block of samples:  load -> op 1 -> .. -> op n -> store
                                                           -> filters of a bank -> store or pool

A block (at most BLOCK samples of LANES channels) stays in the first-level cache from the waveform
to the frame sums, so full-rate intermediates are never in memory; output at full rate goes there in
longer blocks. What a row of `ops` or `filters` means is in `operations` and `filters`; a
single-family operator is a program of one row.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.fused.filters import run_filter_block
from amtcore.kernels.fused.operations import run_op_block
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, cut, cut_copy
from amtcore.kernels.vector.simd import LANES, fma, vload, vmax, vsplat, vsqrt, vstore
from amtcore.kernels.vector.transpose import copy_row, transpose

#: Samples per block: two buffers of 128 x 32 float32 are 32 kB, inside a 48 kB first-level cache.
BLOCK = 128
#: Samples that are loaded and stored at a time at full rate. The processor prefetches a few dozen
#: rows at once, not those of input and output or of all filters: each gets many samples in turn.
LONG_BLOCK = 16 * BLOCK

# What happens to the result.
STORE = 0
STORE_BANK = 1
POOL_BANK = 2
# Frame statistics.
POOLS = {"mean": 0, "rms": 1, "max": 2, "subsample": 3}


@part
def load_rows(x: Any, shared: bool, channels: int, t0: int, n: int, buffer: Any) -> None:
    """Samples t0..t0+n of up to LANES rows of `x`, sample after sample.

    Missing rows repeat the last one; with `shared` there is one row for all lanes.
    """
    if shared:
        for t in range(n):
            vstore(buffer, t * LANES, vsplat(buffer, x[0, t0 + t]))
        return
    transpose(x[0], t0, x.shape[1], channels, n, buffer, LANES, LANES)


@part
def _run_ops(ops: Any, a: Any, b: Any, side: Any, n: int, coef: Any, state: Any) -> int:
    """All operations, BLOCK samples at a time; returns how many there are after them, which may
    differ from `n` where that is one block."""
    count = n
    for begin in range(0, n, BLOCK):
        part, count = a[begin * LANES :], min(BLOCK, n - begin)
        for k in range(ops.shape[0]):
            count = run_op_block(ops[k], part, b, side, count, coef, state)
    return count if n <= BLOCK else n


@part
def pool_samples(y: Any, n: int, pool: int, first: bool, state: Any, s: int) -> None:
    """Add `n` samples of one frame to its running statistic in state row `s`."""
    total = vload(state, s * LANES)
    if pool == 0:
        for t in range(n):
            total = total + vload(y, t * LANES)
    elif pool == 1:
        for t in range(n):
            value = vload(y, t * LANES)
            total = fma(value, value, total)
    else:
        if first and n > 0:
            total = vload(y, 0)
        if pool == 2:
            for t in range(n):
                total = vmax(vload(y, t * LANES), total)
    vstore(state, s * LANES, total)


@part
def frame_bounds(f: int, frame: Any) -> Any:
    """First output of frame `f`, first one after it, and after how many samples the last is there;
    `frame` as in the kernel."""
    num, den, start, stride, delay = frame[0], frame[1], frame[2], frame[3], frame[4]
    begin, end = -(-f * num // den), -(-(f + 1) * num // den)
    return begin, end, (end - 1) * stride + delay + 1 - start


@part
def first_frame(mode: int, frame: Any) -> Any:
    """Outputs before this stretch, number of the frame it begins in, and the bounds of that."""
    if mode != POOL_BANK:
        return 0, 0, 0, 0, 0
    made = max(0, -(-(frame[2] - frame[4]) // frame[3]))
    f = made * frame[1] // frame[0]
    begin, end, last = frame_bounds(f, frame)
    return made, f, begin, end, last


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
    """The inverse: lanes to rows `rows[lane]` of `out`, none where that is -1; `turned` is
    scratch."""
    for begin in range(0, n, BLOCK):
        count = min(BLOCK, n - begin)
        transpose(buffer, begin * LANES, LANES, count, LANES, turned, BLOCK, count)
        for lane in range(rows.shape[0]):
            if rows[lane] >= 0:
                copy_row(turned, lane * BLOCK, out[rows[lane]], t0 + begin, count)


@kernel
def run_chain(
    x: Any,
    length: int,
    shared: bool,
    channels: int,
    ops: Any,
    coef: Any,
    state: Any,
    mode: int,
    filters: Any,
    rows: Any,
    pool: int,
    frame: Any,
    out: Any,
) -> None:
    """Run the program over samples 0..length of one clip for one group of channels.

    x (rows, time), contiguous; coef and state flat, LANES numbers a row; rows (filter or 1,
    lane) the output row or column, -1 for none; frame = (samples, per frames, absolute start,
    stride, delay): frame f covers outputs ceil(f samples / frames) up to the next one's start,
    and output m of the operations is there once sample m stride + delay is in;
    out (rows, time), or (frames, columns) when pooled.
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
        n = _run_ops(ops, a, b, side, n, coef, own)
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
