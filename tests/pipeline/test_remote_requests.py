"""What a remote store is asked for: first things once, objects in few requests, no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.format import format_of
from earmill.pipeline.formats.parquet import format as parquet_format
from earmill.pipeline.formats.zarr import arrays as zarr_arrays
from earmill.pipeline.formats.zarr import format as zarr_format
from earmill.pipeline.reader.catalog import RowLocations
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import (
    check_row,
    chunked_seconds,
    finish,
    make_row,
    write_chunked,
    write_set,
)


def test_a_remote_store_is_asked_once_for_what_comes_first(asked: list[tuple[str, int]]) -> None:
    """Ids, starts and indexes of both shards come before the chunks, and not again; ids of both
    streams are the same bytes and come once."""
    write_set("memory://read-ahead", n_rows=8, rows_per_shard=4)
    ds = open_features("memory://read-ahead", format="zarr")
    ds.prefetch(range(8))
    finish(ds)
    before = sorted(asked)
    assert len(before) == len({*before})
    assert sum("row_id" in name for name, _ in before) == 2
    for number in range(8):
        check_row(ds[number], number)
    assert sorted(asked) == before
    ds.close()


def test_small_remote_objects_come_with_their_index(asked: list[tuple[str, int]]) -> None:
    """Where all rows of a shard are wanted an object is one request; of a part of one row the
    object that holds it is two."""
    write_chunked("memory://whole-objects")
    counts = []
    for rows, spans in ((range(6), None), ([5], [(2.0, 2.2)])):
        asked.clear()
        ds = open_features("memory://whole-objects", format="zarr")
        ds.prefetch(rows, spans)
        finish(ds)
        values = [name.split(" ")[0] for name, _ in asked if "/modulation/values/" in name]
        counts.append({values.count(name) for name in values})
        for number in rows if spans is None else ():
            wanted = make_row(number, chunked_seconds(number)).streams["modulation"]
            np.testing.assert_array_equal(ds[number].features["modulation"], wanted)
        ds.close()
    assert counts == [{1}, {2}]


def test_of_streams_that_are_not_read_no_end_is_fetched(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chunked("memory://other-ends")
    monkeypatch.setattr(zarr_format, "REMOTE_REQUEST_BYTES", 600)
    ds = open_features("memory://other-ends", format="zarr", streams=["loudness"])
    assert len(ds[5].features["loudness"]) == 475
    values = {name for name, _ in asked if "/values/" in name}
    assert values and all("/loudness/" in name for name in values)
    ds.close()


def test_remote_row_groups_come_in_few_requests(asked: list[tuple[str, int]]) -> None:
    """Of each shard the footer, and all its row groups at once: they lie side by side."""
    write_chunked("memory://row-groups")
    ds = open_features("memory://row-groups", format="parquet")
    ds.prefetch(range(6))
    finish(ds)
    assert len(asked) == 4
    for number, row in enumerate(ds):
        wanted = make_row(number, chunked_seconds(number)).streams["modulation"]
        np.testing.assert_array_equal(row.features["modulation"], wanted)
    assert len(asked) == 4
    ds.close()


def test_one_stream_of_a_parquet_file_is_fetched_without_the_others(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_format, "GAP_BYTES", 0)
    write_chunked("memory://one-stream")
    fetched = []
    for streams in (["loudness"], ["modulation", "loudness"]):
        asked.clear()
        ds = open_features("memory://one-stream", format="parquet", streams=streams)
        footers = sum(nbytes for _, nbytes in asked)
        assert len(ds[5].features["loudness"]) == 475
        fetched.append(sum(nbytes for name, nbytes in asked if not name.endswith(" 0")) - footers)
    assert fetched[0] < fetched[1] / 4


def vectors(asked: list[tuple[str, int]]) -> list[str]:
    """The files with ids and starts that were read."""
    return [name for name, _ in asked if "/row_id/" in name or "/row_start/" in name]


def test_ids_and_starts_that_the_index_has_are_not_fetched(asked: list[tuple[str, int]]) -> None:
    """They make the files that were committed, hash for hash."""
    write_set("memory://said", n_rows=8, rows_per_shard=4, finalised=True)
    ds = open_features("memory://said", format="zarr")
    for number, row in enumerate(ds):
        check_row(row, number)
    assert vectors(asked) == []
    ds.close()


def test_ids_and_starts_of_another_release_are_fetched(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose compressor made other bytes of them."""
    write_set("memory://said-otherwise", n_rows=8, rows_per_shard=4, finalised=True)
    real = zarr_arrays.vector_chunk
    monkeypatch.setattr(zarr_arrays, "vector_chunk", lambda content: real(content + b"0"))
    ds = open_features("memory://said-otherwise", format="zarr")
    for number, row in enumerate(ds):
        check_row(row, number)
    # Ids of both streams are the same bytes.
    assert len(vectors(asked)) == 2 * 3
    ds.close()


@pytest.mark.parametrize("column", ["row_id", "modulation_start"])
def test_what_the_index_says_wrongly_is_not_believed(
    asked: list[tuple[str, int]], column: str
) -> None:
    place = f"memory://said-wrongly-{column}"
    write_set(place, n_rows=8, rows_per_shard=4, finalised=True)
    ds = open_features(place, format="zarr")
    table = ds.table
    others = table.column(column).take([1, 0, *range(2, 8)])
    table = table.set_column(table.column_names.index(column), column, others)
    ds._catalog = replace(ds._catalog, table=table, all_rows=table)
    ds._places = RowLocations(ds._catalog, ds._names, format_of(ds.format))
    with pytest.raises(CommitError, match=r"the index has row|the index expects"):
        ds[0]
    assert vectors(asked)
    check_row(ds[4], 4)
    ds.close()


def test_the_record_of_the_first_shard_comes_while_a_set_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round trip that the first row need not wait for; what is wrong is told by the row."""
    found: list[str] = []
    real = Layout.read_bytes

    def counting(self: Layout, rel: str) -> bytes:
        found.append(rel)
        return real(self, rel)

    monkeypatch.setattr(Layout, "read_bytes", counting)
    write_set("memory://first-record", n_rows=8, rows_per_shard=4, finalised=True)
    found.clear()
    ds = open_features("memory://first-record")
    assert [name for name in found if name.startswith("commits/")] == ["commits/00000.json"]
    check_row(ds[0], 0)
    assert found.count("commits/00000.json") == 1
    Layout.open("memory://first-record").delete("commits/00000.json")
    without = open_features("memory://first-record")
    check_row(without[4], 4)
    with pytest.raises(CommitError, match=r"commits/00000\.json is missing"):
        without[0]
