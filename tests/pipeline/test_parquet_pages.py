"""Checksums of Parquet pages as we check them: every page, every flipped bit, nothing strange."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.parquet.pages import checked_pages
from earmill.pipeline.formats.parquet.read import HeldRanges, fetched, joined
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile

CELLS = [bytes([n % 7]) * (n % 50) for n in range(60)]


def column_chunk(
    path: Path, cells: Sequence[bytes | None] = CELLS, **options: Any
) -> tuple[int, np.ndarray]:
    """A file with a column of cells in pages of about 8; where it starts, and its bytes."""
    table = pa.table({"a": pa.array(cells, pa.binary())})
    how: Mapping[str, Any] = {"write_page_checksum": True, "compression": "none"} | options
    pq.write_table(table, path, data_page_size=256, write_batch_size=8, **how)
    column = pq.read_metadata(path).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content = path.read_bytes()[start : start + column.total_compressed_size]
    return start, np.frombuffer(content, np.uint8).copy()


def arrow_finds_damage(path: Path) -> bool:
    """What Arrow's own check of pages says."""
    try:
        pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False).read()
    except (OSError, pa.ArrowException) as error:
        return "CRC" in str(error)
    return False


@pytest.mark.parametrize("dictionary", [False, True])
def test_what_arrow_finds_is_found(tmp_path: Path, dictionary: bool) -> None:
    path = tmp_path / "x"
    start, column = column_chunk(path, use_dictionary=dictionary)
    assert checked_pages(column)
    damage = 0
    for at in range(0, len(column), 2):
        column[at] ^= 1 << at % 8
        with path.open("r+b") as file:
            file.seek(start)
            file.write(column.tobytes())
        if arrow_finds_damage(path):
            damage += 1
            try:
                assert checked_pages(column) is None, at
            except CommitError as error:
                assert "CRC-32" in str(error)
        column[at] ^= 1 << at % 8
    assert damage > 0.7 * len(column) / 2


def test_pages_without_checksum_are_left_to_arrow(tmp_path: Path) -> None:
    assert checked_pages(column_chunk(tmp_path / "x", compression="lz4")[1])
    assert checked_pages(column_chunk(tmp_path / "y", write_page_checksum=False)[1]) is None


def varint(number: int) -> bytes:
    """A whole number with its sign, as headers have it."""
    rest, found = (number << 1) ^ (number >> 63), bytearray()
    while rest > 127:
        found.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*found, rest])


@pytest.mark.parametrize(
    ("count", "encoding", "levels", "n_plain"),
    [
        (5, 0, 3, 5),
        (70_000, 0, 3, 70_000),
        (0, 0, 3, 0),
        (-5, 0, 3, None),
        (5, 8, 3, None),
        (5, 0, 4, None),
    ],
)
def test_a_header_says_how_many_cells_lie_in_a_page(
    count: int, encoding: int, levels: int, n_plain: int | None
) -> None:
    page, crc = b"page", zlib.crc32(b"page")
    crc -= (crc >> 31) << 32
    numbers = b"".join(b"\x15" + varint(each) for each in (0, 99, len(page), crc))
    data = b"".join(b"\x15" + varint(each) for each in (count, encoding, levels, 3))
    content = numbers + b"\x1c" + data + b"\0\0" + page
    (found,) = checked_pages(np.frombuffer(content, np.uint8)) or []
    assert (found.nbytes, found.n_plain) == (99, n_plain)
    assert content[found.begin : found.end] == page


@given(st.binary(max_size=200))
def test_other_bytes_are_never_called_good(content: bytes) -> None:
    try:
        found = checked_pages(np.frombuffer(content, np.uint8))
    except CommitError:
        return
    assert found is None or not content


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=8), st.integers(0, 30))
def test_ranges_cover_what_is_wanted_and_no_wide_gap(
    wanted: list[tuple[int, int]], gap: int
) -> None:
    spans = [(low, low + size) for low, size in wanted]
    found = [*joined(spans, gap)]
    needed = {byte for low, high in spans for byte in range(low, high)}
    covered = {byte for low, high in found for byte in range(low, high)}
    assert needed <= covered
    assert all(low - end > gap for (_, end), (low, _) in pairwise(found))
    assert all({low, high - 1} <= needed for low, high in found)


def test_held_ranges_are_a_file_to_arrow(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    file = StoredFile(Layout.open(str(tmp_path)), "x", 100, "")
    held = HeldRanges(file.nbytes, fetched(file, [(10, 20), (50, 60)]))
    seen = pa.PythonFile(held, "r")
    assert seen.size() == 100
    assert seen.read_at(5, 52) == bytes(range(52, 57))
    seen.seek(12)
    assert seen.read(3) == bytes([12, 13, 14])
    for start, nbytes in ((18, 3), (30, 1), (60, 1), (10, -1)):
        with pytest.raises(ValueError, match="not fetched"):
            held.part(start, nbytes)
