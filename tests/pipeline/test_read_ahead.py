"""Reading ahead: the same rows, each block once, bounded; who needs a block waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import BlockCache, IoCounts
from earmill.pipeline.reader import features
from earmill.pipeline.reader.read_ahead import LOCAL, REMOTE, ReadAhead, ReadAheadPolicy
from tests.pipeline.reader_data import (
    check_row,
    chunked_seconds,
    finish,
    make_row,
    write_set,
)
from tests.short import only
from tests.waiting import DEADLINE_S

FORMATS = ("zarr", "parquet")


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


@pytest.mark.parametrize("fmt", only(["zarr"], FORMATS))
def test_any_order_with_a_moving_window_gives_the_right_rows(small: Path, fmt: str) -> None:
    ds = open_features(small, format=fmt, cache_bytes=4000)
    order = np.random.default_rng(3).permutation(len(ds)).tolist() * 2
    for at, number in enumerate(order):
        ds.prefetch(order[at : at + 5])
        check_row(ds[number], number)
    assert ds._here().cache.nbytes <= 4000
    ds.close()


def test_a_row_is_read_whatever_becomes_of_reading_ahead(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from earmill.pipeline.formats.zarr.format import ZarrShard

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
    write_set(tmp_path, n_rows=8, rows_per_shard=4, formats=("zarr",))
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
        thread.join(DEADLINE_S)
    assert len(found) == 2 and any(each is block for each in found) and None in found


def planned(
    pace: ReadAheadPolicy,
    windows: Sequence[Iterable[int]],
    cache_bytes: int = 10_000,
    *,
    in_order: bool = False,
) -> list[list[int]]:
    """The rows that are planned at each of these calls, of 300 bytes and in shards of 10."""
    asked: list[int] = []
    ahead = ReadAhead(
        lambda wanted: iter(asked.append(wanted[0]) or ()),
        lambda row: row // 10,
        lambda rows, _: np.full(len(rows), 300),
        BlockCache(cache_bytes, IoCounts()),
        pace,
    )
    found = []
    for window in windows:
        asked.clear()
        ahead.want([*window], in_order=in_order)
        while ahead._plans:
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


def test_rows_in_order_take_three_quarters_of_the_cache_and_others_half() -> None:
    pace = replace(LOCAL, max_bytes=100_000)
    assert planned(pace, [range(100)]) == [[*range(16)]]
    assert planned(pace, [range(100)], in_order=True) == [[*range(25)]]


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
        "shard_of": lambda row: row // 10,
        "nbytes": lambda rows, _: np.full(len(rows), 300),
        "cache": BlockCache(10_000, IoCounts()),
        "pace": replace(REMOTE, max_bytes=12 * 300),
    }
    return ReadAhead(**usual | parts)


@pytest.mark.parametrize("fmt", only(["parquet"], FORMATS))
def test_more_shards_than_may_be_open_are_read_ahead_to_the_end(
    monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Once as many were open as may be, none was read ahead of any more."""
    monkeypatch.setattr(features, "MAX_OPEN_SHARDS", 2)
    write_set(f"memory://many-shards-{fmt}", n_rows=6, rows_per_shard=1, formats=(fmt,))
    ds = open_features(f"memory://many-shards-{fmt}", format=fmt)
    for number in range(6):
        ds.prefetch([number])
        finish(ds)
        before = ds.io.blocks_read
        check_row(ds[number], number)
        assert ds.io.blocks_read == before
    assert ds.io.shards_opened == 6
    ds.close()


@pytest.mark.parametrize("fmt", only(["zarr"], FORMATS))
def test_no_shard_is_closed_before_it_is_read(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """A window of more shards than may be open."""
    monkeypatch.setattr(features, "MAX_OPEN_SHARDS", 3)
    write_set(f"memory://wide-{fmt}", n_rows=12, rows_per_shard=1, formats=(fmt,))
    ds = open_features(f"memory://wide-{fmt}", format=fmt)
    for number, row in enumerate(ds):
        check_row(row, number)
        finish(ds)
    assert ds.io.shards_opened == 12
    ds.close()


def test_a_row_waits_for_requests_that_are_being_made() -> None:
    """Else whoever reads it would make a second one for the same bytes."""
    begun, go = threading.Event(), threading.Event()

    def needed(_: Any) -> Iterator[Any]:
        begun.set()
        go.wait(DEADLINE_S)
        return iter(())

    ahead = idle(needed=needed)
    ahead.want([3])
    assert begun.wait(DEADLINE_S)
    waiting = threading.Thread(target=ahead.settle, args=(3,))
    waiting.start()
    ahead.settle(4)  # nobody plans it
    waiting.join(0.05)
    assert waiting.is_alive()
    go.set()
    waiting.join(DEADLINE_S)
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


def test_long_rows_in_order_are_named_again_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows fill the window. With eight rows from call to call, five were not read ahead."""
    write_set(tmp_path, n_rows=12, rows_per_shard=1, seconds=lambda _: 2.0, formats=("zarr",))
    ds = open_features(tmp_path, format="zarr")
    cached = open_features(tmp_path, format="zarr", cache_bytes=ds.nbytes // 3)
    firsts, want = [], ReadAhead.want

    def noted(self: ReadAhead, rows: Sequence[int], **options: Any) -> int:
        firsts.append(rows[0])
        return want(self, rows, **options)

    monkeypatch.setattr(ReadAhead, "want", noted)
    for number, row in enumerate(cached):
        np.testing.assert_array_equal(row.features["loudness"], ds[number].features["loudness"])
    assert firsts == [*range(12)]


@pytest.mark.parametrize("fmt", only(["parquet"], FORMATS))
def test_no_more_threads_decode_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Requests come in bursts, and whoever hands rows out needs a core too."""
    from earmill.pipeline.formats import block_cache
    from earmill.pipeline.formats.zarr.arrays import FrameChunks

    monkeypatch.setattr(block_cache, "cores", lambda: 2)
    uri = f"memory://decoding-{fmt}"
    write_set(uri, n_rows=12, rows_per_shard=1, formats=(fmt,))
    lock, both, at_once, seen = threading.Lock(), threading.Barrier(2), [0], []

    def slow(decode: Any) -> Any:
        def decoded(*arguments: Any, **options: Any) -> Any:
            with lock:
                at_once[0] += 1
                seen.append(at_once[0])
            if len(seen) < 3:
                both.wait(DEADLINE_S)
            threading.Event().wait(0.01)
            with lock:
                at_once[0] -= 1
            return decode(*arguments, **options)

        return decoded

    owner: Any = FrameChunks if fmt == "zarr" else pq.ParquetFile
    name = "decode" if fmt == "zarr" else "read_row_group"
    ds = open_features(uri, format=fmt)
    monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    ds.prefetch(range(12))
    finish(ds)
    for number in range(12):
        check_row(ds[number], number)
    assert max(seen) == 2
    ds.close()


def test_the_next_call_is_due_after_an_eighth_of_the_window() -> None:
    ahead = idle(pace=replace(REMOTE, max_bytes=80 * 300), cache=BlockCache(10**6, IoCounts()))
    assert ahead.want(range(500), in_order=True) == 10
    assert ahead.want(range(5), in_order=True) == 5
    ahead.close()
    wide = idle(pace=replace(LOCAL, max_bytes=10**6), cache=BlockCache(10**8, IoCounts()))
    assert wide.want(range(500)) == 64
    wide.close()
    narrow = idle(pace=replace(LOCAL, max_bytes=400))
    assert narrow.want(range(500)) == narrow.want([]) == 1
    narrow.close()
