"""Streaming stores, prefetch, scratch memory, and transposition in registers.

The processor's prefetcher stops at every 4 kB page, so kernels prefetch the next row of arrays with
long rows. Large output is stored past the caches.

Scratch arrays are cut from one allocation. Separate allocations made the fused kernel 10 to 25 %
slower in about one process of three on Zen 4, for the life of the process. A probable cause is the
hashed way predictor of the first-level cache (Lipp et al., 2020, Take A Way).

Moving one number at a time between rows of samples and samples of lanes takes longer than most
filters. So a tile of 64-byte vectors is loaded, transposed in log2(rows) steps of shuffles, and
stored. In step s = 1, 2, 4, .. rows i and i + s (i & s = 0) exchange columns: columns j + s of row
i with columns j of row i + s (j & s = 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    CACHE_LINE,
    LANES,
    is_warp,
    lane_id,
    lanes_are_threads,
    own_number,
    pointer_to,
    vload,
    vsplat,
    vstore,
)
from amtcore.numba_internals import array_data


@intrinsic
def vstream(typing: Any, array: Any, index: Any, vec: Any) -> Any:
    """Store a vector past the caches, for output too large to stay in them.

    The address must be a multiple of CACHE_LINE bytes, else the processor faults.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        store = builder.store(args[2], pointer_to(context, builder, sig.args[0], args[0], at))
        if is_warp(context):
            return context.get_dummy_value()
        store.align = CACHE_LINE
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(array, index, vec), codegen


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the LANES numbers of the flat `array` from `index` on, also outside the array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_warp(context):  # other warps compute while this one waits
            return context.get_dummy_value()
        at = context.cast(builder, args[1], sig.args[1], types.intp)
        vector = pointer_to(context, builder, sig.args[0], args[0], at)
        byte, word = ir.IntType(8), ir.IntType(32)
        first = builder.bitcast(vector, byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch.p0i8", fnty=kind)
        size = vector.type.pointee.count * sig.args[0].dtype.bitwidth // 8
        for line in range(0, size, CACHE_LINE):
            address = builder.gep(first, [ir.Constant(word, line)])
            builder.call(call, [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


@part
def aligned(count: int, like: Any) -> Any:
    """Allocate `count` numbers with the dtype of `like`, aligned to cache lines.

    Loading a vector that crosses two cache lines takes twice as long.
    """
    size = like.itemsize
    room = np.empty(count + CACHE_LINE // size, like.dtype)
    skip = -room.ctypes.data % CACHE_LINE // size
    return room[skip : skip + count]


@part
def cut(room: Any, count: int) -> Any:
    """Split `room` after `count` numbers, a multiple of LANES."""
    return room[:count], room[count:]


@part
def cut_copy(room: Any, values: Any) -> Any:
    """Copy flat `values` to the begin of `room`, and split `room` after the copy."""
    copy_row(values, 0, room, 0, values.shape[0])
    return cut(room, values.shape[0])


@part(forceinline=True)
def load_lanes(x: Any, at: int, stride: int, lanes: int, buffer: Any) -> Any:
    """Load x[at], x[at + stride], .. into the first `lanes` lanes, zeros into the others."""
    if lanes_are_threads():
        own = vsplat(x, 0.0)
        if lane_id() < lanes:
            own = vsplat(x, x[at + lane_id() * stride])
        return own
    if stride == 1 and lanes == LANES:
        return vload(x, at)
    vstore(buffer, 0, vsplat(buffer, 0.0))
    for lane in range(lanes):
        buffer[lane] = x[at + lane * stride]
    return vload(buffer, 0)


@part(forceinline=True)
def store_lanes(
    out: Any, at: int, stride: int, lanes: int, streamed: bool, buffer: Any, value: Any
) -> None:
    """Store lanes, the inverse of `load_lanes`."""
    if lanes_are_threads():
        if lane_id() < lanes:
            out[at + lane_id() * stride] = own_number(value)
    elif stride != 1 or lanes != LANES:
        vstore(buffer, 0, value)
        for lane in range(lanes):
            out[at + lane * stride] = buffer[lane]
    elif streamed:
        vstream(out, at, value)
    else:
        vstore(out, at, value)


_TILE_BYTES = 64


def _swap(builder: Any, rows: list[Any], step: int) -> None:
    """One step of the transposition, in place."""
    width, index = len(rows), ir.IntType(32)
    kind = ir.VectorType(index, width)
    low = [j if j & step == 0 else width + j - step for j in range(width)]
    high = [j + step if j & step == 0 else width + j for j in range(width)]
    for i in range(width):
        if i & step == 0:
            upper, lower = rows[i], rows[i + step]
            rows[i] = builder.shuffle_vector(upper, lower, ir.Constant(kind, low))
            rows[i + step] = builder.shuffle_vector(upper, lower, ir.Constant(kind, high))


@intrinsic
def _tile_width(typing: Any, array: Any) -> Any:
    """Return the number of rows and columns of a tile of this array's numbers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, _TILE_BYTES * 8 // sig.args[0].dtype.bitwidth)

    return types.intp(array), codegen


@intrinsic
def _transpose_tile(
    typing: Any, source: Any, at: Any, stride: Any, last: Any, target: Any, to: Any, pitch: Any
) -> Any:
    """target[to + j pitch + i] = source[at + min(i, last) stride + j] of flat arrays, for the i and
    j of one tile."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source, at, stride, last, target, to, pitch = args
        size = sig.args[0].dtype.bitwidth // 8
        vector = ir.VectorType(context.get_value_type(sig.args[0].dtype), _TILE_BYTES // size)

        def pointer(array_type: Any, array: Any, first: Any, step: Any, row: Any) -> Any:
            data = array_data(context, builder, array_type, array)
            place = builder.gep(data, [builder.add(first, builder.mul(step, row))])
            return builder.bitcast(place, vector.as_pointer())

        rows = []
        for i in range(vector.count):
            row = context.get_constant(types.intp, i)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            rows.append(builder.load(pointer(sig.args[0], source, at, stride, row)))
            rows[i].align = size
        step = 1
        while step < vector.count:
            _swap(builder, rows, step)
            step *= 2
        for j, value in enumerate(rows):
            row = context.get_constant(types.intp, j)
            builder.store(value, pointer(sig.args[4], target, to, pitch, row)).align = size
        return context.get_dummy_value()

    size = types.intp
    return types.void(source, size, size, size, target, size, size), codegen


@part
def transpose(
    source: Any, at: int, stride: int, rows: int, columns: int, target: Any, pitch: int, wanted: int
) -> None:
    """Set target[j pitch + i] = source[at + min(i, rows - 1) stride + j] of flat arrays.

    Indices are j < columns and i < wanted. The number `wanted` is rounded up to whole tiles:
    `target` must have that room.
    """
    tile = _tile_width(source)
    whole = columns - columns % tile
    for i in range(0, wanted, tile):
        first, last = min(i, rows - 1), max(rows - 1 - i, 0)
        for j in range(0, whole, tile):
            start = at + first * stride + j
            _transpose_tile(source, start, stride, last, target, j * pitch + i, pitch)
    for i in range(wanted if whole < columns else 0):
        start = at + min(i, rows - 1) * stride
        for j in range(whole, columns):
            target[j * pitch + i] = source[start + j]


@part
def store_samples(made: Any, count: int, out: Any, at: int) -> None:
    """Transpose `count` rows of LANES lanes to flat (lane, row), from lane `at` of `out` on."""
    whole, rows = count - count % LANES, out[at * count :]
    transpose(made, 0, LANES, whole, LANES, rows, count, whole)
    for row in range(whole, count):
        for lane in range(LANES):
            rows[lane * count + row] = made[row * LANES + lane]


@part
def copy_row(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """target[to + t] = source[at + t] of flat arrays, for t < count."""
    whole = count - count % LANES
    for t in range(0, whole, LANES):
        vstore(target, to + t, vload(source, at + t))
    for t in range(whole, count):
        target[to + t] = source[at + t]
