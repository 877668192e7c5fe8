"""One opened set in many places: cache, threads, pickles, forks, and an S3 server."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pytest

from earmill import open_features
from earmill.pipeline.formats.format import format_of
from earmill.pipeline.reader import features as reader
from tests.pipeline.reader_data import (
    CELL_BYTES,
    FORMATS,
    N_ROWS,
    PAGE_BYTES,
    Writer,
    check_row,
    values,
    write_set,
)
from tests.s3_stand_in import s3_stand_in
from tests.waiting import DEADLINE_S

SECRET = "not-to-be-shown"


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_the_cache_is_bounded_and_spares_reads(chunked: Path, fmt: str) -> None:
    once = open_features(chunked, format=fmt)
    for _ in range(2):
        rows = list(once)
    blocks = once.io.blocks_read
    beside = 8 * 22 if fmt == "zarr" else blocks * PAGE_BYTES + 2 * len(once) * CELL_BYTES
    assert once.io.bytes_read <= once.nbytes + beside  # each value once
    tight = open_features(chunked, format=fmt, cache_bytes=10_000)
    for number, row in [*enumerate(rows), *enumerate(rows)]:
        np.testing.assert_array_equal(
            tight[number].features["modulation"], row.features["modulation"]
        )
    cache = tight._here().cache
    assert tight.io.blocks_read > blocks
    assert 0 < cache.nbytes <= 10_000


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_changing_a_row_changes_no_later_read(small: Path, fmt: str) -> None:
    ds = open_features(small, format=fmt)
    ds[4].features["modulation"][:] = -1
    check_row(ds[4], 4)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_shard_is_opened_while_the_set_is_closed(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is opened ahead is closed, as nobody reads it; a row is read all the same."""
    ds = open_features(write_set(tmp_path, formats=["webdataset"]).layout.root)
    begun, go_on = threading.Event(), threading.Event()
    real_open = type(format_of("webdataset")).open

    def slow_open(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return real_open(*arguments)

    monkeypatch.setattr(type(format_of("webdataset")), "open", slow_open)
    with ThreadPoolExecutor(1) as pool:
        if ahead:
            reading = pool.submit(ds._here().reader, "00000", ahead=True)
        else:
            reading = pool.submit(ds.read_row, 1)
        assert begun.wait(DEADLINE_S)
        ds.close()
        go_on.set()
        if ahead:
            with pytest.raises(LookupError, match="the feature set is closed"):
                reading.result(DEADLINE_S)
            names = [file.path for file in psutil.Process().open_files()]
            assert not [name for name in names if str(tmp_path) in name]
        else:
            check_row(reading.result(DEADLINE_S), 1)
    check_row(ds[1], 1)
    ds.close()


def test_open_files_are_bounded_and_closed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def n_open() -> int:
        names = [entry.path for entry in psutil.Process().open_files()]
        return sum(name.startswith(str(small)) for name in names)

    monkeypatch.setattr(reader, "MAX_OPEN_SHARDS", 2)
    ds = open_features(small, format="parquet")
    for row in ds:
        assert row.features
        assert n_open() <= 2
    assert ds.io.shards_opened == 4
    ds.close()
    assert n_open() == 0
    check_row(ds[3], 3)
    del ds
    assert n_open() == 0


def test_threads_share_one_set(chunked: Path) -> None:
    ds = open_features(chunked, cache_bytes=20_000)
    wanted = [row.features["modulation"] for row in open_features(chunked)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i, pool.submit(ds.__getitem__, i)) for i in [*range(6)] * 4]
        for i, job in jobs:
            np.testing.assert_array_equal(job.result().features["modulation"], wanted[i])


def test_a_pickle_holds_no_handle_and_reads_anew(small: Path) -> None:
    ds = open_features(small, dtype="float32")
    ds[0]
    ds.slice(0, 0.0)
    text = pickle.dumps(ds)
    assert b"ProcessHandles" not in text
    copy = pickle.loads(text)
    assert copy.io.shards_opened == 0
    check_row(copy[9], 9, "float32")


def test_a_relative_path_holds_in_another_folder(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may start elsewhere."""
    monkeypatch.chdir(small.parent)
    text = pickle.dumps(open_features(small.name))
    monkeypatch.chdir("/")
    check_row(pickle.loads(text)[2], 2)


def test_any_fsspec_filesystem_will_do() -> None:
    write_set("memory://reader/set", n_rows=4, rows_per_shard=2)
    for fmt in ("zarr", "parquet"):
        ds = open_features("memory://reader/set", format=fmt)
        check_row(ds[3], 3)
        assert repr(ds).startswith("Features('memory:///reader/set', rows=4")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_a_forked_child_reads_with_its_own_handles(small: Path, fmt: str) -> None:
    """Both sides read in turn: a shared file position would mix them up."""
    ds = open_features(small, format=fmt, cache_bytes=1)
    check_row(ds[0], 0)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        for number in iter(there.recv, None):
            there.send(ds[number])
        there.send(ds.io.shards_opened)

    process = context.Process(target=child)
    process.start()
    for number in range(0, N_ROWS, 3):
        here.send(number)
        check_row(ds[number], number)
        assert here.poll(60)
        check_row(here.recv(), number)
    here.send(None)
    assert here.recv() == 4
    process.join(DEADLINE_S)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """A real S3 protocol server on this machine; storage options for it."""
    with s3_stand_in() as address:
        yield {
            "key": "testing",
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": address, "region_name": "eu-west-1"},
        }


@pytest.fixture(scope="module")
def set_on_s3(s3: dict[str, Any]) -> Writer:
    """8 rows in 2 shards on the server."""
    fsspec.filesystem("s3", **s3).mkdir("features")
    return write_set("s3://features/set", n_rows=8, storage_options=s3)


def test_rows_and_slices_from_s3(s3: dict[str, Any], set_on_s3: Writer) -> None:
    """By the commits, and by the index once the set is closed."""

    def check(fmt: str | None) -> None:
        ds = open_features("s3://features/set", format=fmt, storage_options=s3)
        for number in (0, 7, 3):
            check_row(ds[number], number)
        part = ds.slice(3, 0.5, 0.75).features["modulation"]
        np.testing.assert_array_equal(part, values(3, 132, 7)[50:75])
        assert SECRET not in repr(ds)
        check_row(pickle.loads(pickle.dumps(ds))[5], 5)
        ds.close()

    for fmt in FORMATS:
        check(fmt)
    set_on_s3.finalise()
    for fmt in FORMATS:
        check(fmt)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("set_on_s3")
def test_s3_after_a_fork(s3: dict[str, Any]) -> None:
    """The child makes its own connections; the parent's keep working."""
    ds = open_features("s3://features/set", storage_options=s3)
    check_row(ds[1], 1)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send([ds[6], ds.slice(3, 0.5, 0.75)]))
    process.start()
    assert here.poll(60)
    row, part = here.recv()
    process.join(DEADLINE_S)
    check_row(row, 6)
    np.testing.assert_array_equal(part.features["modulation"], values(3, 132, 7)[50:75])
    check_row(ds[6], 6)
