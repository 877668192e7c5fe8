"""The reader believes commits only, and says what is missing, damaged or mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from earmill import open_features
from earmill.pipeline.common.errors import CommitError, OutputError, SourceError
from tests.pipeline.reader_data import (
    MODULATION_HZ,
    N_ROWS,
    Writer,
    check_row,
    make_row,
    mixed_seconds,
    n_frames,
    values,
)


def test_after_finalise_the_index_is_enough_to_open(finalised: Path, tmp_path: Path) -> None:
    """Without the tables of rows the set still opens and reads; commits still name the files."""
    copy = shutil.copytree(finalised, tmp_path / "copy")
    shutil.rmtree(copy / "rows")
    check_row(open_features(copy)[7], 7)
    for name in (copy / "commits").iterdir():
        name.unlink()
    ds = open_features(copy)
    with pytest.raises(CommitError, match=r"commits/00000\.json is missing.*earmill verify"):
        ds[0]


def test_a_lost_chunk_is_an_error_not_silence(small: Path, tmp_path: Path) -> None:
    """Zarr would return zeros. The other stream is not touched, so it still reads."""
    copy = shutil.copytree(small, tmp_path / "copy")
    shutil.rmtree(copy / "data/00000-00000000.zarr/loudness/values/c")
    ds = open_features(copy, format="zarr", streams=["modulation"])
    np.testing.assert_array_equal(
        ds[1].features["modulation"], values(1, n_frames(1, MODULATION_HZ), 7)
    )
    with pytest.raises(CommitError, match=r"loudness/values/c/0/0 is missing.*earmill verify"):
        open_features(copy, format="zarr")[1]


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_a_lost_shard_is_named(small: Path, tmp_path: Path, fmt: str) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    for path in (copy / "data").glob(f"00001-*.{fmt}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ds = open_features(copy, format=fmt)
    check_row(ds[0], 0)
    said = {"zarr": "zarr file of shard 00001 is missing or damaged"}
    with pytest.raises(CommitError, match=said.get(fmt, r"parquet is missing although it is com")):
        ds[7]


def test_a_damaged_parquet_file_is_named(small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    (path,) = (copy / "data").glob("00001-*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CommitError, match=r"00001-00000001\.parquet: expected .* the file ends"):
        open_features(copy, format="parquet")[7]


def test_only_commits_count(small: Path, tmp_path: Path) -> None:
    """Without its commit record a shard's files are garbage, whatever they hold."""
    copy = shutil.copytree(small, tmp_path / "copy")
    (copy / "commits/00001.json").unlink()
    ds = open_features(copy)
    assert len(ds) == N_ROWS - 6
    assert set(ds.table.column("shard").to_pylist()) == {"00000", "00002", "00003"}
    check_row(ds[6], 12)


def test_a_growing_set_shows_more_when_opened_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with pytest.raises(SourceError, match="no shard is committed yet"):
        open_features(tmp_path)
    writer.shard(0, [make_row(i, mixed_seconds(i)) for i in range(2)])
    first = open_features(tmp_path)
    writer.shard(1, [make_row(2, mixed_seconds(2))])
    second = open_features(tmp_path)
    assert (len(first), len(second)) == (2, 3)
    assert first.fingerprint != second.fingerprint
    check_row(second[2], 2)


def test_a_shard_of_bad_rows_only_adds_no_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.shard(0, [], bad=["a.wav", "b.wav"])
    empty = open_features(tmp_path)
    assert len(empty) == 0
    with pytest.raises(IndexError, match="row 0 of a feature set with 0 rows"):
        empty[0]
    writer.shard(1, [make_row(0, 1.0)])
    assert [row.row_id for row in open_features(tmp_path)] == ["speaker 0/clip_0000.wav"]


def test_mixed_specs_are_refused(finalised: Path, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "mixed")
    writer.shard(0, [make_row(0, 1.0)])
    writer.shard(1, [make_row(1, 1.0)], spec_sha256="f" * 64)
    with pytest.raises(CommitError, match=r"00001\.json: expected spec .* got ffffffffffff"):
        open_features(tmp_path / "mixed")
    copy = shutil.copytree(finalised, tmp_path / "copy")
    path = copy / "commits/00001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"spec_sha256": "e" * 64}))
    ds = open_features(copy)
    check_row(ds[0], 0)
    with pytest.raises(CommitError, match="got eeeeeeeeeeee; features of two specs"):
        ds[7]


def test_what_is_no_feature_set_is_said(small: Path, finalised: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"dataset\.json, found none at"):
        open_features(tmp_path / "nowhere")
    copy = shutil.copytree(small, tmp_path / "copy")
    path = copy / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout_version": 4}))
    with pytest.raises(OutputError, match="layout version 1, 2 or 3, got 4"):
        open_features(copy)
    damaged = shutil.copytree(finalised, tmp_path / "damaged")
    (index,) = (damaged / "index").iterdir()
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(CommitError, match=r"content changed.*is damaged"):
        open_features(damaged)
