"""What the two writers put on disk, read with every library that should be able to."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.digest import differences, digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.parquet.format import ROW_GROUP_BYTES, row_groups
from earmill.pipeline.formats.row_table import (
    FEW_ROWS,
    extra_types,
    quarantine_table,
    row_table,
    write_table,
)
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.zarr import write as zarr_sink
from earmill.pipeline.formats.zarr.write import blocks_of, chunk_frames
from tests.pipeline.encoded import encode
from tests.pipeline.outputs import ATTRS, STREAMS, make_row, stream

# Rows of very different length; odd ids on purpose.
IDS = {"a/é ß 音.wav": 30, "b": 1, "empty": 0, "c#ch1": 2500}
FORMATS = ("zarr", "parquet")


def rows_of(dtype: str = "float16") -> list[FeatureRow]:
    return [make_row(row_id, n_frames, dtype=dtype) for row_id, n_frames in IDS.items()]


def write(
    fmt: str,
    folder: Path,
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo] = STREAMS,
    **options: Any,
) -> Path:
    options.setdefault("attrs", ATTRS)
    name = f"shard.{fmt}"
    return encode(fmt, rows, streams, folder=folder, name=name, encoding=Encoding(**options))


def bits(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zarr_opens_in_xarray_as_ragged_arrays(dtype: str, tmp_path: Path) -> None:
    rows = rows_of(dtype)
    path = write("zarr", tmp_path, rows, dtype=dtype)
    for info in STREAMS:
        with xr.open_zarr(path, group=info.name, consolidated=True) as data:
            assert data["values"].dims == ("obs", "column")
            assert data["values"].dtype == dtype
            assert data["row_size"].attrs["sample_dimension"] == "obs"
            assert data["row_size"].dtype == data["row_start"].dtype == "int64"
            assert data.attrs["Conventions"] == "CF-1.11"
            assert data.attrs["spec_sha256"] == ATTRS["spec_sha256"]
            assert StreamInfo.from_dict(data.attrs["stream"]) == info
            assert data["row_id"].values.tolist() == list(IDS)
            for n, row in enumerate(rows):
                start, size = int(data["row_start"][n]), int(data["row_size"][n])
                values = data["values"][start : start + size].values
                assert bits(values) == bits(row.streams[info.name])
    tree = xr.open_datatree(path, engine="zarr")
    assert set(tree.children) == {"modulation", "envelope"}
    tree.close()


def test_zarr_metadata_equals_what_zarr_itself_would_consolidate(tmp_path: Path) -> None:
    path = write("zarr", tmp_path, rows_of())
    ours = json.loads((path / "zarr.json").read_text())["consolidated_metadata"]
    for folder in (path, path / "modulation", path / "envelope"):
        metadata = json.loads((folder / "zarr.json").read_text())
        assert metadata.pop("consolidated_metadata")["metadata"]
        (folder / "zarr.json").write_text(json.dumps(metadata))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that zarr warns here is why it is not used
        zarr.consolidate_metadata(path)
    theirs = json.loads((path / "zarr.json").read_text())["consolidated_metadata"]
    for member in theirs["metadata"].values():
        member.pop("consolidated_metadata", None)
    assert ours == theirs


def test_zarr_chunks_are_a_megabyte_inside_sharded_objects(tmp_path: Path) -> None:
    wide = stream(channels=(8,) * 31)
    path = write("zarr", tmp_path, [make_row("x", 5000, streams=[wide])], [wide])
    array = zarr.open_group(path, mode="r")["modulation/values"]
    assert array.chunks[1] == array.shards[1] == wide.width == 248
    assert 0.9 * 2**20 < array.chunks[0] * 248 * 2 <= 2**20
    assert array.shards[0] == 3 * array.chunks[0]  # 5000 frames are three chunks, in one object
    assert sorted(p.name for p in (path / "modulation/values/c").rglob("*") if p.is_file()) == ["0"]


def test_long_rows_run_across_chunks_and_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_sink, "CHUNK_BYTES", 8 * 2 * 10)  # 10 frames of modulation
    monkeypatch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
    rows = [make_row("a", 29), make_row("b", 0), make_row("c", 1), make_row("d", 95)]
    path = write("zarr", tmp_path, rows)
    objects = sorted(p.parent.name for p in (path / "modulation/values/c").glob("*/0"))
    assert objects == ["0", "1", "2", "3", "4"]  # 125 frames, 30 in an object
    values = zarr.open_group(path, mode="r")["modulation/values"][:]
    assert bits(values) == b"".join(bits(row.streams["modulation"]) for row in rows)
    assert (
        differences(digest_rows(rows, STREAMS, "float16"), format_of("zarr").digest(path, STREAMS))
        == []
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_keep_their_sign_and_are_stored(fmt: str, tmp_path: Path) -> None:
    zeros = {info.name: np.full((40, info.width), -0.0, np.float16) for info in STREAMS}
    rows = [replace(make_row("silence"), streams=zeros)]
    path = write(fmt, tmp_path, rows)
    assert format_of(fmt).digest(path, STREAMS) == digest_rows(rows, STREAMS, "float16")
    if fmt == "zarr":
        assert (path / "modulation/values/c/0/0").exists()


def array_of(cell: Any, dtype: str, width: int) -> np.ndarray:
    """A cell as any library gives it: bytes, or lists of numbers."""
    flat = np.frombuffer(cell, dtype) if isinstance(cell, bytes) else np.array(cell, dtype)
    return flat.reshape(-1, width)


@pytest.mark.parametrize("form", ["binary", "nested"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parquet_reads_alike_in_pyarrow_polars_duckdb_and_datasets(
    dtype: str, form: str, tmp_path: Path
) -> None:
    from datasets import load_dataset

    rows = rows_of(dtype)
    path = str(write("parquet", tmp_path, rows, dtype=dtype, parquet_form=form))
    assert format_of("parquet").digest(Path(path), STREAMS) == digest_rows(rows, STREAMS, dtype)
    with duckdb.connect() as base:
        duck = base.sql(f"select * from '{path}'").fetchall()
        names = [column[0] for column in base.sql(f"describe select * from '{path}'").fetchall()]
    hf = load_dataset(
        "parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache")
    ).with_format("arrow")
    read = {
        "pyarrow": pq.read_table(path).to_pylist(),
        "polars": pl.read_parquet(path).to_dicts(),
        "duckdb": [dict(zip(names, line, strict=True)) for line in duck],
        "datasets": hf[:].to_pylist(),
    }
    for library, found in read.items():
        assert [line["row_id"] for line in found] == list(IDS), library
        for line, row in zip(found, rows, strict=True):
            assert line["uri"] == f"corpus/{row.row_id}"
            assert line["extra_take"] == 3
            assert line["modulation_n_frames"] == len(row.streams["modulation"])
            for info in STREAMS:
                assert isinstance(line[info.name], bytes) == (form == "binary")
                values = array_of(line[info.name], dtype, info.width)
                assert bits(values) == bits(row.streams[info.name]), (library, row.row_id)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("binary", "binary"), ("nested", "list<element: fixed_size_list<element: halffloat>[8]>")],
)
def test_parquet_says_what_its_streams_are(form: str, kind: str, tmp_path: Path) -> None:
    path = write("parquet", tmp_path, rows_of(), parquet_form=form)
    metadata = pq.read_schema(path).metadata
    described = json.loads(metadata[b"earmill.streams"])
    assert tuple(StreamInfo.from_dict(info) for info in described) == STREAMS
    assert json.loads(metadata[b"earmill.attrs"]) == ATTRS
    field = pq.read_schema(path).field("modulation")
    assert str(field.type) == kind
    if form == "binary":
        assert (field.metadata[b"earmill.columns"], field.metadata[b"earmill.dtype"]) == (
            b"8",
            b"float16",
        )


@pytest.mark.parametrize(
    ("form", "leaf", "codec"),
    [("binary", "modulation", "LZ4"), ("nested", "modulation.list.element.list.element", "ZSTD")],
)
def test_parquet_spends_nothing_on_features_and_indexes_scalars(
    form: str, leaf: str, codec: str, tmp_path: Path
) -> None:
    rows = [make_row(f"{number}.wav", number) for number in range(FEW_ROWS)]
    path = write("parquet", tmp_path, rows, parquet_form=form)
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    features = columns.pop(leaf)
    assert columns.pop(leaf.replace("modulation", "envelope")).compression == codec
    assert features.compression == codec and features.has_offset_index
    assert not features.is_stats_set
    assert "RLE_DICTIONARY" not in features.encodings and not features.has_dictionary_page
    assert columns["seconds"].statistics.max == max(row.seconds for row in rows)
    assert all(column.has_offset_index for column in columns.values())
    ids = columns.pop("row_id")
    assert ids.compression == "UNCOMPRESSED" and not ids.has_dictionary_page
    assert columns["uri"].has_dictionary_page and not columns["seconds"].has_dictionary_page
    assert all(column.compression == "ZSTD" for column in columns.values())


def test_few_rows_have_no_codec_and_no_dictionary_that_make_them_larger(tmp_path: Path) -> None:
    rows = [make_row("a.wav", 3)]
    found = [write_table(row_table(rows, STREAMS), tmp_path / "rows.parquet")]
    found.append(write("parquet", tmp_path, rows))
    for path in found:
        group = pq.read_metadata(path).row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        codecs = {column.path_in_schema: column.compression for column in columns}
        assert {codecs[name] for name in codecs.keys() - {"modulation", "envelope"}} == {
            "UNCOMPRESSED"
        }
        assert not any(column.has_dictionary_page for column in columns)


@pytest.mark.parametrize("profile", ["random", "scan"])
def test_row_groups_follow_the_profile(profile: str, tmp_path: Path) -> None:
    wide = stream(channels=(62,))
    row = make_row("x", 4000, streams=[wide])  # 496 kB
    rows = [replace(row, row_id=str(n)) for n in range(20)]
    path = write("parquet", tmp_path, rows, [wide], row_group_profile=profile)
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == ([5, 5, 5, 5] if profile == "random" else [20])
    with pytest.raises(ValueError, match="row_group_profile is one of"):
        write("parquet", tmp_path, rows, [wide], row_group_profile="huge")


@given(st.lists(st.integers(0, 6 * 2**20), max_size=60), st.sampled_from(sorted(ROW_GROUP_BYTES)))
def test_row_groups_cover_every_row_once_and_keep_the_limit(sizes: list[int], profile: str) -> None:
    enough, limit = ROW_GROUP_BYTES[profile]
    groups = list(row_groups(sizes, profile))
    assert [n for start, stop in groups for n in range(start, stop)] == list(range(len(sizes)))
    for start, stop in groups:
        assert stop - start == 1 or sum(sizes[start:stop]) <= limit
        assert sum(sizes[start : stop - 1]) < enough


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 17))
def test_blocks_regroup_frames_without_loss(lengths: list[int], size: int) -> None:
    flat = np.arange(2 * sum(lengths)).reshape(-1, 2)
    rows = np.split(flat, np.cumsum(lengths)[:-1]) if lengths else []
    blocks = list(blocks_of(rows, size))
    assert all(len(block) == size for block in blocks[:-1])
    assert all(0 < len(block) <= size for block in blocks[-1:])
    assert np.array_equal(np.concatenate([np.zeros((0, 2), int), *blocks]), flat)


def test_a_chunk_holds_at_least_one_frame() -> None:
    assert chunk_frames(248, "float16") == 2**20 // 496
    assert chunk_frames(10_000_000, "float32") == 1


def test_three_hours_in_one_row_that_lies_in_a_file(tmp_path: Path) -> None:
    narrow = stream(channels=(2,))
    rows = [make_row("s", 5, streams=[narrow]), make_row("long", 1_080_000, streams=[narrow])]
    np.save(tmp_path / "long.npy", rows[1].streams["modulation"])
    on_disk = np.load(tmp_path / "long.npy", mmap_mode="r")
    rows[1] = replace(rows[1], streams={"modulation": on_disk})
    digest = digest_rows(rows, [narrow], "float16")
    for fmt in FORMATS:
        assert format_of(fmt).digest(write(fmt, tmp_path, rows, [narrow]), [narrow]) == digest


def test_shards_agree_on_columns_even_when_one_is_empty(tmp_path: Path) -> None:
    from datasets import load_dataset

    full = [make_row("a", extra={"age": 3, "text": None}), make_row("b", extra={"age": 2.5})]
    types = extra_types(row.extra for row in full)
    assert types == {"age": "double", "text": "string"}
    files = [
        write("parquet", tmp_path / str(n), rows, extra_types=types)
        for n, rows in enumerate((full[:1], [], full[1:]))
    ]
    assert len({pq.read_schema(path) for path in files}) == 1
    whole = load_dataset(
        "parquet", data_files=[str(path) for path in files], cache_dir=str(tmp_path / "cache")
    )["train"]
    assert whole["extra_age"][:] == [3.0, 2.5]
    assert pl.read_parquet(files)["extra_age"].to_list() == [3.0, 2.5]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, None], "int64"),
        ([1, 2.5], "double"),
        ([True, None], "bool"),
        ([True, 1], "string"),
        (["a", 1], "string"),
        ([None], "string"),
        ([2**63], "string"),
        ([np.float32(1), np.int8(2)], "double"),
    ],
)
def test_carried_columns_get_a_type_that_holds_every_value(values: list[Any], kind: str) -> None:
    rows = [make_row(str(n), 1, extra={"x": value}) for n, value in enumerate(values)]
    types = extra_types(row.extra for row in rows)
    assert types == {"x": kind}
    stored = row_table(rows, STREAMS, types).column("extra_x").to_pylist()
    same = [None if v is None else (str(v) if kind == "string" else v) for v in values]
    assert stored == same


def test_rows_say_where_their_frames_are() -> None:
    table = row_table(rows_of(), STREAMS)
    assert table.column("modulation_start").to_pylist() == [0, 30, 31, 31]
    assert table.column("modulation_n_frames").to_pylist() == list(IDS.values())
    assert table.column("gain_db").to_pylist() == [0.5] * 4
    assert table.column("etag").to_pylist() == [None] * 4


def test_quarantine_keeps_its_columns_when_empty() -> None:
    assert quarantine_table([]).schema.names[:3] == ["row_id", "uri", "stage"]


def test_every_planted_difference_is_named() -> None:
    digest = digest_rows(rows_of(), STREAMS, "float16")
    stream_digest = digest.streams["envelope"]
    planted = {
        "read back 3": replace(digest, row_ids=digest.row_ids[1:]),
        "'b' for 'a/é ß 音.wav' at row 0": replace(digest, row_ids=("b", *digest.row_ids[1:])),
        "stream envelope is missing": replace(
            digest, streams={"modulation": digest.streams["modulation"]}
        ),
        "read back 2531 x 3 float16": replace(
            digest, streams={**digest.streams, "envelope": replace(stream_digest, width=3)}
        ),
        "values read back differ": replace(
            digest, streams={**digest.streams, "envelope": replace(stream_digest, sha256="0")}
        ),
    }
    assert differences(digest, digest) == []
    for message, got in planted.items():
        found = differences(digest, got)
        assert len(found) == 1 and message in found[0]
