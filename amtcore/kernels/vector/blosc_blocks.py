"""Blocks of blosc frames, packed by LZ4 behind a shuffle of bits: numbers into them, and back.

    frame  = header[16] start[n_blocks] block*       start: first byte of a block; little endian
    block  = (nbytes packed)*                        a stream for each byte of a number; one in a
                                                     shorter last block, and where blocks are tiny
    packed = LZ4 block, or plain where nbytes says so

c-blosc spends over half of its time of reading, and a third of its time of writing, on bits, in
vectors of 16 bytes; here they cost a tenth (`bit_planes`), and plain streams, as those of the low
bits of noise are, are read where they lie. LZ4 itself is a library's, called by its address. All of
a frame is one call without the interpreter's lock.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic
from numpy.typing import NDArray

from amtcore.kernels.vector.bit_planes import TILE, join, split
from amtcore.kernels.vector.jit import kernel, part, read_only

HEADER_BYTES = 16
# Of a stream: a block with less for each byte of a number is not split.
_LEAST_STREAM_BYTES = 128

_here = threading.local()


def decode_blocks(
    frame: NDArray[np.uint8], into: NDArray[Any], block_bytes: int, lz4_decompress_safe: int
) -> bool:
    """Fill an array of unsigned numbers with what a frame holds.

    Args:
        block_bytes: Of every block but the last, decoded.
        lz4_decompress_safe: The address of LZ4's function of that name.
    Returns:
        Whether it is filled. If not, the frame is damaged, or has blocks that c-blosc shuffles in
        another way: they are small, or their numbers are no multiple of 8.
    """
    if not _is_possible(into, block_bytes):
        return False
    room = _room(block_bytes)
    return bool(_decode_blocks(read_only(frame), into, block_bytes, room, lz4_decompress_safe))


def encode_blocks(
    numbers: NDArray[Any],
    frame: NDArray[np.uint8],
    block_bytes: int,
    acceleration: int,
    lz4_compress_fast: int,
) -> int:
    """Write the blocks of a frame, and where they start, behind the room for its header.

    Args:
        numbers: Flat, of an unsigned type.
        block_bytes: Of every block but the last, before it is packed.
        acceleration, lz4_compress_fast: LZ4's, and the address of its function of that name.
    Returns:
        Bytes of the frame; 0 where they would not fit, or c-blosc would write another kind.
    """
    if not _is_possible(numbers, block_bytes):
        return 0
    room = _room(block_bytes)
    return int(
        _encode_blocks(
            read_only(numbers), frame, block_bytes, room, acceleration, lz4_compress_fast
        )
    )


def _is_possible(numbers: NDArray[Any], block_bytes: int) -> bool:
    return 0 < block_bytes <= numbers.nbytes and block_bytes % numbers.itemsize == 0


def _room(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread for the streams of a block."""
    room: NDArray[np.uint8] | None = getattr(_here, "room", None)
    if room is None or len(room) < nbytes:
        room = _here.room = np.empty(nbytes, np.uint8)
    return room


@kernel
def _decode_blocks(frame, into, block_bytes, room, lz4):  # type: ignore[no-untyped-def]
    total, size = into.size * into.itemsize, into.itemsize
    starts = np.empty(size, np.int64)
    n_blocks = (total + block_bytes - 1) // block_bytes
    if HEADER_BYTES + 4 * n_blocks > len(frame):
        return False
    for block in range(n_blocks):
        nbytes = min(block_bytes, total - block * block_bytes)
        n_streams, shuffled = _layout(nbytes, block_bytes, size)
        if n_streams == 0:
            return False
        place = _word(frame, HEADER_BYTES + 4 * block)
        if not _unpack(frame, place, n_streams, nbytes // n_streams, room, starts, lz4):
            return False
        for byte in range(n_streams, size):
            starts[byte] = starts[0] + byte * (nbytes // size)
        if shuffled:
            join(starts, into, block * block_bytes // size, nbytes // size)
        else:
            _copy(starts[0], _address(into) + block * block_bytes, nbytes)
    return True


@part
def _layout(nbytes, block_bytes, size):  # type: ignore[no-untyped-def]
    """Streams of a block, and whether its bits are shuffled; no streams: another kind than here."""
    count = nbytes // size
    n_streams = size if nbytes == block_bytes and count >= _LEAST_STREAM_BYTES else 1
    shuffled = count % 8 == 0
    is_ours = count >= TILE if shuffled else n_streams == 1
    return (n_streams if is_ours else 0), shuffled


@part
def _unpack(  # type: ignore[no-untyped-def]
    frame, place, n_streams, nbytes, room, starts, lz4
):
    """Addresses of the streams of the block at `place`; whether they are all there."""
    for stream in range(n_streams):
        if place + 4 > len(frame):
            return False
        stored, place = _word(frame, place), place + 4
        if place + stored > len(frame):
            return False
        source, target = _address(frame) + place, _address(room) + stream * nbytes
        if stored == nbytes:
            starts[stream] = source
        elif _unpacked(lz4, source, target, stored, nbytes) == nbytes:
            starts[stream] = target
        else:
            return False
        place += stored
    return True


@kernel
def _encode_blocks(  # type: ignore[no-untyped-def]
    numbers, frame, block_bytes, room, acceleration, lz4
):
    total, size = numbers.size * numbers.itemsize, numbers.itemsize
    n_blocks = (total + block_bytes - 1) // block_bytes
    place = HEADER_BYTES + 4 * n_blocks
    for block in range(n_blocks):
        nbytes = min(block_bytes, total - block * block_bytes)
        n_streams, shuffled = _layout(nbytes, block_bytes, size)
        if n_streams == 0:
            return 0
        if shuffled:
            split(numbers, block * block_bytes // size, nbytes // size, _address(room))
        else:
            _copy(_address(numbers) + block * block_bytes, _address(room), nbytes)
        _put_word(frame, HEADER_BYTES + 4 * block, place)
        place = _pack(frame, place, n_streams, nbytes // n_streams, room, acceleration, lz4)
        if place == 0:
            return 0
    return place


@part
def _pack(  # type: ignore[no-untyped-def]
    frame, place, n_streams, nbytes, room, acceleration, lz4
):
    """Write the streams of a block; the place behind them, 0 where there is no room for them."""
    for stream in range(n_streams):
        most = min(nbytes, len(frame) - place - 4)
        if most <= 0:
            return 0
        source, target = _address(room) + stream * nbytes, _address(frame) + place + 4
        stored = _packed(lz4, source, target, nbytes, most, acceleration)
        if stored <= 0 or stored >= nbytes:
            if most < nbytes:
                return 0
            _copy(source, target, nbytes)
            stored = nbytes
        _put_word(frame, place, stored)
        place += 4 + stored
    return place


@part
def _address(array):  # type: ignore[no-untyped-def]
    return np.int64(array.ctypes.data)


@part
def _word(frame, at):  # type: ignore[no-untyped-def]
    word = np.int64(frame[at]) | np.int64(frame[at + 1]) << 8
    return word | np.int64(frame[at + 2]) << 16 | np.int64(frame[at + 3]) << 24


@part
def _put_word(frame, at, word):  # type: ignore[no-untyped-def]
    for byte in range(4):
        frame[at + byte] = (word >> (8 * byte)) & 0xFF


def _called(builder: Any, args: Any) -> Any:
    """Call what is at an address with two further ones, then 32-bit numbers."""
    function, source, target, *numbers = args
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(number, [pointer, pointer, *[number] * len(numbers)])
    found = builder.call(
        builder.inttoptr(function, kind.as_pointer()),
        [
            *(builder.inttoptr(each, pointer) for each in (source, target)),
            *(builder.trunc(each, number) for each in numbers),
        ],
    )
    return builder.sext(found, ir.IntType(64))


@intrinsic
def _unpacked(typing: Any, lz4: Any, source: Any, target: Any, nbytes: Any, most: Any) -> Any:
    """What LZ4_decompress_safe returns: bytes that it wrote, or a number below zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _called(builder, args)

    return signature(*[types.int64] * 6), codegen


@intrinsic
def _packed(
    typing: Any, lz4: Any, source: Any, target: Any, nbytes: Any, most: Any, acceleration: Any
) -> Any:
    """What LZ4_compress_fast returns: bytes that it wrote, 0 where `most` have no room for them."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _called(builder, args)

    return signature(*[types.int64] * 7), codegen


@intrinsic
def _copy(typing: Any, source: Any, target: Any, nbytes: Any) -> Any:
    """Copy bytes between addresses."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        source, target = (builder.inttoptr(each, pointer) for each in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return signature(types.void, types.int64, types.int64, types.int64), codegen
