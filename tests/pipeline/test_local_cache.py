"""The local cache of remote files: what comes out is what the store has, whatever the disk has."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.storage import local_cache
from earmill.pipeline.storage.local_cache import HEAD_BYTES, LocalCache
from tests.pipeline.reader_data import FORMATS, check_row, write_set
from tests.waiting import DEADLINE_S

PART, PAGE = 1024, 64
NBYTES = 10 * PART - 100
CONTENT = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
SHA256 = hashlib.sha256(CONTENT.tobytes()).hexdigest()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cache, "PART_BYTES", PART)
    monkeypatch.setattr(local_cache, "PAGE_BYTES", PAGE)


class Store:
    """A file on a store, read through a cache; counts what is fetched."""

    def __init__(self, folder: Path, max_bytes: int = 2**20) -> None:
        self.cache = LocalCache(folder, max_bytes)
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, start: int, length: int) -> np.ndarray:
        self.fetched.append((start, length))
        return CONTENT[start : start + length]

    def check(self, start: int, length: int) -> int:
        """Read a range, hold it against the file; how many requests that took."""
        before = len(self.fetched)
        found = self.cache.read(SHA256, NBYTES, start, length, self.fetch)
        np.testing.assert_array_equal(found, CONTENT[start : start + length])
        return len(self.fetched) - before


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def test_any_ranges_are_the_file_s_and_are_fetched_once(tmp_path: Path) -> None:
    store, rng = Store(tmp_path / "cache"), random.Random(1)
    cuts = [sorted(rng.choices(range(NBYTES + 1), k=2)) for _ in range(300)]
    for start, stop in [*cuts, *cuts]:
        store.check(start, stop - start)
    assert sum(length for _, length in store.fetched) == NBYTES
    assert Store(tmp_path / "cache").check(0, NBYTES) == 0
    assert len(parts(tmp_path / "cache")) == 10


def test_neighbours_come_in_one_request(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.check(3 * PART + 5, 10) == 1
    assert store.check(PART + 7, 6 * PART) == 2
    assert store.fetched[1:] == [(PART, 2 * PART), (4 * PART, 4 * PART)]


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    limit = 4 * (PART + HEAD_BYTES) + 200
    store = Store(tmp_path, limit)
    for number in range(9):
        assert store.check(number * PART, 10) == 1
        assert sum(path.stat().st_size for path in parts(tmp_path)) <= limit
        assert store.check(0, 10) == 0, "used all the time, never thrown away"
    assert store.check(2 * PART, 10) == 1
    tiny = Store(tmp_path / "tiny", PART // 2)
    assert [tiny.check(0, 10), tiny.check(0, 10)] == [1, 1]
    assert parts(tmp_path / "tiny") == []


def test_files_that_nobody_counted_count(tmp_path: Path) -> None:
    """A count that is gone or nonsense is made anew; what a killed process left goes."""
    limit = 3 * (PART + HEAD_BYTES)
    for text in (None, "", "many"):
        store = Store(tmp_path, limit)
        for number in range(5):
            store.check(number * PART, 1)
        used = tmp_path / "used"
        used.unlink() if text is None else used.write_text(text)
        left = next(iter(parts(tmp_path))).with_name("x.tmp")
        left.write_bytes(bytes(100))
        local_cache.os.utime(left, (0, 0))
        for number in range(5, 9):
            store.check(number * PART, 1)
            assert sum(path.stat().st_size for path in parts(tmp_path)) <= limit
        assert not left.exists()


def test_a_damaged_part_is_fetched_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check(0, PART)
    (path,) = parts(tmp_path)
    good = path.read_bytes()
    assert len(good) == PART + HEAD_BYTES
    for at in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert store.check(0, PART) == 1, at
        assert path.read_bytes() == good
    for size in (0, 3, HEAD_BYTES, HEAD_BYTES + 100, len(good) - 1):
        path.write_bytes(good[:size])
        assert store.check(0, PART) == 1
    # Of a part that is damaged elsewhere, whole pages are still good.
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert store.check(0, PART - PAGE) == 0
    assert store.check(PART - 1, 1) == 1


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    store.check(0, 1)
    (path,) = parts(tmp_path / "cache")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.check(0, 1) == 1


@pytest.mark.parametrize("name", ["open", "rename", "mkdir", "touch"])
def test_a_full_disk_costs_one_warning_and_no_row(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, name, full)
    with pytest.warns(RuntimeWarning, match=r"not used any more: .*No space left") as told:
        for number in range(4):
            store.check(number * PART, PART)
            store.check(100, 8 * PART)
    assert len(told) == 1
    monkeypatch.undo()
    assert not [path for path in parts(tmp_path) if path.is_file()]


def test_less_than_was_committed_comes_out_as_it_is(tmp_path: Path) -> None:
    """A file that was cut short on the store is no longer than it is, and is not kept."""
    cache = LocalCache(tmp_path, 2**20)
    short = CONTENT[: 2 * PART + 10]

    def fetch(start: int, length: int) -> np.ndarray:
        return short[start : start + length]

    assert len(cache.read(SHA256, NBYTES, PART, 3 * PART, fetch)) == PART + 10
    assert parts(tmp_path) == []


def test_threads_fetch_each_part_once(tmp_path: Path) -> None:
    store, rng = Store(tmp_path), random.Random(2)
    ranges = [sorted(rng.choices(range(NBYTES + 1), k=2)) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda cut: store.check(cut[0], cut[1] - cut[0]), ranges):
            pass
    assert sum(length for _, length in store.fetched) == NBYTES


def test_an_error_of_the_store_is_told_and_holds_nobody_up(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fails(start: int, length: int) -> np.ndarray:
        raise ConnectionError("no network")

    with pytest.raises(ConnectionError):
        store.cache.read(SHA256, NBYTES, 0, 10, fails)
    assert store.check(0, 10) == 1


def _read_much(folder: Path, seed: int, limit: int) -> None:
    store, rng = Store(folder, limit), random.Random(seed)
    for _ in range(80):
        start, stop = sorted(rng.choices(range(NBYTES + 1), k=2))
        store.check(start, stop - start)
        with store.cache._locked():
            assert sum(path.stat().st_size for path in parts(folder)) <= limit


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_processes_share_a_cache_that_holds_half(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    limit = 5 * (PART + HEAD_BYTES)
    readers = [context.Process(target=_read_much, args=(tmp_path, k, limit)) for k in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(DEADLINE_S)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    LocalCache(tmp_path / "new", 100)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new").chmod(0o777)
    with pytest.raises(OutputError, match=r"only its owner writes into, .*drwxrwxrwx .*chmod 700"):
        LocalCache(tmp_path / "new", 100)


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_a_second_epoch_asks_for_nothing(
    fmt: str, tmp_path: Path, asked: list[tuple[str, int]]
) -> None:
    uri = f"memory://cached-{fmt}"
    write_set(uri, n_rows=8, rows_per_shard=4, finalised=True)
    for epoch in range(3):
        asked.clear()
        # Opened anew, and with no room for decoded blocks: only the disk can know.
        ds = open_features(uri, format=fmt, cache_bytes=0, local_cache=tmp_path)
        for number, row in enumerate(ds):
            check_row(row, number)
        for number in (7, 2):
            check_row(ds[number], number)
        assert bool(asked) == (epoch == 0)
        ds.close()


def test_a_set_on_this_machine_uses_none(small: Path, tmp_path: Path) -> None:
    for fmt in FORMATS:
        ds = open_features(small, format=fmt, local_cache=tmp_path / "cache")
        check_row(ds[3], 3)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"local_cache": "s3://bucket/x"}, TypeError, "a folder on this machine"),
        ({"local_cache": ""}, TypeError, "a folder on this machine"),
        ({"local_cache": 3}, TypeError, "a folder on this machine"),
        ({"local_cache_bytes": -1}, ValueError, "local_cache_bytes must be a number of bytes"),
        ({"local_cache_bytes": "1 GB"}, ValueError, "local_cache_bytes must be a number of bytes"),
    ],
)
def test_wrong_arguments(
    small: Path, how: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_features(small, **how)
