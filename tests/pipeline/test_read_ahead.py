"""Reading ahead: the same rows, each block once, bounded; who needs a block waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import BlockCache, IoCounts
from earmill.pipeline.reader import read_ahead
from earmill.pipeline.reader.read_ahead import ReadAhead
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import (
    check_row,
    chunked_seconds,
    make_row,
    write_chunked,
    write_set,
)

FORMATS = ("zarr", "parquet")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_set(path)
    return path


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 long rows over many small chunks, objects and row groups."""
    path = tmp_path_factory.mktemp("chunked")
    write_chunked(path)
    return path


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


def test_rows_ahead_are_bounded_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1000)
    asked: list[int] = []
    ahead = ReadAhead(
        lambda row: iter(asked.append(row) or ()),
        lambda row: 300,
        BlockCache(10_000, IoCounts()),
        1,
    )
    for window in (range(100), range(1, 100), [50], [50]):
        ahead.want([*window])
        while ahead._planning:
            threading.Event().wait(0.001)
    assert asked == [0, 1, 2, 3, 50]
    ahead.close()
    ahead.want([60])
    assert 60 not in asked


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


def test_a_remote_store_is_asked_once_for_what_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, starts and indexes of both shards come before the chunks, and not again."""
    write_set("memory://read-ahead", n_rows=8, rows_per_shard=4)
    asked: list[str] = []
    real = Layout.read_range

    def counting(self: Layout, rel: str, start: int, length: int) -> bytes:
        asked.append(f"{rel} {start}")
        return real(self, rel, start, length)

    monkeypatch.setattr(Layout, "read_range", counting)
    ds = open_features("memory://read-ahead", format="zarr")
    ds.prefetch(range(8))
    finish(ds)
    before = sorted(asked)
    assert len(before) == len({*before}) and any("row_id" in name for name in before)
    for number in range(8):
        check_row(ds[number], number)
    assert sorted(asked) == before
    ds.close()
