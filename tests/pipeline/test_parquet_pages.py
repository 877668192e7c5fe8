"""Ranges of a Parquet file that are fetched, and the file that Arrow sees in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.common.byte_streams import joined_ranges
from earmill.pipeline.formats.parquet.format import FetchedRanges
from earmill.pipeline.storage.layout import Layout, StoredFile


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=8), st.integers(0, 30))
def test_ranges_cover_what_is_wanted_and_no_wide_gap(
    wanted: list[tuple[int, int]], gap: int
) -> None:
    spans = [(low, low + size) for low, size in wanted]
    found = joined_ranges(spans, gap)
    needed = {byte for low, high in spans for byte in range(low, high)}
    covered = {byte for low, high in found for byte in range(low, high)}
    assert needed <= covered
    assert all(low - end > gap for (_, end), (low, _) in pairwise(found))
    assert all({low, high - 1} <= needed for low, high in found)


def test_held_ranges_are_a_file_to_arrow(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    file = StoredFile(Layout.open(str(tmp_path)), "x", 100, "")
    held = FetchedRanges(file.nbytes, [(low, file.read(low, 10)) for low in (10, 50)])
    seen = pa.PythonFile(held, "r")
    assert seen.size() == 100
    assert seen.read_at(5, 52) == bytes(range(52, 57))
    seen.seek(12)
    assert seen.read(3) == bytes([12, 13, 14])
    for start, nbytes in ((18, 3), (30, 1), (60, 1), (10, -1)):
        with pytest.raises(ValueError, match="not fetched"):
            held.part(start, nbytes)
