"""Reading ahead: the same rows, each block once, bounded; who needs a block waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import BlockCache, IoCounts
from earmill.pipeline.formats.parquet import read as parquet_read
from earmill.pipeline.formats.zarr import arrays as zarr_arrays
from earmill.pipeline.reader import features
from earmill.pipeline.reader.read_ahead import LOCAL, REMOTE, Pace, ReadAhead
from earmill.pipeline.reader.row_places import RowPlaces
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import (
    check_row,
    chunked_seconds,
    make_row,
    write_chunked,
    write_set,
)

FORMATS = ("zarr", "parquet")


def finish(features: Any) -> None:
    """Wait until nothing is under way."""
    ahead = features._process.ahead
    while ahead._planning or features._process.shards.cache._under_way:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_was_read_ahead_is_not_read_again(chunked: Path, fmt: str) -> None:
    plain, ahead = (open_features(chunked, format=fmt) for _ in range(2))
    rows = [plain[number] for number in range(6)]
    ahead.prefetch(range(6))
    finish(ahead)
    before = ahead.io.blocks_read
    assert before == plain.io.blocks_read >= 10
    for row in rows:
        for name, values in ahead[row.index].features.items():
            np.testing.assert_array_equal(values, row.features[name])
    assert ahead.io.blocks_read == before
    ahead.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_order_with_a_moving_window_gives_the_right_rows(small: Path, fmt: str) -> None:
    ds = open_features(small, format=fmt, cache_bytes=4000)
    order = np.random.default_rng(3).permutation(len(ds)).tolist() * 2
    for at, number in enumerate(order):
        ds.prefetch(order[at : at + 5])
        check_row(ds[number], number)
    assert ds._here().shards.cache.nbytes <= 4000
    ds.close()


def test_a_row_is_read_whatever_becomes_of_reading_ahead(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from earmill.pipeline.formats.zarr.read import ZarrShard

    def fails(*arguments: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(ZarrShard, "load", fails)
    ds = open_features(small, format="zarr")
    for number, row in enumerate(ds):
        check_row(row, number)
    ds.prefetch([3, 4])
    ds.close()
    check_row(ds[3], 3)


def test_damage_is_told_by_the_row_that_has_it(tmp_path: Path) -> None:
    write_set(tmp_path, n_rows=8, rows_per_shard=4)
    part = next(tmp_path.glob("data/00001-*.zarr/modulation/values/c/0/0"))
    content = bytearray(part.read_bytes())
    content[3] ^= 1
    part.write_bytes(content)
    rows = iter(open_features(tmp_path, format="zarr"))
    for number in range(4):
        check_row(next(rows), number)
    with pytest.raises(CommitError, match=r"row 'speaker 1/clip_0004\.wav', .* the CRC-32C"):
        next(rows)


def test_who_needs_a_block_waits_for_it() -> None:
    cache, keys = BlockCache(10_000, IoCounts()), [("x", "s", 0), ("x", "s", 1)]
    assert cache.claim(keys) == keys
    assert cache.claim(keys) == []
    found: list[Any] = []
    threads = [threading.Thread(target=lambda k=key: found.append(cache.get(k))) for key in keys]
    for thread in threads:
        thread.start()
    assert found == []
    block = (np.arange(3),)
    cache.put(keys[0], block)
    cache.release(keys)
    for thread in threads:
        thread.join(10)
    assert len(found) == 2 and any(each is block for each in found) and None in found


def planned(
    pace: Pace, windows: Sequence[Iterable[int]], cache_bytes: int = 10_000
) -> list[list[int]]:
    """The rows that are planned at each of these calls, of 300 bytes and in shards of 10."""
    asked: list[int] = []
    ahead = ReadAhead(
        lambda wanted: iter(asked.append(wanted[0]) or ()),
        lambda row, pool: None,
        lambda row: row // 10,
        lambda rows, _: np.full(len(rows), 300),
        BlockCache(cache_bytes, IoCounts()),
        pace,
    )
    found = []
    for window in windows:
        asked.clear()
        ahead.want([*window])
        while ahead._planning:
            threading.Event().wait(0.001)
        found.append(sorted(asked))
    ahead.close()
    ahead.want([60])
    assert 60 not in asked
    return found


def test_rows_ahead_are_bounded_and_replaced() -> None:
    pace = replace(LOCAL, max_bytes=1000, rows_at_once=2)
    windows = (range(100), range(1, 100), [50], [50], [], [50])
    assert planned(pace, windows) == [[0, 1, 2], [3], [50], [], [], [50]]


def test_rows_of_a_remote_store_are_taken_many_at_once() -> None:
    """A window of six rows: the next ones are taken when less than half of it is under way."""
    pace = replace(REMOTE, max_bytes=1800, share=0.5)
    windows = [range(first, 12) for first in range(12)]
    taken = planned(pace, windows)
    assert taken[:5] == [[0, 1, 2, 3, 4, 5], [], [], [6, 7, 8], []]
    assert sorted(chain(*taken)) == [*range(12)]


def test_remote_shards_that_fit_in_a_window_are_taken_as_a_whole() -> None:
    """Shards of ten rows, a window of 25: the third is not begun before all of it fits."""
    pace = replace(REMOTE, max_bytes=25 * 300, share=1.0)
    taken = planned(pace, [range(first, 60) for first in range(7)], cache_bytes=20_000)
    assert taken == [[*range(20)], [], [], [], [], [*range(20, 30)], []]


def test_remote_shards_that_fit_in_no_window_are_taken_in_parts() -> None:
    pace = replace(REMOTE, max_bytes=8 * 300, share=1.0)
    assert planned(pace, [range(60), range(4, 60)]) == [[*range(8)], [8, 9, 10, 11]]


def idle(**parts: Any) -> ReadAhead:
    """A reader ahead of rows of 300 bytes in shards of ten, that finds nothing to read."""
    usual: dict[str, Any] = {
        "needed": lambda _: iter(()),
        "prepare": lambda *_: None,
        "shard_of": lambda row: row // 10,
        "nbytes": lambda rows, _: np.full(len(rows), 300),
        "cache": BlockCache(10_000, IoCounts()),
        "pace": replace(REMOTE, max_bytes=12 * 300),
    }
    return ReadAhead(**usual | parts)


def test_shards_behind_the_window_are_opened_once() -> None:
    """A window of 12 rows: of shards of ten the next two behind it, and more as rows go on."""
    opened: list[int] = []

    def prepare(row: int, _: Any) -> None:
        opened.append(row // 10)

    ahead = idle(prepare=prepare, pace=replace(REMOTE, max_bytes=12 * 300, shards_ahead=2))
    for first in range(9):
        ahead.want(range(first, 60))
    ahead._planners.shutdown(wait=True)
    assert sorted(opened) == [1, 2, 3]
    local = idle(prepare=prepare, pace=replace(LOCAL, max_bytes=300))
    local.want(range(40))
    local._planners.shutdown(wait=True)
    assert len(opened) == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_more_shards_than_may_be_open_are_read_ahead_to_the_end(
    monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Once as many were open as may be, none was read ahead of any more."""
    monkeypatch.setattr(features, "MAX_OPEN_SHARDS", 2)
    write_set(f"memory://many-shards-{fmt}", n_rows=6, rows_per_shard=1)
    ds = open_features(f"memory://many-shards-{fmt}", format=fmt)
    for number in range(6):
        ds.prefetch([number])
        finish(ds)
        before = ds.io.blocks_read
        check_row(ds[number], number)
        assert ds.io.blocks_read == before
    assert ds.io.shards_opened == 6
    ds.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_shard_is_closed_before_it_is_read(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """A window of more shards than may be open."""
    monkeypatch.setattr(features, "MAX_OPEN_SHARDS", 3)
    write_set(f"memory://wide-{fmt}", n_rows=12, rows_per_shard=1)
    ds = open_features(f"memory://wide-{fmt}", format=fmt)
    for number, row in enumerate(ds):
        check_row(row, number)
        finish(ds)
    assert ds.io.shards_opened == 12
    ds.close()


def test_what_reading_asks_for_first_is_there_before_rows_are_wanted(
    asked: list[tuple[str, int]],
) -> None:
    """Of the shard behind the window: its metadata, ids and starts, but no frames."""
    write_set("memory://prepared", n_rows=8, rows_per_shard=4)
    ds = open_features("memory://prepared", format="zarr")
    ahead = ds._ahead()
    ahead._pace = replace(ahead._pace, max_bytes=1)
    ds.prefetch(range(8))
    ahead._planners.shutdown(wait=True)
    second = [name for name, _ in asked if "/00001-" in name]
    assert any("row_id" in name for name in second) and any("row_start" in name for name in second)
    assert not any("/values/" in name for name in second)
    ds.close()


def test_a_row_waits_for_requests_that_are_being_made() -> None:
    """Else whoever reads it would make a second one for the same bytes."""
    begun, go = threading.Event(), threading.Event()

    def needed(_: Any) -> Iterator[Any]:
        begun.set()
        go.wait(10)
        return iter(())

    ahead = idle(needed=needed)
    ahead.want([3])
    assert begun.wait(10)
    waiting = threading.Thread(target=ahead.settle, args=(3,))
    waiting.start()
    ahead.settle(4)  # nobody plans it
    waiting.join(0.05)
    assert waiting.is_alive()
    go.set()
    waiting.join(10)
    assert not waiting.is_alive()
    ahead.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_of_a_crop_no_more_is_fetched_than_reading_it_fetches(chunked: Path, fmt: str) -> None:
    plain, ahead = (open_features(chunked, format=fmt) for _ in range(2))
    row = plain.slice(5, 2.0, 3.0)
    ahead.prefetch([5], [(2.0, 3.0)])
    finish(ahead)
    assert ahead.io.bytes_read == plain.io.bytes_read < ahead.nbytes / 2
    got = ahead.slice(5, 2.0, 3.0)
    assert ahead.io.bytes_read == plain.io.bytes_read
    np.testing.assert_array_equal(got.features["modulation"], row.features["modulation"])


@pytest.mark.parametrize("held", ["nothing", "block", "array", "view"])
def test_memory_of_a_block_is_used_again_when_nobody_reads_it(held: str) -> None:
    cache = BlockCache(100, IoCounts())
    memory = cache.memory(80)
    address = memory.ctypes.data
    array = memory.view(np.int16).reshape(-1, 4)[:9]
    del memory
    cache.put("old", (array,))
    del array
    kept: Any = {
        "nothing": lambda: None,
        "block": lambda: cache.get("old"),
        "array": lambda: cache.get("old")[0],  # type: ignore[index]
        "view": lambda: cache.get("old")[0][2:3],  # type: ignore[index]
    }[held]()
    cache.put("new", (cache.memory(80).view(np.int16),))
    again = cache.memory(80)
    assert (again.ctypes.data == address) == (held == "nothing")
    assert again.flags.writeable
    del kept


def test_threads_end_with_the_set_and_after_close(small: Path) -> None:
    ds = open_features(small, format="zarr")
    ds.prefetch([0, 1])
    finish(ds)
    pool = ds._process.ahead._pool  # type: ignore[union-attr]
    del ds
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(print)


def test_long_rows_of_the_chunked_set(chunked: Path) -> None:
    for fmt in FORMATS:
        for number, row in enumerate(open_features(chunked, format=fmt)):
            wanted = make_row(number, chunked_seconds(number)).streams["modulation"]
            np.testing.assert_array_equal(row.features["modulation"], wanted)


def test_sets_end_to_end_read_ahead_each_its_own(small: Path) -> None:
    both = open_features([small, small])
    both.prefetch([19, 20, 21])
    for each in both.sets:
        finish(each)
    assert [each.io.blocks_read > 0 for each in both.sets] == [True, True]
    check_row(both[19], 19)
    assert both[21].row_id == both.sets[1][1].row_id


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every range that is read: file and bytes."""
    found: list[tuple[str, int]] = []
    real = Layout.read_range

    def counting(self: Layout, rel: str, start: int, length: int) -> bytes:
        found.append((f"{rel} {start}", length))
        return real(self, rel, start, length)

    monkeypatch.setattr(Layout, "read_range", counting)
    return found


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
    monkeypatch.setattr(parquet_read, "REMOTE_GAP_BYTES", 0)
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
    ds._catalog = replace(ds._catalog, table=table)
    ds._places = RowPlaces(ds._catalog, ds._names)
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

    def counting(self: Layout, rel: str, nbytes: int | None = None) -> bytes:
        found.append(rel)
        return real(self, rel, nbytes)

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
