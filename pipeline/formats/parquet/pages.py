"""The checksums of a column's pages, held against their bytes faster than Arrow does it.

    column chunk = (page header, page)*      header: Thrift, compact protocol; page: as compressed
    header       = 1: type, 2: size, 3: size as stored, 4: CRC-32 of the page as stored, 5-8: ...

Arrow's own check costs twice what decoding does, and Python's zlib once; zlib-ng's hardly counts.
Only headers that our writers make are read here; of anything else nothing is said, and Arrow has to
check.
"""

from __future__ import annotations

from zlib_ng import zlib_ng

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage.stored_file import Bytes

# Types of the compact protocol.
TRUE, FALSE, BYTE, I32, I64, BINARY, STRUCT = 1, 2, 3, 5, 6, 8, 12
VARINTS = frozenset({4, I32, I64})
STORED_BYTES, CRC = 3, 4
# Of one header; ours have about 30 bytes.
MAX_HEADER_BYTES, MAX_DEPTH = 4096, 4


class _StrangeHeaderError(ValueError):
    """Nothing that our writers make."""


def check_pages(column: Bytes) -> bool:
    """Whether the checksums of all pages of a column chunk are those of their bytes; False where
    that cannot be told here.

    Raises:
        CommitError: A page is damaged.
    """
    content, at = column.data, 0
    while at < len(content):
        try:
            header, size = _page_header(content[at : at + MAX_HEADER_BYTES])
        except (_StrangeHeaderError, IndexError):
            return False
        if not {STORED_BYTES, CRC} <= {*header}:
            return False
        begin, at = at + size, at + size + header[STORED_BYTES]
        if header[STORED_BYTES] < 0 or at > len(content):
            return False
        if zlib_ng.crc32(content[begin:at]) != header[CRC] & 0xFFFFFFFF:
            raise CommitError("the CRC-32 of a page is not that of its bytes: run `earmill verify`")
    return True


def _page_header(content: memoryview) -> tuple[dict[int, int], int]:
    """The whole numbers of a header by field, and its bytes."""
    return _struct(content, 0, 0)


def _struct(content: memoryview, at: int, depth: int) -> tuple[dict[int, int], int]:
    if depth > MAX_DEPTH:
        raise _StrangeHeaderError
    numbers: dict[int, int] = {}
    field = 0
    while True:
        head, at = content[at], at + 1
        if head == 0:
            return numbers, at
        kind, step = head & 15, head >> 4
        if not step:
            raise _StrangeHeaderError
        field += step
        if kind in (TRUE, FALSE):
            continue
        if kind in VARINTS:
            number, at = _varint(content, at)
            numbers[field] = (number >> 1) ^ -(number & 1)
        elif kind == BYTE:
            at += 1
        elif kind == BINARY:
            length, at = _varint(content, at)
            at += length
        elif kind == STRUCT:
            _, at = _struct(content, at, depth + 1)
        else:
            raise _StrangeHeaderError


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte, at = content[at], at + 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
        if shift > 63:
            raise _StrangeHeaderError
