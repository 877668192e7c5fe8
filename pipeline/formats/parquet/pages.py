"""The pages of a column, their checksums held against their bytes faster than Arrow does it.

    column chunk = (page header, page)*      header: Thrift, compact protocol; page: as compressed
    header       = 1: type, 2: size, 3: size as stored, 4: CRC-32 of the page as stored, 5-8: ...

Arrow's own check costs twice what decoding does, and Python's zlib once; zlib-ng's hardly counts.
Only headers that our writers make are read here; of anything else nothing is said, and Arrow has to
check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

from zlib_ng import zlib_ng

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage.stored_file import Bytes

# Types of the compact protocol.
TRUE, FALSE, BYTE, I32, I64, BINARY, STRUCT = 1, 2, 3, 5, 6, 8, 12
VARINTS = frozenset({4, I32, I64})
KIND, DECODED_BYTES, STORED_BYTES, CRC, DATA = 1, 2, 3, 4, 5
# In `DATA`; and what stands there, and under `KIND`, of values one after the other.
CELLS, ENCODING, LEVEL_ENCODING = 1, 2, 3
DATA_PAGE, PLAIN, RLE = 0, 0, 3
# Of one header; ours have about 30 bytes.
MAX_HEADER_BYTES, MAX_DEPTH = 4096, 4

# The whole numbers of a header by field, and those of the structures in it.
Header = Mapping[int, Union[int, "Header"]]


class _StrangeHeaderError(ValueError):
    """Nothing that our writers make."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page whose checksum is that of its bytes.

    Args:
        begin, end: Where they lie in the column chunk, as stored.
        nbytes: Of them, decoded, as its header says.
        n_plain: How many cells it has one after the other; None where it has something else.
    """

    begin: int
    end: int
    nbytes: int
    n_plain: int | None


def checked_pages(column: Bytes) -> list[Page] | None:
    """The pages of a column chunk, whose checksums are those of their bytes; None where that cannot
    be told here.

    Raises:
        CommitError: A page is damaged.
    """
    content, at, found = column.data, 0, []
    while at < len(content):
        try:
            header, size = _struct(content[at : at + MAX_HEADER_BYTES], 0, 0)
            begin = at + size
            at = begin + _number(header, STORED_BYTES)
            crc = _number(header, CRC)
            page = Page(begin, at, _number(header, DECODED_BYTES), _n_plain(header))
        except (_StrangeHeaderError, IndexError):
            return None
        if not begin <= at <= len(content) or page.nbytes < 0:
            return None
        if zlib_ng.crc32(content[begin:at]) != crc & 0xFFFFFFFF:
            raise CommitError("the CRC-32 of a page is not that of its bytes: run `earmill verify`")
        found.append(page)
    return found


def _struct(content: memoryview, at: int, depth: int) -> tuple[Header, int]:
    """A structure, and where it ends."""
    if depth > MAX_DEPTH:
        raise _StrangeHeaderError
    found: dict[int, int | Header] = {}
    field = 0
    while True:
        head, at = content[at], at + 1
        if head == 0:
            return found, at
        kind, step = head & 15, head >> 4
        if not step:
            raise _StrangeHeaderError
        field += step
        if kind in (TRUE, FALSE):
            continue
        if kind in VARINTS:
            number, at = _varint(content, at)
            found[field] = (number >> 1) ^ -(number & 1)
        elif kind == BYTE:
            at += 1
        elif kind == BINARY:
            length, at = _varint(content, at)
            at += length
        elif kind == STRUCT:
            found[field], at = _struct(content, at, depth + 1)
        else:
            raise _StrangeHeaderError


def _n_plain(header: Header) -> int | None:
    """See `Page`."""
    data = header.get(DATA)
    if _number(header, KIND) != DATA_PAGE or not isinstance(data, Mapping):
        return None
    count = _number(data, CELLS)
    is_plain = data.get(ENCODING) == PLAIN and data.get(LEVEL_ENCODING) == RLE
    return count if is_plain and count >= 0 else None


def _number(header: Header, field: int) -> int:
    found = header.get(field)
    if not isinstance(found, int):
        raise _StrangeHeaderError
    return found


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
