"""Numbers into stored chunks and back, byte for byte as zarr writes and reads them.

    chunk   = body crc          crc: CRC-32C of the body, four bytes, little endian
    body    = blosc frame | zstd frame | the numbers themselves

zarr gives the same numbers; its general path costs several copies and a thread change a chunk. Here
a chunk is decoded straight into the array where it stays. What a frame says of its size is held
against what the metadata says before anything is decoded.

Blosc frames of the kind that our writers make are encoded and decoded by kernels, others by
c-blosc. Both write the same bytes.

zarr's general path costs four times what its compressor does. Here an array of frames goes to the
compressor and what that gives to the file. Every byte is the one that zarr-python would write: a
test has both write the same rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
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


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Compressors inside of blosc that our writers use or may use.
BLOSC_NAMES = frozenset({"lz4", "zstd"})


class CRC:
    """The CRC-32C that follows the bytes it is of."""

    codec = "crc32c"
    nbytes = 4

    @classmethod
    def checked(cls, stored: Bytes) -> Bytes:
        """The bytes before it.

        Raises:
            CommitError: It is not theirs.
        """
        body, told = stored[: -cls.nbytes], stored[-cls.nbytes :]
        if len(told) < cls.nbytes or google_crc32c.value(body) != _number(told):
            raise CommitError(
                "the CRC-32C of a chunk is not that of its bytes: run `earmill verify`"
            )
        return body


@dataclass(frozen=True)
class ChunkCodec:
    """How the chunks of an array are stored.

    Args:
        compressor: blosc, zstd, or "" for none.
        has_crc: A checksum follows the body; stores of layout version 1 have none.
    """

    compressor: str
    has_crc: bool

    @classmethod
    def of(cls, codecs: Sequence[Mapping[str, Any]], first: str = "bytes") -> ChunkCodec:
        """Out of a chain of codecs in the metadata of an array.

        Args:
            codecs: `first`, perhaps a compressor, then perhaps the checksum.
            first: What turns values into bytes.
        Raises:
            ValueError: Another chain than our writers make or have made.
        """
        names = [codec["name"] for codec in codecs]
        has_crc = names[-1] == CRC.codec
        inner = codecs[1:-1] if has_crc else codecs[1:]
        known = (
            names[0] == first
            and codecs[0].get("configuration", {}).get("endian", "little") == "little"
            and len(inner) <= 1
            and all(_is_known(codec) for codec in inner)
        )
        if not known:
            raise ValueError(f"expected {first}, then blosc or zstd, then crc32c, got {names}")
        return cls(inner[0]["name"] if inner else "", has_crc)

    def decode_into(self, values: NDArray[Any], stored: Bytes) -> None:
        """Fill an array with a stored chunk.

        Raises:
            CommitError: The chunk is damaged, or not of this size.
        """
        body = self._body(stored)
        self._check_size(body, values.nbytes, values.nbytes)
        self._decompress(body, values.reshape(-1).view(np.uint8))

    def decode_bytes(self, stored: Bytes, most: int) -> Bytes:
        """A stored chunk of unknown size, up to `most` bytes; raises as `decode_into`."""
        body = self._body(stored)
        found = np.empty(self._check_size(body, 0, most), np.uint8)
        self._decompress(body, found)
        return found

    def _body(self, stored: Bytes) -> Bytes:
        return CRC.checked(stored) if self.has_crc else stored

    def _check_size(self, body: Bytes, least: int, most: int) -> int:
        """What the body says it will be, decoded, if that is within bounds."""
        size = {"blosc": _blosc_size, "zstd": _zstd_size, "": len}[self.compressor](body)
        if not least <= size <= most:
            raise CommitError(
                f"expected a chunk of {most} bytes, got one of {size}: run `earmill verify`"
            )
        return size

    def _decompress(self, body: Bytes, into: Bytes) -> None:
        try:
            if self.compressor == "blosc":
                decompress(body, into)
            elif self.compressor == "zstd":
                zstd.decompress(body, into)
            else:
                into[:] = body
        except (RuntimeError, ValueError) as error:
            raise CommitError(
                f"a chunk cannot be decoded ({error}): run `earmill verify`"
            ) from error


def _is_known(codec: Mapping[str, Any]) -> bool:
    name = codec["name"]
    return name == "zstd" or (name == "blosc" and codec["configuration"]["cname"] in BLOSC_NAMES)


def strings(content: Bytes) -> list[str]:
    """What vlen-utf8 holds: how many, then each with its length before it.

    Raises:
        ValueError: The bytes end before the strings do, or go on behind them.
    """
    data, at, found = content.tobytes(), 4, []
    for _ in range(_number(content[:4])):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data) or at + 4 > len(data):
            raise ValueError("a list of row ids ends too early")
        found.append(data[at + 4 : end].decode())
        at = end
    if at != len(data):
        raise ValueError("a list of row ids has bytes behind its end")
    return found


def _blosc_size(body: Bytes) -> int:
    if len(body) < HEADER_BYTES or _number(body[12:16]) != len(body):
        raise CommitError("a chunk is no blosc frame: run `earmill verify`")
    return _number(body[4:8])


def _zstd_size(body: Bytes) -> int:
    """RFC 8878, section 3.1.1.1: the size of the content follows descriptor, window, dictionary."""
    descriptor = int(body[4]) if len(body) > 4 and body[:4].tobytes() == ZSTD_MAGIC else 0
    single = descriptor >> 5 & 1
    size_bytes = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if not size_bytes or len(body) < start + size_bytes:
        raise CommitError("a chunk is no zstd frame of known size: run `earmill verify`")
    return _number(body[start : start + size_bytes]) + (256 if size_bytes == 2 else 0)


def _number(little_endian: Bytes) -> int:
    return int.from_bytes(little_endian.tobytes(), "little")


ZSTD: dict[str, Any] = {"level": 3, "checksum": False}
# Both numbers of an index entry where no chunk is.
NO_CHUNK = np.iinfo(np.uint64).max


def write_frames(path: Path, chunks: Iterable[NDArray[Any]], places: int) -> None:
    """An object: chunks of frames of equal size, and where they lie; the last one of a stream may
    have fewer than there are places."""
    spans = np.full((places, 2), NO_CHUNK, "<u8")
    with path.open("wb") as file:
        for place, chunk in enumerate(chunks):
            at = file.tell()
            frame = compress(chunk)
            file.write(frame.data)
            file.write(_checksum(frame))
            spans[place] = at, file.tell() - at
        file.write(_checked(spans.tobytes()))


def write_vector(path: Path, content: bytes) -> None:
    """The one chunk of a short array."""
    path.write_bytes(vector_chunk(content))


def vector_chunk(content: bytes) -> bytes:
    """The one chunk of a short array as it is written."""
    return _checked(bytes(zstd.compress(content, ZSTD["level"], ZSTD["checksum"])))


def vlen_utf8(texts: Sequence[str]) -> bytes:
    """How many, then each with its length before it; `chunk_codecs.strings` reads it."""
    parts = [len(texts).to_bytes(4, "little")]
    for text in texts:
        data = text.encode()
        parts += [len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


def _checked(body: bytes) -> bytes:
    return body + _checksum(body)


def _checksum(body: bytes | Bytes) -> bytes:
    """Behind what is written: the last step of writing, hence the first of reading."""
    return google_crc32c.value(body).to_bytes(CRC.nbytes, "little")
