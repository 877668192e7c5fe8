"""Numbers as bit planes, which is blosc's bit shuffle, and back.

    n numbers of T bytes, n a multiple of 8, lie as 8 T rows of n / 8 bytes:
    row 8 j + k, byte g, bit e   =   number 8 g + e, byte j, bit k

A tile is 64 bytes of every row, 512 numbers. The eight rows of a byte j are 64 matrices of 8 x 8
bits, one in each byte column; three steps of shifts transpose all of them at once:

    step s = 4, 2, 1: of rows k and k + s (k & s = 0), row k's bits e with e & s and row k + s's
    without change places

Then row e holds byte j of the numbers 8 g + e, and interleaving puts bytes and numbers in order.
The way there is the same backwards; transposing undoes itself. Rows are given by their addresses,
as they may lie in two places: packed ones are unpacked first, others stay where they came from.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from amtcore.kernels.vector.jit import part

#: Numbers of a tile, and the bytes of a row that they take.
TILE, _ROW_BYTES = 512, 64
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BYTES, _WORDS = ir.VectorType(_BYTE, _ROW_BYTES), ir.VectorType(_WORD, _ROW_BYTES // 8)
# By step: the bits e of a byte, eight bytes at a time, that have none of it.
_KEPT = {4: 0x0F0F0F0F0F0F0F0F, 2: 0x3333333333333333, 1: 0x5555555555555555}


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight rows of bits; shifts stay inside of bytes, as what leaves one is masked out."""
    rows = [builder.bitcast(row, _WORDS) for row in rows]
    for step, kept in _KEPT.items():
        mask, by = (ir.Constant(_WORDS, [each] * _WORDS.count) for each in (kept, step))
        for k in range(8):
            if k & step == 0:
                low, high = rows[k], rows[k + step]
                changes = builder.and_(builder.xor(builder.lshr(low, by), high), mask)
                rows[k + step] = builder.xor(high, changes)
                rows[k] = builder.xor(low, builder.shl(changes, by))
    return [builder.bitcast(row, _BYTES) for row in rows]


def _interleaved(builder: Any, rows: list[list[Any]]) -> list[Any]:
    """The first number of every row, then the second of every row, and so on.

    Args:
        rows: A power of two of them, each in as many vectors.
    """
    if len(rows) == 1:
        return rows[0]
    half, count = len(rows) // 2, rows[0][0].type.count
    kind = ir.VectorType(ir.IntType(32), count)
    order = [place for n in range(count) for place in (n, count + n)]
    parts = [ir.Constant(kind, order[:count]), ir.Constant(kind, order[count:])]
    pairs = [
        [
            builder.shuffle_vector(*vectors, places)
            for vectors in zip(rows[k], rows[k + half], strict=True)
            for places in parts
        ]
        for k in range(half)
    ]
    return _interleaved(builder, pairs)


def _taken_apart(builder: Any, vectors: list[Any], n_rows: int) -> list[list[Any]]:
    """What `_interleaved` has put together."""
    if n_rows == 1:
        return [vectors]
    count = vectors[0].type.count
    kind = ir.VectorType(ir.IntType(32), count)
    rows: list[list[Any]] = [[]] * n_rows
    for odd in (0, 1):
        places = ir.Constant(kind, list(range(odd, 2 * count, 2)))
        every_other = [
            builder.shuffle_vector(first, second, places)
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        rows[odd::2] = _taken_apart(builder, every_other, n_rows // 2)
    return rows


def _numbers(builder: Any, array_type: Any, array: Any, first: Any) -> list[Any]:
    """Addresses of the vectors of a tile in an array of numbers."""
    n_bytes = array_type.dtype.bitwidth // 8
    vector = ir.VectorType(ir.IntType(8 * n_bytes), _ROW_BYTES // n_bytes)
    places = [builder.add(first, _WORD(n * vector.count)) for n in range(8 * n_bytes)]
    return [builder.bitcast(builder.gep(array, [at]), vector.as_pointer()) for at in places]


def _rows(builder: Any, start: Any, pitch: Any, at: Any) -> list[Any]:
    """Addresses of the bytes of a tile in the eight rows from an address on."""
    places = [builder.add(start, builder.mul(pitch, _WORD(k))) for k in range(8)]
    return [builder.inttoptr(builder.add(each, at), _BYTES.as_pointer()) for each in places]


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 1
    return value


@intrinsic
def join_tile(typing: Any, starts: Any, pitch: Any, at: Any, into: Any, to: Any) -> Any:
    """Write the TILE numbers whose bits are the bytes `at` to `at` + 63 of their rows to the flat
    array `into` of unsigned numbers, from place `to` on. Bounds are not checked.

    Args:
        starts: By byte of a number, the address of the first of its eight rows; int64.
        pitch: Bytes from row to row.
    """
    n_bytes = into.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        starts, pitch, at, into, to = args
        addresses = cgutils.create_struct_proxy(sig.args[0])(context, builder, starts).data
        data = cgutils.create_struct_proxy(sig.args[3])(context, builder, into).data
        places = _numbers(builder, sig.args[3], data, to)
        by_byte = []
        for byte in range(n_bytes):
            start = builder.load(builder.gep(addresses, [_WORD(byte)]))
            rows = [_load(builder, each) for each in _rows(builder, start, pitch, at)]
            by_byte.append(_transposed(builder, rows))
        numbers = []
        for eighth in zip(*by_byte, strict=True):
            whole = _interleaved(builder, [[row] for row in eighth])
            numbers.append([builder.bitcast(each, places[0].type.pointee) for each in whole])
        for vector, place in zip(_interleaved(builder, numbers), places, strict=True):
            builder.store(vector, place).align = 1
        return context.get_dummy_value()

    size = types.int64
    return signature(types.void, starts, size, size, into, size), codegen


@intrinsic
def split_tile(typing: Any, numbers: Any, first: Any, start: Any, pitch: Any, at: Any) -> Any:
    """The way back: the TILE numbers from place `first` on become the bytes `at` to `at` + 63 of
    their rows, of which the first is at the address `start`."""
    n_bytes = numbers.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers, first, start, pitch, at = args
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, numbers).data
        vectors = [_load(builder, each) for each in _numbers(builder, sig.args[0], data, first)]
        eighths = [
            _taken_apart(builder, [builder.bitcast(each, _BYTES) for each in eighth], n_bytes)
            for eighth in _taken_apart(builder, vectors, 8)
        ]
        for byte in range(n_bytes):
            rows = _transposed(builder, [eighth[byte][0] for eighth in eighths])
            of_byte = builder.add(start, builder.mul(pitch, _WORD(8 * byte)))
            for row, place in zip(rows, _rows(builder, of_byte, pitch, at), strict=True):
                builder.store(row, place).align = 1
        return context.get_dummy_value()

    size = types.int64
    return signature(types.void, numbers, size, size, size, size), codegen


@part
def join(starts: Any, into: Any, to: int, count: int) -> None:
    """`count` numbers, a multiple of 8 and TILE at least, from place `to` of `into` on; arguments
    as of `join_tile`."""
    pitch = count // 8
    for at in range(0, pitch, _ROW_BYTES):
        # The last tile begins early enough to be whole, and writes again what is there.
        first = min(at, pitch - _ROW_BYTES)
        join_tile(starts, pitch, first, into, to + 8 * first)


@part
def split(numbers: Any, first: int, count: int, start: int) -> None:
    """The rows of `count` numbers, a multiple of 8 and TILE at least, from an address on."""
    pitch = count // 8
    for at in range(0, pitch, _ROW_BYTES):
        here = min(at, pitch - _ROW_BYTES)
        split_tile(numbers, first + 8 * here, start, pitch, here)
