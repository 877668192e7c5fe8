"""One shard's files read directly: any frames, what is fetched, what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import earmill.pipeline.formats.parquet.format as parquet_sink
import earmill.pipeline.formats.zarr.write as zarr_sink
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import BlockCache, FrameSpan, IoCounts, ShardReader
from earmill.pipeline.formats.parquet.format import ParquetShard
from earmill.pipeline.formats.zarr.format import ZarrShard
from earmill.pipeline.reader.catalog import load_catalog
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import STREAMS, chunked_seconds, make_row, stream, values, write_set
from tests.short import drawn

ROWS = 5
WIDTHS = {info.name: info.width for info in STREAMS}
RATES = {info.name: info.frame_rate_hz for info in STREAMS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of 5 rows of 1 to 7.8 s over many small chunks, objects and row groups."""
    path = tmp_path_factory.mktemp("shard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_sink, "CHUNK_BYTES", 512)
        patch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
        patch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (4096, 8192))
        write_set(path, n_rows=ROWS, rows_per_shard=ROWS, seconds=chunked_seconds)
    return path


class Opened:
    """The shard in one format, with a cache of its own."""

    def __init__(self, root: Path, fmt: str, max_bytes: int = 1 << 20) -> None:
        self.layout = Layout.open(str(root))
        catalog = load_catalog(self.layout)
        self.rel, self.promise = catalog.shard_file(self.layout, "00000", fmt)
        self.counts = IoCounts()
        self.cache = BlockCache(max_bytes, self.counts)
        kind = {"zarr": ZarrShard, "parquet": ParquetShard}[fmt]
        self.shard: ShardReader = kind(self.layout, self.rel, self.promise, self.cache)

    def read(self, name: str, row: int, first: int, last: int, **changes: Any) -> np.ndarray:
        span = FrameSpan(row_id(row), row, start_of(name, row), first, last)
        return self.shard.read(name, replace(span, **changes))


def frames_of(name: str, row: int) -> int:
    return int(chunked_seconds(row) * RATES[name] + 1e-6)


def start_of(name: str, row: int) -> int:
    return sum(frames_of(name, before) for before in range(row))


def row_id(row: int) -> str:
    return make_row(row, 1.0).row_id


def expected(name: str, row: int) -> np.ndarray:
    return values(row, frames_of(name, row), WIDTHS[name])


@pytest.fixture(scope="module", params=["zarr", "parquet"])
def opened(request: pytest.FixtureRequest, root: Path) -> Opened:
    return Opened(root, request.param)


class TestRead:
    @given(data=st.data())
    @drawn(60)
    def test_any_frames_of_any_row(self, opened: Opened, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(WIDTHS)))
        row = data.draw(st.integers(0, ROWS - 1))
        first = data.draw(st.integers(0, frames_of(name, row)))
        last = data.draw(st.integers(first, frames_of(name, row)))
        found = opened.read(name, row, first, last)
        np.testing.assert_array_equal(found, expected(name, row)[first:last])
        assert found.shape == (last - first, WIDTHS[name])
        assert found.dtype == np.float16

    def test_what_leaves_is_a_copy(self, opened: Opened) -> None:
        """Writing into a result changes neither the cache nor a later result."""
        one = opened.read("loudness", 1, 0, 40)
        one[:] = -1
        np.testing.assert_array_equal(
            opened.read("loudness", 1, 0, 40), expected("loudness", 1)[:40]
        )

    @pytest.mark.parametrize("row", [0, 2, ROWS - 1])
    def test_a_length_that_reaches_into_the_next_row_is_refused(
        self, opened: Opened, row: int
    ) -> None:
        """Never the frames of another clip, and not only behind the last one."""
        n_frames = frames_of("loudness", row)
        text = f"index expects {n_frames + 1} of loudness, the file holds {n_frames}"
        with pytest.raises(CommitError, match=text):
            opened.read("loudness", row, n_frames - 1, n_frames + 1)

    @pytest.mark.parametrize(("place", "there"), [(1, "clip_0001"), (ROWS, None), (9999, None)])
    def test_a_row_that_is_elsewhere_or_nowhere(
        self, opened: Opened, place: int, there: str | None
    ) -> None:
        with pytest.raises(CommitError) as caught:
            span = FrameSpan(row_id(0), place, 0, 0, 1)
            opened.shard.read("loudness", span)
        message = str(caught.value)
        assert message.startswith(opened.rel)
        if there:
            assert there in message
            assert "does not belong to this file" in message

    def test_the_name_of_a_row_decides(self, opened: Opened) -> None:
        with pytest.raises(CommitError, match=r"has row 'other\.wav' at 0, the file holds"):
            opened.read("loudness", 0, 0, 1, row_id="other.wav")


class TestFetched:
    def test_zarr_reads_the_chunks_of_a_span_and_each_once(self, root: Path) -> None:
        zarr = Opened(root, "zarr")
        step = 512 // (7 * 2)  # frames of a chunk of modulation
        zarr.read("modulation", 1, 0, 1)
        assert zarr.counts.blocks_read == 1
        first = start_of("modulation", 1)
        zarr.read("modulation", 1, 0, 5 * step - first % step)
        assert zarr.counts.blocks_read == 5, "four more, the first is kept"
        zarr.read("modulation", 1, 3, 5 * step - first % step)
        assert zarr.counts.blocks_read == 5
        assert zarr.counts.bytes_read == zarr.cache.nbytes == 5 * step * 14
        zarr.read("modulation", 1, 4, 4)
        assert zarr.counts.blocks_read == 5, "no frame, no chunk"

    def test_parquet_reads_the_column_of_a_row_group_once(self, root: Path) -> None:
        parquet = Opened(root, "parquet")
        for first in (0, 7, 30):
            parquet.read("loudness", 0, first, first + 5)
        assert parquet.counts.blocks_read == 1
        parquet.read("modulation", 0, 0, 5)
        assert parquet.counts.blocks_read == 2
        for row in range(ROWS):
            parquet.read("loudness", row, 0, 5)
        assert parquet.counts.blocks_read == 1 + len(parquet.shard._first_row) - 1  # type: ignore[attr-defined]

    @pytest.mark.parametrize("fmt", ["zarr", "parquet"])
    def test_a_cache_of_nothing_gives_the_same(self, root: Path, fmt: str) -> None:
        """Every block is read again; a copy of a piece keeps no run of chunks alive."""
        small = Opened(root, fmt, max_bytes=0)
        for _ in range(2):
            for row in range(ROWS):
                whole = small.read("modulation", row, 0, frames_of("modulation", row))
                np.testing.assert_array_equal(whole, expected("modulation", row))
        assert small.counts.bytes_read > 2 * ROWS * 100
        largest = 512 if fmt == "zarr" else 8192 * 2
        assert small.cache.nbytes <= largest

    def test_the_cache_may_outlive_an_opening(self, root: Path) -> None:
        """A shard closed and opened again finds its blocks, and still looks up the row's id."""
        parquet = Opened(root, "parquet")
        parquet.read("loudness", 3, 0, 5)
        parquet.shard.close()
        again = ParquetShard(parquet.layout, parquet.rel, parquet.promise, parquet.cache)
        span = FrameSpan(row_id(3), 3, start_of("loudness", 3), 0, 5)
        np.testing.assert_array_equal(again.read("loudness", span), expected("loudness", 3)[:5])
        assert parquet.counts.blocks_read == 1
        with pytest.raises(CommitError, match="does not belong to this file"):
            again.read("loudness", FrameSpan("other", 3, 0, 0, 5))
        again.close()

    @given(st.sets(st.integers(0, 30)), st.sampled_from([1, 700, 1 << 20]))
    @drawn(60)
    def test_requests_are_neighbours_of_one_object(
        self, root: Path, wanted: set[int], most: int
    ) -> None:
        shard: Any = Opened(root, "zarr").shard
        shard._request_bytes = most
        with ThreadPoolExecutor(1) as pool:
            asked = shard.requests([("modulation", chunk) for chunk in sorted(wanted)], pool)
            runs = [[chunk for _, chunk in run] for run in asked]
        assert [chunk for run in runs for chunk in run] == sorted(wanted)
        for run in runs:
            assert run == list(range(run[0], run[0] + len(run)))
            assert run[0] // 3 == run[-1] // 3, "three chunks lie in an object"
            assert len(run) == 1 or most > 1
        if most == 1 << 20:  # nothing is asked for twice where once is enough
            assert all(two[0] > one[-1] + 1 or not two[0] % 3 for one, two in pairwise(runs))


def divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A shard whose second row takes several rows of its Parquet file."""
    monkeypatch.setattr(parquet_sink, "LIMIT_BYTES", 4000)
    monkeypatch.setattr(parquet_sink, "PART_BYTES", 1000)
    monkeypatch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (2000, 4000))
    write_set(
        tmp_path,
        n_rows=3,
        rows_per_shard=3,
        seconds=lambda row: 5.0 if row == 1 else 1.0,
        formats=("parquet",),
        streams=(stream("modulation", (1, 3, 3), 100.0),),
    )
    return Opened(tmp_path, "parquet")


def test_a_divided_row_reads_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = divided(tmp_path, monkeypatch)
    whole = values(1, 500, 7)
    place = {"start": 100}
    rng = np.random.default_rng(2)
    for first, last in [(0, 500), (0, 0), *np.sort(rng.integers(0, 501, (20, 2))).tolist()]:
        found = parquet.read("modulation", 1, first, last, **place)
        np.testing.assert_array_equal(found, whole[first:last])
    np.testing.assert_array_equal(parquet.read("modulation", 2, 0, 100), values(2, 100, 7))
    with pytest.raises(CommitError, match="expects 501 of modulation"):
        parquet.read("modulation", 1, 0, 501, **place)
