"""Row groups of a Parquet shard: any choice of columns, read as it comes, by readers that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from earmill import open_features
from earmill.pipeline.formats.parquet import read, write
from earmill.pipeline.formats.parquet.read import HeldRanges, ParquetShard
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
        come = []
        for group, held in shard._arriving(columns):
            ranges = HeldRanges(len(content), held)
            for name in columns[group]:
                low, high = shard._span_of(name, group)
                assert ranges.part(low, high - low).tobytes() == content[low:high]
            come.append(group)
        assert come == [*columns]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each reader that is made, whether what it reads was checked before."""
    found: list[bool] = []
    real = ParquetShard._reader

    def counted(self: ParquetShard, *, checked: bool) -> Any:
        found.append(checked)
        return real(self, checked=checked)

    monkeypatch.setattr(ParquetShard, "_reader", counted)
    return found


def read_all(place: Path) -> None:
    """Row by row, in this thread."""
    ds = open_features(place)
    for number in range(len(ds)):
        check_row(ds[number], number)


def test_one_thread_makes_one_reader_of_a_file(place: Path, made: list[bool]) -> None:
    read_all(place)
    assert made == [True, True]


def test_pages_that_only_arrow_can_check_have_a_reader_that_does(
    place: Path, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "checked_pages", lambda column: None)
    read_all(place)
    # One of each file tells its schema, and reads no page.
    assert made.count(True) == 2 and made.count(False) >= 10


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Columns of row groups that Arrow reads."""
    found: list[str] = []
    real = ParquetShard._by_arrow

    def told(self: ParquetShard, held: Any, group: int, columns: Any, *, checked: bool) -> Any:
        found.extend(columns)
        return real(self, held, group, columns, checked=checked)

    monkeypatch.setattr(ParquetShard, "_by_arrow", told)
    return found


def test_what_our_writer_makes_is_read_without_arrow(place: Path, left: list[str]) -> None:
    read_all(place)
    assert not left


def test_row_ids_in_a_dictionary_are_left_to_arrow(
    tmp_path: Path, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert {*left} == {"row_id"}


def test_nested_lists_are_left_to_arrow(left: list[str]) -> None:
    layout1 = Path(__file__).parents[1] / "data" / "layout1" / "dataset"
    rows = [*open_features(layout1, format="parquet")]
    assert rows and {*left} == {"row_id", "modulation"}


def test_arrow_reads_the_same_rows(
    place: Path, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "plain_cells", lambda *_: None)
    read_all(place)
    assert {*left} == {*NAMES}


def test_memory_of_cells_is_used_again(place: Path) -> None:
    ds = open_features(place, format="parquet", cache_bytes=5000)
    cache = ds._here().shards.cache
    spare: set[int] = set()
    for number in range(len(ds)):
        check_row(ds[number], number)
        spare |= {memory.ctypes.data for memory in cache._spare}
        assert sum(memory.nbytes for memory in cache._spare) <= 5000
    assert 0 < len(spare) < len(ds)
