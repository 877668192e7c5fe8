"""Row groups of a Parquet shard: any choice of columns, read as it comes, by readers that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from earmill import open_features
from earmill.pipeline.formats.parquet import format as write
from earmill.pipeline.formats.parquet.format import FetchedRanges, ParquetShard
from tests.pipeline.reader_data import (
    STREAMS,
    check_row,
    small_row_groups,
    write_set,
)

NAMES = ("row_id", *(info.name for info in STREAMS))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two shards of several row groups."""
    with small_row_groups():
        write_set(tmp_path, n_rows=40, rows_per_shard=20, formats=["parquet"], finalised=True)
    return tmp_path


def shard_of(place: Path) -> ParquetShard:
    """The first one."""
    ds = open_features(place)
    found = ds._here().reader("00000")
    assert isinstance(found, ParquetShard)
    return found


def wanted(groups: Sequence[int]) -> list[Mapping[int, Sequence[str]]]:
    """Choices of columns, the same or others of each row group."""
    some = [*chain(*(combinations(NAMES, n) for n in (1, 2, 3)))]
    same = [dict.fromkeys(groups, names) for names in some]
    others = [{group: some[(group + n) % len(some)] for group in groups} for n in range(len(some))]
    return [*same, *others, {groups[-1]: NAMES}, {groups[0]: NAMES, groups[-1]: NAMES}]


@pytest.mark.parametrize("gap_bytes", [0, 500, 2**17])
def test_each_row_group_comes_with_all_of_its_columns(place: Path, gap_bytes: int) -> None:
    shard = shard_of(place)
    shard._gap_bytes = gap_bytes
    (file,) = sorted(place.glob("data/00000-*.parquet"))
    content, groups = file.read_bytes(), range(shard._footer.num_row_groups)
    assert len(groups) > 2
    for columns in wanted(groups):
        ranges = FetchedRanges(len(content), shard._fetched(columns))
        for group, names in columns.items():
            for name in names:
                low, high = shard._range_of(name, group)
                assert ranges.part(low, high - low).tobytes() == content[low:high]


def read_all(place: Path) -> None:
    """Row by row, in this thread."""
    ds = open_features(place)
    for number in range(len(ds)):
        check_row(ds[number], number)


def test_row_ids_in_a_dictionary_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files had them before."""

    def earlier(scalars: pa.Table, *others: Any) -> dict[str, Any]:
        found = real(scalars, *others)
        found["use_dictionary"].append("row_id")
        found["compression"]["row_id"] = "zstd"
        return found

    real = write._options
    monkeypatch.setattr(write, "_options", earlier)
    with small_row_groups():
        write_set(tmp_path, n_rows=40, rows_per_shard=20, formats=["parquet"], finalised=True)
    read_all(tmp_path)
