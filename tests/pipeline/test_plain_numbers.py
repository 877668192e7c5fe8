"""Other libraries read values from our files: pyarrow, polars, DuckDB, datasets, xarray, tars.

Streams in some units are stored with a scale, because float16 cannot hold their values. No other
reader of Parquet files and tars applies a scale, so these files hold the values in float32.
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import xarray as xr

import earmill
import earmill.pipeline.formats.parquet.format as long_rows
from earmill import FeatureLoader, compute_statistics, open_features
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats import stream_layout
from earmill.pipeline.formats.digest import differences, digest_rows
from earmill.pipeline.formats.format import format_of, stored_streams
from earmill.pipeline.formats.values import as_stored, dequantised
from earmill.pipeline.operations import open_job
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import FEW, assert_whole
from tests.pipeline.again_jobs import module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    Changing,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
    in_both_formats,
)
from tests.pipeline.reader_data import STREAMS, Writer, make_row, stream
from tests.short import only

FORMATS = ("parquet", "webdataset", "zarr")
STREAMS_OF_JOB = {"envelope": {"frame_rate_hz": 100}, "modulation": {"frame_rate_hz": 50}}
SPIKES = {"stage": "adaptation", "neurons_per_channel": 1}
EXTRACT = [{"model": "dau1997", "fs_hz": 16000, "params": FEW, "streams": STREAMS_OF_JOB}]
SCALE = 2.0**-11


def envelope(name: str = "envelope") -> Any:
    return replace(stream(name, (1, 1), 100.0), unit="input unit")


def written(place: Path, **options: Any) -> Writer:
    """A set with a stream in model units and a scaled one, values known."""
    formats = options.setdefault("formats", FORMATS)
    streams = stored_streams([STREAMS[0], envelope()], "float16", formats)
    writer = Writer(place, streams=streams, **options)
    for shard in range(2):
        writer.shard(shard, [make_row(10 * shard + k, 1.0 + k, streams) for k in range(3)])
    writer.finalise()
    return writer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "features"
    written(path)
    return path


def cells(table: Any, schema: pa.Schema) -> Iterator[tuple[str, str, np.ndarray]]:
    """Row id, stream and numbers of each cell, by what the file says of itself."""
    for record in table:
        for name in ("modulation", "envelope"):
            said = schema.field(name).metadata
            shape = -1, int(said[b"earmill.columns"])
            kind = np.dtype(said[b"earmill.dtype"].decode()).newbyteorder("<")
            assert set(said) == {b"earmill.columns", b"earmill.dtype"}
            yield record["row_id"], name, np.frombuffer(record[name], kind).reshape(shape)


def by_pyarrow(files: list[str], _: Path) -> list[dict[str, Any]]:
    return [record for file in files for record in pq.read_table(file).to_pylist()]


def by_polars(files: list[str], _: Path) -> list[dict[str, Any]]:
    return polars.read_parquet(files).to_dicts()


def by_duckdb(files: list[str], _: Path) -> list[dict[str, Any]]:
    found = duckdb.execute("select row_id, modulation, envelope from read_parquet(?)", [files])
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_datasets(files: list[str], cache: Path) -> list[dict[str, Any]]:
    from datasets import load_dataset

    root = str(Path(files[0]).parent.parent)
    return [*load_dataset(root, split="train", cache_dir=str(cache))]


@pytest.mark.parametrize("read", [by_pyarrow, by_polars, by_duckdb, by_datasets])
def test_a_table_holds_the_values(place: Path, read: Any, tmp_path: Path) -> None:
    ds = open_features(place)
    files = sorted(map(str, (place / "data").glob("*.parquet")))
    seen = set()
    for row_id, name, numbers in cells(read(files, tmp_path), pq.read_schema(files[0])):
        values = ds.by_id(row_id).features[name]
        assert values.max() < 1 if name == "envelope" else values.max() > 100
        np.testing.assert_array_equal(numbers, values)
        seen.add((row_id, name))
    assert len(seen) == 2 * len(ds)


def test_nested_lists_hold_the_values(tmp_path: Path) -> None:
    written(tmp_path, formats=("parquet",), parquet_form="nested")
    ds = open_features(tmp_path)
    for file in (tmp_path / "data").glob("*.parquet"):
        for record in polars.read_parquet(file).iter_rows(named=True):
            for name, values in ds.by_id(record["row_id"]).features.items():
                np.testing.assert_array_equal(np.array(record[name], np.float32), values)
    query = f"select max(envelope[1][1]) from '{tmp_path}/data/*.parquet'"
    assert duckdb.execute(query).fetchone()[0] < 1
    assert verify(Layout.open(tmp_path)).problems == []


def test_a_tar_holds_the_values(place: Path) -> None:
    ds = open_features(place)
    files = sorted(map(str, (place / "data").glob("*.tar")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the collector
        samples = [*webdataset.WebDataset(files, shardshuffle=False, empty_check=False).decode()]
        gc.collect()
    assert len(samples) == len(ds)
    for sample in samples:
        assert "scale_factor" not in sample["json"]
        row = ds.by_id(sample["json"]["row_id"])
        for name, values in row.features.items():
            np.testing.assert_array_equal(sample[f"{name}.npy"], values)


def test_xarray_multiplies(place: Path) -> None:
    ds = open_features(place)
    for path in sorted((place / "data").glob("*.zarr")):
        for name in ("modulation", "envelope"):
            with xr.open_zarr(path, group=name, consolidated=True) as data:
                values = data["values"].values
                for start, size, row_id in zip(
                    data.row_start.values, data.row_size.values, data.row_id.values, strict=True
                ):
                    wanted = ds.by_id(str(row_id)).features[name]
                    np.testing.assert_array_equal(values[start : start + size], wanted)


def test_every_format_gives_the_same_values_and_statistics(place: Path) -> None:
    sets = {fmt: open_features(place, format=fmt) for fmt in FORMATS}
    for fmt, ds in sets.items():
        for dtype in ("float32", "float64", "float16", "stored"):
            other = open_features(place, format=fmt, dtype=dtype)
            first = open_features(place, format="zarr", dtype=dtype)
            assert other.dtypes == first.dtypes
            for row, wanted in zip(other, first, strict=True):
                for name, values in wanted.features.items():
                    assert row.features[name].dtype == values.dtype
                    np.testing.assert_array_equal(row.features[name], values)
        found = compute_statistics(ds)
        assert {name: each.stored() for name, each in found.items()} == ds.moments
        assert ds.fingerprint == sets["zarr"].fingerprint
        (batch,) = FeatureLoader(ds.iterable(shuffle=False, batch_size=len(ds)))
        for row, values in zip(sets["zarr"], batch.features["envelope"].unpad(), strict=True):
            np.testing.assert_array_equal(values.numpy(), row.features["envelope"])
    stored = {"modulation": np.dtype("float16"), "envelope": np.dtype("float32")}
    assert open_features(place, format="zarr", dtype="stored").dtypes == stored
    assert verify(Layout.open(place)).problems == []


def test_long_rows_and_slices_hold_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that Parquet divides, and cells that are cut."""
    monkeypatch.setattr(long_rows, "LIMIT_BYTES", 500)
    monkeypatch.setattr(long_rows, "PART_BYTES", 400)
    written(tmp_path)
    ds, other = (open_features(tmp_path, format=fmt) for fmt in ("parquet", "zarr"))
    for number in range(len(ds)):
        for span in ((0.0, None), (0.21, 0.77)):
            one, two = (each.slice(number, *span).features for each in (ds, other))
            for name in two:
                np.testing.assert_array_equal(one[name], two[name])
    files = sorted((tmp_path / "data").glob("*.parquet"))
    assert b"earmill.parts" in pq.read_schema(files[0]).metadata
    assert verify(Layout.open(tmp_path)).problems == []


def test_what_is_read_back_are_the_stored_numbers(tmp_path: Path) -> None:
    """All numbers that float16 holds go through float32 and come back: bits, not values."""
    (info,) = stored_streams([envelope()], "float16", ["parquet"])
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00].view(np.float16).reshape(-1, 2)
    row = replace(make_row(0, 1.0, (info,)), streams={"envelope": finite})
    for fmt in ("parquet", "webdataset"):
        writer = Writer(tmp_path / fmt, streams=(info,), formats=(fmt,))
        writer.shard(0, [row])
        (file,) = (tmp_path / fmt / "data").iterdir()
        assert (
            differences(digest_rows([row], [info], "float16"), format_of(fmt).digest(file, [info]))
            == []
        )


def test_only_sets_that_need_it_are_described_anew(place: Path, tmp_path: Path) -> None:
    """A release of before reads what it knows, and refuses what it would read wrong."""
    infos = [STREAMS[0], envelope()]
    assert stored_streams(infos, "float16", ["zarr"]) == as_stored(infos, "float16")
    assert stored_streams(infos[:1], "float16", FORMATS) == as_stored(infos[:1], "float16")
    for dtype in ("float32", "int8"):
        assert stored_streams(infos, dtype, FORMATS) == as_stored(infos, dtype)
    described = json.loads((place / "dataset.json").read_text())
    assert [info.get("layout") for info in described["streams"]] == [None, "scaled"]
    assert described["layout_version"] == 3
    known = {name: kind for name, kind in stream_layout.LAYOUTS.items() if name != "scaled"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_layout, "LAYOUTS", known)
        with pytest.raises(
            earmill.OutputError, match="got 'scaled'; use the release that wrote it"
        ):
            open_features(place)
    # Zarr stores have the same bytes beside Parquet as alone.
    alone = written(tmp_path / "zarr", formats=("zarr",))
    files = sorted(path for path in (tmp_path / "zarr" / "data").rglob("*") if path.is_file())
    assert alone.streams[1].layout == "frames" and files
    for path in files:
        name = path.relative_to(tmp_path / "zarr")
        if path.name != "zarr.json":
            assert (place / name).read_bytes() == path.read_bytes()
    for path in (tmp_path / "zarr" / "data").glob("*.zarr/envelope/zarr.json"):
        one, two = (json.loads((root / path.relative_to(tmp_path / "zarr")).read_text())
                    for root in (tmp_path / "zarr", place))  # fmt: skip
        assert one["attributes"]["stream"] == two["attributes"]["stream"]


def test_int8_says_how_it_becomes_values(tmp_path: Path) -> None:
    """It stays what the job asks for; the field has the recipe."""
    from tests.pipeline.test_int8 import FRAMES, int8_row

    (info,) = stored_streams([FRAMES], "int8", ["parquet"])
    writer = Writer(tmp_path, streams=(info,), formats=("parquet",), dtype="int8")
    row = int8_row(1, 2.0)
    writer.shard(0, [replace(row, streams={"modulation": row.streams["modulation"]})])
    (file,) = (tmp_path / "data").glob("*.parquet")
    said = pq.read_schema(file).field("modulation").metadata
    assert said[b"earmill.dtype"] == b"int8"
    assert b"a scale is a bfloat16" in said[b"earmill.int8_scales"]
    numbers = np.frombuffer(pq.read_table(file)["modulation"][0].as_buffer(), np.int8)
    values = open_features(tmp_path)[0].features["modulation"]
    np.testing.assert_array_equal(dequantised(numbers.reshape(-1, FRAMES.width)), values)


def kinds(out: Path) -> set[bytes]:
    """Return the types of the scaled stream in all Parquet files."""
    files = (out / "data").glob("*.parquet")
    return {pq.read_schema(file).field("envelope").metadata[b"earmill.dtype"] for file in files}


def check_formats(out: Path, **options: Any) -> None:
    zarr, parquet = (open_features(out, format=fmt, **options) for fmt in ("zarr", "parquet"))
    assert len(zarr) == len(parquet) > 0
    for one, two in zip(zarr, parquet, strict=True):
        for name in one.features:
            np.testing.assert_array_equal(one.features[name], two.features[name])
            assert one.features["envelope"].max() < 1


@in_both_formats
@pytest.mark.parametrize("begun_before", only([True], [True, False]))
def test_a_dataset_keeps_the_form_that_it_was_begun_in(
    changing: Changing, monkeypatch: pytest.MonkeyPatch, begun_before: bool
) -> None:
    """Update, retry and compact keep the form; features that are added have the new one."""
    changing.out = changing.folder / "scaled"
    plain = changing.spec().model_dump(mode="json")
    spec = earmill.JobSpec.load(plain | {"extract": EXTRACT})
    monkeypatch.setattr(Changing, "spec", lambda *_: spec)
    if begun_before:
        # An earlier release described scaled streams as frames with a scale.
        with monkeypatch.context() as patch:
            patch.setattr(
                open_job, "stored_streams", lambda infos, dtype, _: as_stored(infos, dtype)
            )
            changing.extract()
    else:
        changing.extract()
    kind = {b"float16"} if begun_before else {b"float32"}
    assert kinds(changing.out) == kind
    check_formats(changing.out)
    changing.write("new.wav", 77)
    (changing.corpus / changing.names()[0]).write_bytes(b"no audio")
    end, _ = changing.update()
    assert (end.status, end.rows_bad) == ("done", 1)
    changing.write(changing.names()[0], 78)
    assert earmill.retry(changing.out) is not None
    assert earmill.compact(changing.out, shard_rows=100) is not None
    assert kinds(changing.out) == kind
    check_formats(changing.out)
    assert_whole(changing.out)
    field = next((changing.out / "data").glob("*.parquet"))
    said = pq.read_schema(field).field("envelope").metadata
    assert said.get(b"earmill.scale_factor") == (repr(SCALE).encode() if begun_before else None)
    earmill.add_features(changing.out, {"name": "more", "extract": EXTRACT})
    assert kinds(changing.out / "additions" / "more") == {b"float32"}
    both = open_features(changing.out, additions=True, format="parquet")
    for row in both:
        np.testing.assert_array_equal(row.features["envelope"], row.features["more.envelope"])
