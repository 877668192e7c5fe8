"""open_features: what it returns is what was written, and it fetches nothing else."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill import open_features
from tests.pipeline.reader_data import (
    CELL_BYTES,
    FORMATS,
    LOUDNESS_HZ,
    MODULATION_HZ,
    N_ROWS,
    PAGE_BYTES,
    STREAMS,
    Writer,
    check_row,
    chunked_seconds,
    make_row,
    n_frames,
    stream,
    write_chunked,
    write_set,
)
from tests.short import drawn


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("place", ["small", "finalised"])
def test_every_row_is_what_was_written(
    place: str, fmt: str | None, request: pytest.FixtureRequest
) -> None:
    ds = open_features(request.getfixturevalue(place), format=fmt)
    assert len(ds) == N_ROWS
    for number, row in enumerate(ds):
        assert row.index == number
        check_row(row, number)


def test_a_dataset_says_that_its_job_has_not_finished(small: Path, finalised: Path) -> None:
    shards = len(list((small / "commits").rglob("*.json")))
    missing = rf"small.*: the job has not finished; the rows of its {shards} committed shards are"
    with pytest.warns(UserWarning, match=missing) as caught:
        open_features(small)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=missing):
        open_features([finalised, small])
    with warnings.catch_warnings(action="error"):
        open_features(finalised)


def test_index_and_commits_give_the_same_table(small: Path, finalised: Path) -> None:
    before, after = open_features(small), open_features(finalised)
    assert before.table.equals(after.table)
    assert before.fingerprint == after.fingerprint


def test_both_formats_give_the_same_bits(tmp_path: Path) -> None:
    """Random bit patterns: negative zero, subnormals and the largest numbers included."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(4):
        bits = rng.integers(0, 2**16, (50, STREAMS[0].width), dtype=np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] = 0x8000  # infinities and NaN become negative zero
        row = make_row(i, 0.5)
        rows.append(replace(row, streams={**row.streams, "modulation": bits.view(np.float16)}))
    Writer(tmp_path).shard(0, rows)
    for fmt in FORMATS:
        ds = open_features(tmp_path, format=fmt, dtype="stored")
        for i, row in enumerate(rows):
            for got in (ds[i], ds.slice(i, 0.0)):
                bits = got.features["modulation"].view(np.uint16)
                np.testing.assert_array_equal(bits, row.streams["modulation"].view(np.uint16))


def test_rows_by_number_and_id(small: Path) -> None:
    ds = open_features(small)
    check_row(ds[-1], N_ROWS - 1)
    check_row(ds[np.int64(3)], 3)
    for number in range(N_ROWS):
        assert ds.index_of(make_row(number, 1.0).row_id) == number
    check_row(ds.by_id("speaker 2/clip_0011.wav"), 11)


@pytest.mark.parametrize("number", [N_ROWS, -N_ROWS - 1])
def test_a_row_outside_is_an_index_error(small: Path, number: int) -> None:
    with pytest.raises(IndexError, match=f"row {number} of a feature set with 20 rows"):
        open_features(small)[number]


@pytest.mark.parametrize("row_id", ["broken.wav", "", "speaker 9", "speaker 2/clip_0011.wa"])
def test_an_unknown_id_is_a_key_error(small: Path, row_id: str) -> None:
    said = r"among the 20 good rows.*the first is 'speaker.*failed in ds\.quarantine"
    with pytest.raises(KeyError, match=said):
        open_features(small).by_id(row_id)


def test_an_id_as_number_points_to_by_id(small: Path) -> None:
    with pytest.raises(TypeError, match=r"use ds\.by_id"):
        open_features(small)["speaker 2/clip_0011.wav"]  # type: ignore[index]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@drawn(40, derandomize=True)
@given(number=st.integers(0, 5), start_ms=st.integers(0, 9499), length_ms=st.integers(1, 3000))
def test_a_slice_is_the_frames_that_overlap(
    chunked: Path, fmt: str | None, number: int, start_ms: int, length_ms: int
) -> None:
    """Against integer arithmetic in milliseconds on the frames that were written."""
    ds = open_features(chunked, format=fmt)
    whole = make_row(number, chunked_seconds(number))
    start_ms %= round(whole.seconds * 1000)
    part = ds.slice(number, start_ms / 1000, (start_ms + length_ms) / 1000)
    assert part.seconds == whole.seconds and part.start_s == start_ms / 1000
    for info in STREAMS:
        frame_ms = round(1000 / info.frame_rate_hz)
        features = whole.streams[info.name]
        kept = [
            k
            for k in range(len(features))
            if k * frame_ms < start_ms + length_ms and (k + 1) * frame_ms > start_ms
        ]
        np.testing.assert_array_equal(part.features[info.name], features[kept])
        if kept:
            assert part.first_frame[info.name] == kept[0]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_long_rows_come_whole_out_of_many_chunks(chunked: Path, fmt: str | None) -> None:
    for number, row in enumerate(open_features(chunked, format=fmt)):
        for name, wanted in make_row(number, chunked_seconds(number)).streams.items():
            np.testing.assert_array_equal(row.features[name], wanted)


def test_slices_join_without_overlap(small: Path) -> None:
    """Cut where 0.29 * 100 = 28.999999999999996: rounding neither repeats nor loses a frame."""
    ds = open_features(small)
    number, whole = 3, ds[3]
    parts = [ds.slice(number, 0.0, 0.29), ds.slice(number, 0.29, 0.57), ds.slice(number, 0.57)]
    joined = np.concatenate([part.features["modulation"] for part in parts])
    np.testing.assert_array_equal(joined, whole.features["modulation"])
    assert [part.first_frame["modulation"] for part in parts] == [0, 29, 57]


@pytest.mark.parametrize(
    ("start_s", "stop_s"), [(-0.1, 1.0), (1.32, 1.4), (0.5, 0.5), (0.5, 0.2), (float("nan"), 1.0)]
)
def test_a_slice_outside_the_clip_is_refused(small: Path, start_s: float, stop_s: float) -> None:
    with pytest.raises(ValueError, match=r"inside the clip of 1\.32 s \(row 'speaker 0/clip_0003"):
        open_features(small).slice(3, start_s, stop_s)


def test_a_slice_fetches_only_its_chunks(chunked: Path) -> None:
    """Modulation chunks of 36 frames: 100 frames from frame 400 of the shard touch 3 or 4."""
    ds = open_features(chunked, format="zarr", streams=["modulation"])
    ds.slice(5, 2.0, 3.0)
    assert 3 <= ds.io.blocks_read <= 4
    assert ds.io.bytes_read <= 4 * 512
    ds.slice(5, 2.0, 3.0)
    assert ds.io.blocks_read <= 4


def test_a_slice_reads_few_bytes_from_disk(tmp_path: Path) -> None:
    """Counted by the operating system: 2 s of 60 s cost one of three chunks."""
    wide = stream("modulation", [8] * 32, MODULATION_HZ)
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((6000, wide.width)).astype(np.float16)
    writer = Writer(tmp_path, streams=[wide], formats=["zarr"])
    writer.shard(0, [replace(make_row(0, 60.0, [wide]), streams={"modulation": noise})])
    stored = sum(path.stat().st_size for path in tmp_path.rglob("values/c/*/*"))

    def bytes_read() -> int:
        ds = open_features(tmp_path)
        ds.slice(0, 0.0, 0.01)
        before = psutil.Process().io_counters().read_chars
        ds.slice(0, 30.0, 32.0)
        return int(psutil.Process().io_counters().read_chars - before)

    bytes_read()  # whatever is imported late
    assert bytes_read() < 0.4 * stored


def test_selected_streams_alone_are_read(small: Path) -> None:
    sizes = sum(n_frames(i, LOUDNESS_HZ) for i in range(6))
    ds = open_features(small, format="parquet", streams=["loudness"])
    assert list(ds[0].features) == ["loudness"] == list(ds.streams)
    assert ds.io.bytes_read == 2 * sizes + PAGE_BYTES + 6 * CELL_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float64", np.float32])
def test_dtype_converts_and_keeps_the_values(small: Path, dtype: Any) -> None:
    ds = open_features(small, dtype=dtype)
    assert ds.dtype == np.dtype(dtype)
    check_row(ds[5], 5, np.dtype(dtype).name)


def test_float32_sets_are_stored_as_such(tmp_path: Path) -> None:
    write_set(tmp_path, n_rows=4, rows_per_shard=2, dtype="float32")
    check_row(open_features(tmp_path)[3], 3, "float32")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "hdf5"}, ValueError, r"stored as \['parquet', 'zarr'\], got format='hdf5'"),
        ({"streams": ["volume"]}, ValueError, r"streams out of \['modulation', 'loudness'\]"),
        ({"streams": []}, ValueError, r"streams out of"),
        ({"streams": "loudness"}, TypeError, "list of names"),
        ({"dtype": "int16"}, ValueError, r"dtype is one of \['float16', 'float32', 'float64', 'st"),
    ],
)
def test_wrong_options_are_named(
    small: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_features(small, **options)


def test_a_set_in_one_format_opens_without_choosing(tmp_path: Path) -> None:
    for fmt in ("zarr", "parquet"):
        write_set(tmp_path / fmt, n_rows=3, rows_per_shard=3, formats=[fmt])
        ds = open_features(tmp_path / fmt)
        check_row(ds[2], 2)
        assert len(ds.slice(1, 0.1, 0.2).features["modulation"]) == 10


def test_provenance_is_the_row_own(small: Path) -> None:
    facts = open_features(small).provenance(8)
    assert facts["shard"] == "00001"
    assert facts["row"] == 2
    assert facts["uri"] == "corpus/speaker 2/clip_0008.wav"
    assert facts["pcm_sha256"] == f"{8:064x}"
    assert facts["gain_db"] == -8.0
    assert facts["calibration"] == "rms1_db_spl=100"
    assert not {"row_id", "modulation_start", "extra_label"} & set(facts)


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_a_set_beyond_the_cache_is_read_again_and_one_within_stays_in_it(
    fmt: str, tmp_path: Path
) -> None:
    write_chunked(tmp_path)
    held = []
    for cache_bytes in (10_000, 2**20):
        ds = open_features(tmp_path, format=fmt, cache_bytes=cache_bytes)
        assert ds.nbytes > 10_000
        for number, row in enumerate(ds):
            wanted = make_row(number, chunked_seconds(number)).streams["modulation"]
            np.testing.assert_array_equal(row.features["modulation"], wanted)
        before = ds.io.blocks_read
        assert len([*ds]) == 6
        held.append(ds.io.blocks_read == before)
        ds.close()
    assert held == [False, True]
