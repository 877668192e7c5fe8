"""Cells that are decoded without Arrow: those that Arrow gives, and of anything else none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import lz4

from earmill.pipeline.formats.parquet.pages import (
    LZ4,
    UNCOMPRESSED,
    Cells,
    Page,
    checked_pages,
    plain_cells,
    texts,
)
from tests.pipeline.test_parquet_pages import column_chunk

FRAME_BYTES = 6
MOST = 2**20


def memory(nbytes: int) -> np.ndarray:
    """Nothing that was not decoded looks like something that was."""
    return np.full(nbytes, 0xEE, np.uint8)


def chunk_of(cells: Sequence[bytes | None], path: Path, **options: Any) -> np.ndarray:
    """The column chunk that Arrow writes of cells."""
    how = {"compression": "lz4", "use_dictionary": False} | options
    return column_chunk(path, cells, **how)[1]


def decoded(column: np.ndarray, most: int = MOST, codec: str = LZ4) -> Cells | None:
    """What is made of a column chunk."""
    pages = checked_pages(column)
    assert pages
    return plain_cells(column, pages, codec, most, FRAME_BYTES, memory)


def contents(found: Cells | None) -> list[bytes]:
    """Cell by cell."""
    assert found is not None
    whole, bounds = found
    return [whole[begin:end].tobytes() for begin, end in bounds]


@given(
    st.lists(
        st.one_of(
            st.integers(0, 30).map(lambda n: bytes(FRAME_BYTES * n)),
            st.integers(0, 9).flatmap(
                lambda n: st.binary(min_size=FRAME_BYTES * n, max_size=FRAME_BYTES * n)
            ),
        ),
        min_size=1,
        max_size=300,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_cells_are_those_that_were_written(tmp_path: Path, cells: list[bytes]) -> None:
    for codec, name in ((LZ4, "lz4"), (UNCOMPRESSED, "none")):
        column = chunk_of(cells, tmp_path / "x", compression=name)
        before = column.copy()
        found = decoded(column, codec=codec)
        assert contents(found) == cells
        assert found is not None and not (found[1][:, 0] % 2).any()
        assert np.array_equal(column, before)


def test_the_first_cell_of_every_page_is_aligned(tmp_path: Path) -> None:
    # Pages of more than 63 cells have levels of an odd size.
    cells = [bytes([n % 5]) * FRAME_BYTES * (n % 2) for n in range(2000)]
    column = chunk_of(cells, tmp_path / "x", data_page_version="1.0")
    pages = checked_pages(column)
    assert pages is not None and len(pages) > 2
    found = decoded(column)
    assert found is not None and contents(found) == cells
    firsts = np.cumsum([0, *(page.n_plain or 0 for page in pages[:-1])])
    assert not (found[1][firsts, 0] % 4).any()


def test_bytes_that_cannot_be_written_to_are_decoded_too(tmp_path: Path) -> None:
    column = chunk_of([bytes(60), bytes(6)], tmp_path / "x")
    column.flags.writeable = False
    assert contents(decoded(column)) == [bytes(60), bytes(6)]


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        ([bytes(6), None, bytes(6)], {}),
        ([bytes(6), bytes(6)], {"use_dictionary": True}),
        ([bytes(6), bytes(7)], {}),
        ([bytes(12), bytes(6)], {"compression": "zstd"}),
        ([bytes(6)], {"data_page_version": "2.0"}),
    ],
)
def test_what_our_writers_do_not_make_is_left_to_arrow(
    tmp_path: Path, cells: list[bytes | None], options: dict[str, Any]
) -> None:
    column = chunk_of(cells, tmp_path / "x", **options)
    before = column.copy()
    assert decoded(column) is None
    assert np.array_equal(column, before)


def test_no_more_is_decoded_than_the_footer_says(tmp_path: Path) -> None:
    column = chunk_of([bytes(600)], tmp_path / "x")
    pages = checked_pages(column) or []
    nbytes = sum(page.nbytes for page in pages)
    assert decoded(column, nbytes) is not None
    assert decoded(column, nbytes - 1) is None


def page_of(content: bytes, count: int) -> tuple[np.ndarray, list[Page]]:
    """A column chunk with one page, whose header is not read again."""
    stored = b"head" + lz4.compress(content)[4:]
    return np.frombuffer(stored, np.uint8).copy(), [Page(4, len(stored), len(content), count)]


LEVELS = struct.pack("<I", 2) + bytes([4, 1])
CELL = struct.pack("<I", FRAME_BYTES) + bytes(range(FRAME_BYTES))


@pytest.mark.parametrize(
    ("content", "count", "is_good"),
    [
        (LEVELS + 2 * CELL, 2, True),
        (LEVELS + 2 * CELL, 1, False),
        (LEVELS + 2 * CELL, 3, False),
        (LEVELS + 2 * CELL + b"more", 2, False),
        (LEVELS + CELL, 2, False),
        (LEVELS + CELL + CELL[:-1], 2, False),
        (LEVELS + CELL + CELL[:3], 2, False),
        (LEVELS + CELL + struct.pack("<I", 2**32 - 4), 2, False),
        (struct.pack("<I", 2) + bytes([4, 0]) + 2 * CELL, 2, False),
        (2 * CELL, 2, False),
    ],
)
def test_cells_fill_their_page(content: bytes, count: int, is_good: bool) -> None:
    column, pages = page_of(content, count)
    found = plain_cells(column, pages, LZ4, MOST, FRAME_BYTES, memory)
    assert (found is not None) is is_good
    if is_good:
        assert contents(found) == 2 * [bytes(range(FRAME_BYTES))]


@pytest.mark.parametrize("nbytes", [5, 7])
def test_a_page_as_it_is_has_its_size(nbytes: int) -> None:
    page = Page(4, 10, nbytes, 1)
    assert plain_cells(memory(10), [page], UNCOMPRESSED, MOST, 1, memory) is None


def test_codecs_that_are_not_known_are_left_to_arrow() -> None:
    column, pages = page_of(LEVELS + 2 * CELL, 2)
    assert plain_cells(column, pages, "LZ4_HADOOP", MOST, FRAME_BYTES, memory) is None


def test_texts_are_read(tmp_path: Path) -> None:
    told = ["a.wav", "", "\u00e4/\u4e2d.flac", "x" * 500] * 40
    column = chunk_of([each.encode() for each in told], tmp_path / "x", compression="none")
    found = plain_cells(column, checked_pages(column) or [], UNCOMPRESSED, MOST, 1, memory)
    assert found is not None and texts(*found) == told


def test_a_block_of_another_size_is_none() -> None:
    column, (page,) = page_of(LEVELS + 2 * CELL, 2)
    for nbytes in (page.nbytes - 1, page.nbytes + 1, 0):
        wrong = [Page(page.begin, page.end, nbytes, page.n_plain)]
        assert plain_cells(column, wrong, LZ4, MOST, FRAME_BYTES, memory) is None
    damaged = column[:-3].copy()
    cut = [Page(page.begin, len(damaged), page.nbytes, page.n_plain)]
    assert plain_cells(damaged, cut, LZ4, MOST, FRAME_BYTES, memory) is None
