"""Pages of a column: their checksums, and their cells decoded into the memory where they stay.

    column chunk = (page header, page)*      header: Thrift, compact protocol; page: as compressed
    header       = 1: type, 2: size, 3: size as stored, 4: CRC-32 of the page as stored, 5-8: ...

Arrow's own check costs twice what decoding does, and Python's zlib once; zlib-ng's hardly counts.
Only headers that our writers make are read here; of anything else nothing is said, and Arrow has to
check.

`plain_cells` decodes cells of bytes or text.

    page   = levels and cells, or an lz4 block of them: size of the levels (4 bytes), levels, cell*
    levels = a run that says that all cells are there
    cell   = its size (4 bytes), its bytes           sizes: unsigned, little endian

Arrow gives the same bytes after one more copy, in memory of its own that is new to the processor
every time, at less than half the speed. Only what our writers make is decoded here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
from numcodecs import lz4
from numpy.typing import NDArray
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


# As footers name them; a block of lz4 has no frame around it.
LZ4, UNCOMPRESSED = "LZ4", "UNCOMPRESSED"
SIZE = struct.Struct("<I")
# Memory begins at a multiple of this, and no number is larger.
ALIGNED_BYTES = 4

# Bytes that hold cells, and the first byte of each and the one behind it, (cells, 2).
Cells = tuple[Bytes, NDArray[np.int64]]


def plain_cells(
    column: Bytes,
    pages: Sequence[Page],
    codec: str,
    most: int,
    frame_bytes: int,
    memory: Callable[[int], Bytes],
) -> Cells | None:
    """The cells of a column chunk; None where it is none that our writers make, for Arrow.

    Args:
        column: As stored; where it can be, it is written to for a while.
        pages, codec: Of it.
        most: Bytes that it may have, decoded.
        frame_bytes: What makes up cells.
        memory: Gives so many bytes.
    """
    counts = [page.n_plain for page in pages if page.n_plain is not None]
    decode = DECODERS.get(codec)
    if not decode or len(counts) < len(pages) or sum(page.nbytes for page in pages) > most:
        return None
    levels = [*map(_levels, counts)]
    places = [*_places(pages, levels)]
    found = memory(places[-1] + pages[-1].nbytes if pages else 0)
    cells: list[tuple[int, int]] = []
    for page, count, before, place in zip(pages, counts, levels, places, strict=True):
        into = found[place : place + page.nbytes]
        if not decode(column, page, into):
            return None
        bounds = _bounds(into, before, count, frame_bytes)
        if bounds is None:
            return None
        cells += [(place + begin, place + end) for begin, end in bounds]
    return found, np.array(cells, np.int64).reshape(-1, 2)


def texts(content: Bytes, bounds: NDArray[np.int64]) -> list[str]:
    """Cells of text."""
    return [content[begin:end].tobytes().decode() for begin, end in bounds.tolist()]


def _places(pages: Sequence[Page], levels: Sequence[bytes]) -> Iterator[int]:
    """Where each page goes, one behind the other, so that its first cell is aligned."""
    end = 0
    for page, before in zip(pages, levels, strict=True):
        head = len(before) + SIZE.size
        place = -(-(end + head) // ALIGNED_BYTES) * ALIGNED_BYTES - head
        yield place
        end = place + page.nbytes


def _copied(column: Bytes, page: Page, into: Bytes) -> bool:
    """See `DECODERS`."""
    if page.end - page.begin != page.nbytes:
        return False
    into[:] = column[page.begin : page.end]
    return True


def _decompressed(column: Bytes, page: Page, into: Bytes) -> bool:
    """See `DECODERS`."""
    # The decoder wants the size before the block, where the last bytes of the page's header are.
    block = column[page.begin - SIZE.size : page.end]
    if not block.flags.writeable:
        block = block.copy()
    told = block[: SIZE.size]
    before = told.copy()
    told[:] = np.frombuffer(SIZE.pack(page.nbytes), np.uint8)
    try:
        lz4.decompress(block, into)
    except (RuntimeError, ValueError):
        return False
    finally:
        told[:] = before
    return True


# What fills memory with a page; False where that is none of this size.
DECODERS: Mapping[str, Callable[[Bytes, Page, Bytes], bool]] = {
    LZ4: _decompressed,
    UNCOMPRESSED: _copied,
}


def _levels(count: int) -> bytes:
    """What stands before so many cells that are all there: their size, and a run of ones."""
    run = bytearray()
    number = count << 1
    while number > 127:
        run.append(number & 127 | 128)
        number >>= 7
    run += bytes([number, 1])
    return SIZE.pack(len(run)) + run


def _bounds(
    page: Bytes, levels: bytes, count: int, frame_bytes: int
) -> list[tuple[int, int]] | None:
    """Where so many cells of a page begin and end, behind its levels; None where it has others."""
    content = page.data
    if content[: len(levels)] != levels:
        return None
    found, at, size_at = [], len(levels), SIZE.unpack_from
    for _ in range(count):
        begin = at + SIZE.size
        if begin > len(content):
            return None
        size = size_at(content, at)[0]
        if size % frame_bytes:
            return None
        at = begin + size
        found.append((begin, at))
    return found if at == len(content) else None
