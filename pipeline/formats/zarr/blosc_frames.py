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
# What c-blosc makes of these settings.
LZ4_ACCELERATION, STREAM_BYTES = 5, 2**17
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
    return _by_c_blosc(numbers) if frame is None else frame


def decompress(frame: Bytes, into: Bytes) -> None:
    """Fill memory with a frame that says it is of its size.

    Raises:
        RuntimeError: The frame is damaged.
    """
    # c-blosc says what is wrong where the kernel has not filled it.
    if not _decompressed(frame, into):
        blosc.decompress(frame, into)


def exercise() -> None:
    """A frame there and back for every size of numbers, which compiles or loads the kernels."""
    for size in sorted(KERNEL_SIZES):
        numbers = np.zeros(LEAST_BYTES, f"u{size}")
        decompress(compress(numbers), numbers.view(np.uint8))


def _compressed(numbers: NDArray[Any]) -> Bytes | None:
    """What a kernel makes of the numbers, if it can."""
    lz4 = _lz4("LZ4_compress_fast")
    if not lz4 or numbers.nbytes < LEAST_BYTES or numbers.itemsize not in KERNEL_SIZES:
        return None
    # Here, so that whoever writes no frames pays for no compiler.
    from amtcore.kernels.vector.blosc_blocks import encode_blocks

    # As much as c-blosc has.
    frame = np.empty(numbers.nbytes + HEADER_BYTES, np.uint8)
    flat = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    block_bytes = min(numbers.nbytes, STREAM_BYTES * numbers.itemsize)
    nbytes = encode_blocks(flat, frame, block_bytes, LZ4_ACCELERATION, lz4)
    if not nbytes:
        return None
    frame[:4] = *OUR_FRAME, numbers.itemsize
    frame[4:HEADER_BYTES].view("<i4")[:] = numbers.nbytes, block_bytes, nbytes
    return frame[:nbytes]


def _decompressed(frame: Bytes, into: Bytes) -> bool:
    """Whether a kernel has filled the memory."""
    lz4, (*kind, size) = _lz4("LZ4_decompress_safe"), frame[:4].tolist()
    is_ours = tuple(kind) == OUR_FRAME and size in KERNEL_SIZES and len(into) % size == 0
    if not lz4 or not is_ours or len(into) < LEAST_BYTES:
        return False
    # As above.
    from amtcore.kernels.vector.blosc_blocks import decode_blocks

    block_bytes = int(frame[8:12].view("<i4")[0])
    return decode_blocks(frame, into.view(f"u{size}"), block_bytes, lz4)


def _by_c_blosc(numbers: NDArray[Any]) -> Bytes:
    frame = blosc.compress(
        numbers.reshape(-1).view(np.uint8),
        BLOSC["cname"].encode(),
        BLOSC["clevel"],
        blosc.BITSHUFFLE,
        BLOSC["blocksize"],
        typesize=numbers.itemsize,
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
