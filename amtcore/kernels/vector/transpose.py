"""Transposition in registers, between rows of samples and samples of lanes.

Moving one number at a time takes longer than most filters. A tile of 64-byte vectors is loaded,
transposed in log2(rows) steps of shuffles, and stored. In step s = 1, 2, 4, .. rows i and i + s
(i & s = 0) exchange columns: columns j + s of row i with columns j of row i + s (j & s = 0).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, vload, vstore
from amtcore.numba_internals import array_data

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
