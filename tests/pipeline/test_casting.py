"""float16 keeps normal levels: scales that follow from the unit, applied by every reader."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import xarray as xr

from amtcore.features.registry import build_extractor
from amtcore.features.stream_info import StreamInfo
from earmill import open_features
from earmill.pipeline.common.errors import DtypeRangeError, OutputError
from earmill.pipeline.dataset.card import readme
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import check_dataset
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.values import (
    FLOAT16_SCALES,
    Caster,
    CastError,
    as_stored,
    cast_error,
    halved,
    total,
)
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import dataset_file
from tests.pipeline.reader_data import Writer, make_row, stream
from tests.pipeline.test_row_pipeline import FS_HZ, Job, make_spec

HALF_BIT = 2.0**-11
SCALE = FLOAT16_SCALES["input unit"]
SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of noise around 65 dB SPL with pauses, at 100 dB SPL for an RMS of 1."""
    folder = tmp_path_factory.mktemp("quiet")
    rng = np.random.default_rng(0)
    seconds = np.arange(2 * FS_HZ) / FS_HZ
    noise = rng.normal(0, 10 ** (-35 / 20), len(seconds)) * np.sin(2 * np.pi * seconds) ** 4
    soundfile.write(folder / "a.wav", noise, FS_HZ, subtype="FLOAT")
    return folder


@pytest.mark.parametrize(
    ("model", "name", "long_s"),
    [
        ("dau1997", "envelope", 120.0),
        ("dau1997", "envelope", 0.5),
        ("king2019", "modulation", 120.0),
    ],
)
def test_normal_levels_survive_float16(quiet: Path, model: str, name: str, long_s: float) -> None:
    extract = [{"model": model, "fs_hz": FS_HZ, "streams": {name: {}}}]
    rows = {
        dtype: Job(make_spec(quiet, extract=extract, output__dtype=dtype), long_s=long_s)().good[0]
        for dtype in ("float16", "float32")
    }
    true = np.asarray(rows["float32"].streams[name], np.float64)
    got = np.asarray(rows["float16"].streams[name], np.float64) * SCALE
    large = np.abs(true) >= SMALLEST_NORMAL * SCALE
    assert np.mean(np.abs(true[true != 0]) < SMALLEST_NORMAL) > 0.2  # without a scale: bits lost
    assert np.abs(got - true)[large].max() > 0
    assert (np.abs(got - true)[large] <= HALF_BIT * np.abs(true)[large]).all()
    assert (got[np.abs(true) > 1e-10] != 0).all()
    error = rows["float16"].cast_errors[name]
    assert error.nonzero == np.count_nonzero(true) and error.worst_normal <= HALF_BIT
    assert error.below == np.count_nonzero(true) - np.count_nonzero(large)
    assert rows["float32"].cast_errors[name] == CastError()


def test_only_units_that_need_it_have_a_scale() -> None:
    found = {}
    for model in ("dau1997", "paulick2024", "king2019"):
        names: dict[str, dict[str, str]] = {
            key: {} for key in ("modulation", "adaptation", "envelope")
        }
        infos = as_stored(build_extractor(model, streams=names).streams, "float16")
        found[model] = [info.scale_factor for info in infos]
        assert [info.scale_factor for info in as_stored(infos[:1], "float32")] == found[model][:1]
    assert found == {
        "dau1997": [1.0, 1.0, SCALE],
        "paulick2024": [1.0, 1.0, FLOAT16_SCALES["V"]],
        "king2019": [SCALE, SCALE, SCALE],
    }
    assert all(np.log2(scale) == round(np.log2(scale)) for scale in FLOAT16_SCALES.values())


def test_what_does_not_fit_is_said_in_the_stream_s_own_unit() -> None:
    info = replace(stream("envelope", (1,), 100.0), unit="input unit")
    cast = Caster("float16", as_stored([info], "float16"))
    good, _ = cast("envelope", np.array([[31.0]], np.float32))
    assert good[0, 0] == 31.0 / SCALE
    with pytest.raises(DtypeRangeError, match=r"expected values up to 31\.98.* got 33"):
        cast("envelope", np.array([[33.0]], np.float32))


def test_the_error_of_a_cast_is_counted() -> None:
    wanted = np.array([[0.0, 1.0, 1.0004, 3.1e-5, 1e-9]], np.float32)
    error = cast_error(wanted, wanted.astype(np.float16))
    assert (error.nonzero, error.below, error.zeroed) == (4, 2, 1)
    assert error.worst_normal == pytest.approx(4e-4, rel=0.01)
    assert error.worst == pytest.approx(
        abs(float(np.float16(3.1e-5)) - 3.1e-5) / 3.1e-5, rel=0.01
    ) or error.worst == pytest.approx(error.worst_normal)
    both = total([{"a": error}, {"a": error, "b": CastError()}])
    assert both == {"a": replace(error, nonzero=8, below=4, zeroed=2), "b": CastError()}


@pytest.mark.parametrize("frames", [1, 4096, 4097, 10_000])
def test_frames_are_cast_as_if_they_were_one_number_at_a_time(frames: int) -> None:
    """The kernel's blocks, and the plain way of other types."""
    rng = np.random.default_rng(frames)
    values = np.clip(rng.standard_normal(frames) ** 9, -65504, 65504).astype(np.float32)
    got, error = halved(values, 1.0)
    np.testing.assert_array_equal(got, values.astype(np.float16))
    assert error == cast_error(values, got) and error.nonzero == frames
    assert halved(values.astype(np.float64), 1.0)[1].nonzero == error.nonzero
    assert cast_error(values[:0], got[:0]) == CastError()


def every_rounding() -> np.ndarray:
    """All finite float16 that are not negative, what lies half-way between them, and the float32
    next to each; then the negatives, and what is too small for float16 to know."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    edges = np.concatenate([halves, (halves[:-1] + halves[1:]) / 2])
    near = [np.nextafter(edges, np.float32(to)) for to in (-np.inf, np.inf)]
    found = np.concatenate([edges, *near, np.float32([1e-9, 1e-30, 1e-40, 1e-45])])
    found = np.concatenate([found, -found])
    return found[np.abs(found) <= 65504].astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_casts_and_their_errors_are_those_of_the_plain_way(scale: float) -> None:
    scaled = every_rounding()
    values = np.resize(scaled, (len(scaled) // 3 + 1, 3))
    got, error = halved(values * np.float32(scale), 1.0 / scale)
    exact = values * np.float32(scale) * np.float32(1.0 / scale)  # 1e-45 times a scale is nothing
    plain = exact.astype(np.float16)
    np.testing.assert_array_equal(got.view(np.uint16), plain.view(np.uint16))
    there, kept = exact != 0, plain != 0
    normal = np.abs(exact) >= SMALLEST_NORMAL
    lost = np.abs(plain.astype(np.float32) - exact)
    relative = np.divide(lost, np.abs(exact), out=np.zeros_like(lost), where=there)
    assert error == CastError(
        worst=float(relative[kept].max()),
        worst_normal=float(relative[normal].max()),
        nonzero=int(there.sum()),
        below=int((there & ~normal).sum()),
        zeroed=int((there & ~kept).sum()),
    )
    assert 0.9 < error.worst < 1 and error.worst_normal <= HALF_BIT


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_and_zeros_are_cast_without_an_error(dtype: type) -> None:
    for shape in ((0, 3), (2, 0), (4, 2)):
        got, error = halved(np.zeros(shape, dtype), 1.0)
        assert got.shape == shape and got.dtype == np.float16 and error == CastError()


@pytest.fixture(scope="module")
def scaled_streams() -> tuple[StreamInfo, ...]:
    envelope = replace(stream("envelope", (1, 1), 100.0), unit="input unit", scale_factor=SCALE)
    return stream("modulation", (1, 3, 3), 100.0), envelope


def test_readers_apply_the_scale(tmp_path: Path, scaled_streams: tuple[StreamInfo, ...]) -> None:
    writer = Writer(tmp_path, streams=scaled_streams)
    row = make_row(3, 1.0, scaled_streams)
    writer.shard(0, [row])
    stored, true = row.streams["envelope"], row.streams["envelope"].astype(np.float64) * SCALE
    for fmt in ("zarr", "parquet"):
        ds = open_features(tmp_path, format=fmt)
        assert ds.dtype == ds[0].features["modulation"].dtype == np.float32
        np.testing.assert_array_equal(ds[0].features["envelope"], true)
        np.testing.assert_array_equal(ds.slice(0, 0.2, 0.5).features["envelope"], true[20:50])
        for names in (None, ["modulation"]):  # whatever stands beside it
            stored_set = open_features(tmp_path, format=fmt, streams=names, dtype="stored")
            assert stored_set.dtypes["modulation"] == np.float16
            assert stored_set[0].features["modulation"].dtype == np.float16
        for dtype in ("float16", "float64"):
            got = open_features(tmp_path, format=fmt, dtype=dtype)[0].features["envelope"]
            np.testing.assert_array_equal(got, true.astype(dtype))
    (path,) = (tmp_path / "data").glob("*.zarr")
    with xr.open_zarr(path, group="envelope", consolidated=True) as data:
        np.testing.assert_array_equal(data["values"].values, true)
    (path,) = (tmp_path / "data").glob("*.parquet")
    described = json.loads(pq.read_schema(path).metadata[b"earmill.streams"])
    assert [info.get("scale_factor") for info in described] == [None, SCALE]
    cell = pq.read_table(path)["envelope"].to_pylist()[0]
    np.testing.assert_array_equal(np.frombuffer(cell, "<f2").reshape(stored.shape), stored)


def test_the_card_tells_scale_and_error(
    tmp_path: Path, scaled_streams: tuple[StreamInfo, ...]
) -> None:
    writer = Writer(tmp_path, streams=scaled_streams)
    writer.shard(0, [make_row(0, 1.0, scaled_streams)])
    layout = Layout.open(str(tmp_path))
    (record,) = commits(layout).values()
    errors = CastError(0.25, 4.8e-4, 1000, 30, 5)
    records = [
        replace(record, info={"cast_errors": {"envelope": asdict(errors)}}),
        replace(record, info={}),
    ]
    dataset = dataset_file(streams=tuple(info.to_dict() for info in scaled_streams))
    writer.finalise()
    index = read_table(layout, layout.list("index")[0])
    text = readme(dataset, records, index, OutFile("index/x.parquet", 1, "0" * 64))
    assert "| `envelope` | 0.00048 | 0.25 | 3.00% | 0.50% |" in text
    assert "Stored with a scale: `envelope` x 2^-11." in text


def test_an_output_that_was_begun_without_scales_is_not_continued(
    scaled_streams: tuple[StreamInfo, ...],
) -> None:
    now = dataset_file(streams=tuple(info.to_dict() for info in scaled_streams))
    before = [replace(info, scale_factor=1.0).to_dict() for info in scaled_streams]
    check_dataset(now, now)
    with pytest.raises(OutputError, match=r"begun with the scales .*'envelope': 1\.0"):
        check_dataset(replace(now, streams=tuple(before)), now)
