"""A row of hours: bounded memory, divided in Parquet, bounded duration, never a failed job."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from earmill import open_features
from earmill.pipeline.common.errors import CommitError, SpillError
from earmill.pipeline.formats.digest import digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.parquet import format as parquet_sink
from earmill.pipeline.formats.parquet.format import LongRows, cut, part_count
from earmill.pipeline.formats.values import Spilled, pieces
from earmill.pipeline.formats.zarr import write as zarr_sink
from tests.pipeline.encoded import encode
from tests.pipeline.outputs import make_row, stream
from tests.pipeline.reader_data import Writer, values
from tests.pipeline.reader_data import make_row as reader_row
from tests.pipeline.test_row_pipeline import FS_HZ, Job, make_spec

FORMATS = ("zarr", "parquet")
MB = 2**20


@pytest.fixture
def scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long is what is over a kilobyte."""
    monkeypatch.setattr(parquet_sink, "LIMIT_BYTES", 1024)
    monkeypatch.setattr(parquet_sink, "PART_BYTES", 512)
    monkeypatch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (512, 1024))


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 60), st.integers(0, 60))
def test_a_spilled_array_gives_back_what_was_added(
    lengths: list[int], first: int, last: int
) -> None:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(length, 3)).astype(np.float16) for length in lengths]
    held = Spilled("float16", 3)
    for block in blocks:
        held.append(block)
    whole = np.concatenate([np.empty((0, 3), np.float16), *blocks])
    assert held.shape == whole.shape and held.nbytes == whole.nbytes and len(held) == len(whole)
    np.testing.assert_array_equal(np.asarray(held), whole)
    np.testing.assert_array_equal(held[first:last], whole[first:last])
    np.testing.assert_array_equal(np.concatenate([*pieces(held), whole[:0]]), whole)


def test_a_spilled_array_refuses_what_does_not_fit(tmp_path: Path) -> None:
    held = Spilled("float16", 3, str(tmp_path))
    assert not [*tmp_path.iterdir()]  # no name, so nothing to leave behind
    for wrong in (np.zeros((2, 4), np.float16), np.zeros((2, 3), np.float32)):
        with pytest.raises(ValueError, match=r"expected \(n, 3\) float16"):
            held.append(wrong)
    held._file.close()
    with pytest.raises((SpillError, ValueError)):
        held.append(np.zeros((2, 3), np.float16))


@contextmanager
def counted_memory() -> Iterator[list[int]]:
    """Peak bytes of numpy's and of Arrow's memory inside the block."""
    pool, usual, peaks = pa.proxy_memory_pool(pa.system_memory_pool()), pa.default_memory_pool(), []
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield peaks
    finally:
        peaks += [tracemalloc.get_traced_memory()[1], pool.max_memory()]
        tracemalloc.stop()
        pa.set_memory_pool(usual)


@pytest.mark.parametrize("fmt", FORMATS)
def test_memory_does_not_grow_with_the_row(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_sink, "LIMIT_BYTES", MB)
    monkeypatch.setattr(parquet_sink, "PART_BYTES", MB // 2)
    monkeypatch.setattr(zarr_sink, "CHUNK_BYTES", MB // 8)
    monkeypatch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 4)
    monkeypatch.setattr("earmill.pipeline.formats.values.PIECE_BYTES", MB // 2)
    wide = stream(channels=(62,))
    held, block = Spilled("float16", 62), make_row("x", 2000, streams=[wide]).streams["modulation"]
    for _ in range(100):
        held.append(np.asarray(block))
    assert held.nbytes > 23 * MB
    row = replace(make_row("long", 1, streams=[wide]), streams={"modulation": held})
    small = [make_row("x", 2000, streams=[wide])]
    encode(
        fmt, small, [wide], folder=tmp_path, name="before", encoding=Encoding()
    )  # imports pandas
    with counted_memory() as peaks:
        digest = digest_rows([row], [wide], "float16")
        path = encode(fmt, [row], [wide], folder=tmp_path, name="x", encoding=Encoding())
        assert format_of(fmt).digest(path, [wide]) == digest
    assert max(peaks) < 8 * MB


def test_a_row_is_divided_only_where_it_is_too_large() -> None:
    assert [part_count(size * MB) for size in (0, 16, 32)] == [1, 1, 1]
    assert part_count(32 * MB + 1) == 3
    assert cut(10, 3) == [(0, 3), (3, 6), (6, 10)]


def test_a_divided_row_shares_no_row_group(
    tmp_path: Path, scaled_down: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups for scans hold more than a row may have in one piece."""
    monkeypatch.setitem(parquet_sink.ROW_GROUP_BYTES, "scan", (4096, 8192))
    rows = [make_row("a", 5), make_row("long", 200), make_row("b", 6), make_row("c", 7)]
    encoding = Encoding(row_group_profile="scan")
    path = encode("parquet", rows, [stream()], folder=tmp_path, name="x", encoding=encoding)
    with pq.ParquetFile(path) as file:
        groups = [
            file.read_row_group(n).column("row_id").to_pylist() for n in range(file.num_row_groups)
        ]
    assert groups[0] == ["a"] and groups[-1] == ["b", "c"]
    assert set(map(tuple, groups[1:-1])) == {("long",)} and len(groups) > 3


def test_parts_of_a_row_follow_each_other_in_the_file(tmp_path: Path, scaled_down: None) -> None:
    rows = [make_row("a", 5), make_row("long", 200), make_row("b", 6)]
    streams = [stream(), stream("envelope", (1, 1), 50.0)]
    path = encode("parquet", rows, streams, folder=tmp_path, name="x", encoding=Encoding())
    table = pq.read_table(path)
    ids = table.column("row_id").to_pylist()
    assert ids == ["a", *["long"] * (len(ids) - 2), "b"] and len(ids) == 10
    for info in streams:
        counts = table.column(f"{info.name}_n_frames").to_pylist()
        assert table.column(f"{info.name}_start").to_pylist() == [0, *np.cumsum(counts)[:-1]]
        cells = [np.frombuffer(cell, "<f2") for cell in table[info.name].to_pylist()]
        frames = [cell.reshape(-1, info.width) for cell in cells]
        assert [len(part) for part in frames] == counts
        np.testing.assert_array_equal(
            np.concatenate(frames[1:-1]), rows[1].streams[info.name].astype(float)
        )
    assert format_of("parquet").digest(path, streams) == digest_rows(rows, streams, "float16")


def test_both_formats_read_alike_where_a_row_is_divided(tmp_path: Path, scaled_down: None) -> None:
    seconds = [0.3, 4.0, 0.2, 2.5, 0.1]
    writer = Writer(tmp_path)
    writer.shard(0, [reader_row(i, length) for i, length in enumerate(seconds)])
    writer.finalise()
    zarr, parquet = (open_features(tmp_path, format=fmt) for fmt in FORMATS)
    assert len(parquet) == 5
    for i, length in enumerate(seconds):
        for name, rate in (("modulation", 100), ("loudness", 50)):
            width = parquet.streams[name].width
            wanted = values(i, round(length * rate), width)
            np.testing.assert_array_equal(parquet[i].features[name], wanted)
            np.testing.assert_array_equal(zarr[i].features[name], wanted)
        for first in np.linspace(0, length * 0.9, 7):
            one, other = (ds.slice(i, first, first + 0.4).features for ds in (parquet, zarr))
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(
    "text", ["[]", '{"0": 3}', '{"0": {"a": [1], "b": [1, 2]}}', '{"-1": {"a": [1]}}']
)
def test_parts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(CommitError, match=r"earmill\.parts"):
        LongRows.from_metadata({parquet_sink.PARTS_KEY: text.encode()})


@pytest.mark.parametrize("long_s", [120.0, 0.5])
@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
def test_a_row_above_the_longest_duration_is_quarantined(
    tmp_path: Path, suffix: str, long_s: float
) -> None:
    tone = 0.1 * np.sin(np.arange(3 * FS_HZ) / 10)
    soundfile.write(tmp_path / f"long.{suffix}", tone, FS_HZ)
    soundfile.write(tmp_path / f"short.{suffix}", tone[:FS_HZ], FS_HZ)
    rows = Job(make_spec(tmp_path, audio__max_seconds=2), long_s=long_s)()
    assert [row.row_id for row in rows.good] == [f"short.{suffix}"]
    (bad,) = rows.bad
    assert bad.error_class == "too_long" and "expected at most 2 s of audio" in bad.message


def test_the_longest_duration_counts_for_the_span_and_leaves_old_hashes(tmp_path: Path) -> None:
    usual = make_spec(tmp_path)
    assert "max_seconds" not in usual.canonical()["audio"]
    assert usual.audio.limits().max_seconds == 86400
    assert usual.sha256() != make_spec(tmp_path, audio__max_seconds=7200).sha256()
