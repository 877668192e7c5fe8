"""Requests to a remote store: first things once, objects in few requests, no more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

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
    in_memory,
    make_row,
    write_set,
)


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """8 short rows in 2 shards, before and after finalise. Tests read copies of them."""
    places = tmp_path_factory.mktemp("open"), tmp_path_factory.mktemp("closed")
    writer = write_set(places[1], n_rows=8, rows_per_shard=4)
    shutil.copytree(places[1], places[0], dirs_exist_ok=True)
    writer.finalise()
    return places


def test_a_remote_store_is_asked_once_for_what_comes_first(
    asked: list[tuple[str, int]], two_shards: tuple[Path, Path]
) -> None:
    """Ids, starts and indexes of both shards come before the chunks, and not again; ids of both
    streams are the same bytes and come once."""
    place = in_memory(two_shards[0], "read-ahead")
    ds = open_features(place, format="zarr")
    ds.prefetch(range(8))
    finish(ds)
    before = sorted(asked)
    assert len(before) == len({*before})
    assert sum("row_id" in name for name, _ in before) == 2
    for number in range(8):
        check_row(ds[number], number)
    assert sorted(asked) == before
    ds.close()


def test_small_remote_objects_come_with_their_index(
    asked: list[tuple[str, int]], chunked: Path
) -> None:
    """Where all rows of a shard are wanted an object is one request; of a part of one row the
    object that holds it is two."""
    place = in_memory(chunked, "whole-objects")
    counts = []
    for rows, spans in ((range(6), None), ([5], [(2.0, 2.2)])):
        asked.clear()
        ds = open_features(place, format="zarr")
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
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, chunked: Path
) -> None:
    place = in_memory(chunked, "other-ends")
    monkeypatch.setattr(zarr_format, "REMOTE_REQUEST_BYTES", 600)
    ds = open_features(place, format="zarr", streams=["loudness"])
    assert len(ds[5].features["loudness"]) == 475
    values = {name for name, _ in asked if "/values/" in name}
    assert values and all("/loudness/" in name for name in values)
    ds.close()


def test_remote_row_groups_come_in_few_requests(
    asked: list[tuple[str, int]], chunked: Path
) -> None:
    """Each shard takes a request for the footer, and one for all row groups, side by side."""
    place = in_memory(chunked, "row-groups")
    ds = open_features(place, format="parquet")
    ds.prefetch(range(6))
    finish(ds)
    assert len(asked) == 4
    for number, row in enumerate(ds):
        wanted = make_row(number, chunked_seconds(number)).streams["modulation"]
        np.testing.assert_array_equal(row.features["modulation"], wanted)
    assert len(asked) == 4
    ds.close()


def test_one_stream_of_a_parquet_file_is_fetched_without_the_others(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, chunked: Path
) -> None:
    monkeypatch.setattr(parquet_format, "REMOTE_GAP_BYTES", 0)
    place = in_memory(chunked, "one-stream")
    fetched = []
    for streams in (["loudness"], ["modulation", "loudness"]):
        asked.clear()
        ds = open_features(place, format="parquet", streams=streams)
        footers = sum(nbytes for _, nbytes in asked)
        assert len(ds[5].features["loudness"]) == 475
        fetched.append(sum(nbytes for name, nbytes in asked if not name.endswith(" 0")) - footers)
    assert fetched[0] < fetched[1] / 4


def vectors(asked: list[tuple[str, int]]) -> list[str]:
    """The files with ids and starts that were read."""
    return [name for name, _ in asked if "/row_id/" in name or "/row_start/" in name]


def test_ids_and_starts_that_the_index_has_are_not_fetched(
    asked: list[tuple[str, int]], two_shards: tuple[Path, Path]
) -> None:
    """They make the files that were committed, hash for hash."""
    place = in_memory(two_shards[1], "said")
    ds = open_features(place, format="zarr")
    for number, row in enumerate(ds):
        check_row(row, number)
    assert vectors(asked) == []
    ds.close()


def test_ids_and_starts_of_another_release_are_fetched(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, two_shards: tuple[Path, Path]
) -> None:
    """The other release's compressor made other bytes of them."""
    place = in_memory(two_shards[1], "said-otherwise")
    real = zarr_arrays.vector_chunk
    monkeypatch.setattr(zarr_arrays, "vector_chunk", lambda content: real(content + b"0"))
    ds = open_features(place, format="zarr")
    for number, row in enumerate(ds):
        check_row(row, number)
    # Ids of both streams are the same bytes.
    assert len(vectors(asked)) == 2 * 3
    ds.close()


@pytest.mark.parametrize("column", ["row_id", "modulation_start"])
def test_what_the_index_says_wrongly_is_not_believed(
    asked: list[tuple[str, int]], column: str, two_shards: tuple[Path, Path]
) -> None:
    place = in_memory(two_shards[1], f"said-wrongly-{column}")
    ds = open_features(place, format="zarr")
    table = ds.table
    others = table.column(column).take([1, 0, *range(2, 8)])
    table = table.set_column(table.column_names.index(column), column, others)
    ds._catalog = replace(ds._catalog, table=table, all_rows=table)
    ds._places = RowLocations(ds._catalog, list(ds.streams), format_of(ds.format))
    with pytest.raises(CommitError, match=r"the index has row|the index expects"):
        ds[0]
    assert vectors(asked)
    check_row(ds[4], 4)
    ds.close()


def test_the_record_of_the_first_shard_comes_while_a_set_is_opened(
    monkeypatch: pytest.MonkeyPatch, two_shards: tuple[Path, Path]
) -> None:
    """A round trip that the first row need not wait for; what is wrong is told by the row."""
    found: list[str] = []
    real = Layout.read_bytes

    def counting(self: Layout, rel: str) -> bytes:
        found.append(rel)
        return real(self, rel)

    place = in_memory(two_shards[1], "first-record")
    monkeypatch.setattr(Layout, "read_bytes", counting)
    ds = open_features(place)
    assert [name for name in found if name.startswith("commits/")] == ["commits/00000.json"]
    check_row(ds[0], 0)
    assert found.count("commits/00000.json") == 1
    Layout.open(place).delete("commits/00000.json")
    without = open_features(place)
    check_row(without[4], 4)
    with pytest.raises(CommitError, match=r"commits/00000\.json is missing"):
        without[0]
