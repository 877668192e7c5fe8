"""Stored chunks into numbers: checksum, claimed size, then one call of a decompressor.

    chunk   = body crc          crc: CRC-32C of the body, four bytes, little endian
    body    = blosc frame | zstd frame | the numbers themselves

zarr gives the same numbers; its general path costs several copies and a thread change a chunk. Here
a chunk is decoded straight into the array where it stays. What a frame says of its size is held
against what the metadata says before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.zarr import blosc_frames
from earmill.pipeline.storage.stored_file import Bytes

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
                blosc_frames.decompress(body, into)
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
    if len(body) < blosc_frames.HEADER_BYTES or _number(body[12:16]) != len(body):
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
