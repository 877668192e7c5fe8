"""Cells of a column of bytes or text, decoded straight into the memory where they stay.

    page   = levels and cells, or an lz4 block of them: size of the levels (4 bytes), levels, cell*
    levels = a run that says that all cells are there
    cell   = its size (4 bytes), its bytes           sizes: unsigned, little endian

Arrow gives the same bytes after one more copy, in memory of its own that is new to the processor
every time, at less than half the speed. Only what our writers make is decoded here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numcodecs import lz4
from numpy.typing import NDArray

from earmill.pipeline.formats.parquet.pages import Page
from earmill.pipeline.storage.stored_file import Bytes

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
