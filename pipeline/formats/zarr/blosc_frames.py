"""Numbers into blosc frames and back: by kernels where a frame is of the kind that our writers
make, else by c-blosc. Both write the same bytes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from earmill.pipeline.storage.stored_file import Bytes

# For values as measured on features of all models, see the section on codecs of
# benchmarks/RESULTS.md.
BLOSC: dict[str, Any] = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
# c-blosc's rule.
LZ4_ACCELERATION = 10 - BLOSC["clevel"]
HEADER_BYTES = 16
# A frame of our writers begins so: versions of format and packer, then flags, which say that LZ4
# packed blocks split into streams behind a shuffle of bits.
OUR_FRAME = (2, 1, 0b00100100)
# Of a number.
KERNEL_SIZES = frozenset({1, 2, 4})
# Less is not worth loading a kernel for.
LEAST_BYTES = 2**16
# What threads of its own compress lies in the order in which they are done.
blosc.use_threads = False


def compress(numbers: NDArray[Any]) -> Bytes:
    """A frame of an array in C order, as c-blosc makes it."""
    frame = _compressed(numbers)
    return _by_c_blosc(numbers, numbers.itemsize) if frame is None else frame


def decompress(frame: Bytes, into: Bytes) -> None:
    """Fill memory with a frame that says it is of its size.

    Raises:
        RuntimeError: The frame is damaged.
    """
    # c-blosc says what is wrong where the kernel has not filled it.
    if not _decompressed(frame, into):
        blosc.decompress(frame, into)


def _compressed(numbers: NDArray[Any]) -> Bytes | None:
    """What a kernel makes of the numbers, if it can."""
    lz4 = _lz4("LZ4_compress_fast")
    if not lz4 or numbers.nbytes < LEAST_BYTES or numbers.itemsize not in KERNEL_SIZES:
        return None
    header = _header(numbers.nbytes, numbers.itemsize)
    if not _is_ours(header):
        return None
    # Here, so that whoever writes no frames pays for no compiler.
    from amtcore.kernels.vector.blosc_blocks import encode_blocks

    # As much as c-blosc has.
    frame = np.empty(numbers.nbytes + HEADER_BYTES, np.uint8)
    flat = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    nbytes = encode_blocks(flat, frame, _block_bytes(header), LZ4_ACCELERATION, lz4)
    if not nbytes:
        return None
    frame[:HEADER_BYTES] = header
    frame[12:HEADER_BYTES].view("<i4")[0] = nbytes
    return frame[:nbytes]


def _decompressed(frame: Bytes, into: Bytes) -> bool:
    """Whether a kernel has filled the memory."""
    lz4, size = _lz4("LZ4_decompress_safe"), int(frame[3])
    if not lz4 or len(into) < LEAST_BYTES or size not in KERNEL_SIZES or not _is_ours(frame):
        return False
    # As above.
    from amtcore.kernels.vector.blosc_blocks import decode_blocks

    whole = len(into) % size == 0
    return whole and decode_blocks(frame, into.view(f"u{size}"), _block_bytes(frame), lz4)


def _is_ours(frame: Bytes) -> bool:
    return tuple(frame[:3].tolist()) == OUR_FRAME


def _block_bytes(frame: Bytes) -> int:
    return int(frame[8:12].view("<i4")[0])


@functools.lru_cache(64)
def _header(nbytes: int, number_bytes: int) -> Bytes:
    """What c-blosc writes before so many bytes; how many they become is not theirs."""
    return _by_c_blosc(np.zeros(nbytes, np.uint8), number_bytes)[:HEADER_BYTES].copy()


def _by_c_blosc(numbers: NDArray[Any], number_bytes: int) -> Bytes:
    frame = blosc.compress(
        numbers.reshape(-1).view(np.uint8),
        BLOSC["cname"].encode(),
        BLOSC["clevel"],
        blosc.BITSHUFFLE,
        BLOSC["blocksize"],
        typesize=number_bytes,
    )
    return np.frombuffer(frame, np.uint8)


@functools.cache
def _lz4(name: str) -> int:
    """The address of a function of the LZ4 that c-blosc has inside; 0 where it is hidden, as in
    builds for Windows."""
    try:
        function = ctypes.CDLL(blosc.__file__)[name]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
