"""Frames in int8: what is stored, what comes back, how far off it is, and who refuses it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import earmill.pipeline.formats.parquet.format as parquet_sink
import earmill.pipeline.formats.zarr.write as zarr_sink
from earmill import FeatureLoader, collate, compute_statistics, open_features
from earmill.pipeline.common.errors import (
    CommitError,
    NonFiniteFeatureError,
    OutputError,
    SpecError,
)
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.block_cache import Piece
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import Read, Span, layout_of
from earmill.pipeline.formats.values import (
    BLOCK_FRAMES,
    BLOCK_ROWS,
    Caster,
    as_stored,
    dequantised,
    quantised,
    stored_rows,
)
from earmill.pipeline.operations.deep_verify import differences
from earmill.pipeline.planning.estimate import estimate
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.extraction import CastFeatures, stored
from tests.pipeline.reader_data import Writer, make_row, stream
from tests.pipeline.test_plan import ListSource, clips, spec
from tests.short import drawn

FORMATS = ("parquet", "webdataset", "zarr")
FRAMES = stream("modulation", (1, 3, 3), 100.0)
WHOLE_CLIPS = stream("loudness", (1,), 0.0)
STREAMS = as_stored([FRAMES, WHOLE_CLIPS], "int8")
CAST = Caster("int8", STREAMS)
# Less than a block, two blocks, nothing, many blocks, one frame.
SECONDS = (0.3, 1.28, 0.0, 9.3, 0.01)


def wave(row: int, seconds: float) -> np.ndarray:
    """Frames of a row: columns of very different size, one of them silent."""
    rng = np.random.default_rng(row)
    sizes = np.array([1e-9, 1.0, 50.0, 3e4, 0.0, 1.0, 1e30], np.float32)
    return (rng.normal(0, 1, (round(seconds * 100), 7)) * sizes).astype(np.float32)


def int8_row(row: int, seconds: float) -> FeatureRow:
    clip = {"modulation": wave(row, seconds), "loudness": np.full((1, 1), row + 0.1, np.float32)}
    held = stored(clip, CAST)
    return replace(make_row(row, seconds, ()), streams=held.streams, steps=held.steps)


def int8_rows() -> list[FeatureRow]:
    return [int8_row(row, seconds) for row, seconds in enumerate(SECONDS)]


def write(place: Path, formats: Sequence[str] = FORMATS) -> Path:
    writer = Writer(place, formats=formats, dtype="int8", streams=STREAMS)
    rows = int8_rows()
    writer.shard(0, rows[:3])
    writer.shard(1, rows[3:], ["broken.wav"])
    writer.finalise()
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two shards in all formats, over many small chunks and row groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_sink, "CHUNK_BYTES", 7 * 40)
        patch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
        patch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (2048, 4096))
        return write(tmp_path_factory.mktemp("int8"))


def largest(frames: np.ndarray) -> np.ndarray:
    """Of each value's column in its block."""
    starts = range(0, len(frames), BLOCK_FRAMES)
    blocks = [frames[start : start + BLOCK_FRAMES] for start in starts]
    peaks = [np.broadcast_to(np.abs(block).max(axis=0), block.shape) for block in blocks]
    return np.concatenate([frames[:0], *peaks])


@drawn(60)
@given(n=st.integers(0, 3 * BLOCK_FRAMES), seed=st.integers(0, 99), power=st.integers(-44, 36))
def test_a_value_is_off_by_a_252nd_of_the_largest(n: int, seed: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    frames = (rng.standard_normal((n, 3)) * 10.0**power).astype(np.float32)
    rows = quantised(frames)
    assert rows.dtype == np.int8 and rows.shape == (stored_rows(n), 3)
    back = dequantised(rows)
    assert back.dtype == np.float32 and back.shape == frames.shape
    # float32 itself ends at 1.4e-45, a bfloat16 at 9.2e-41.
    allowed = largest(frames).astype(np.float64) / 252 + 9.2e-41
    assert (np.abs(back.astype(np.float64) - frames) <= allowed).all()
    np.testing.assert_array_equal(quantised(back)[:0], rows[:0])


def test_the_bytes_of_a_block_are_these() -> None:
    """2.54 / 127 = 0.02; the next bfloat16 above it is 0x3CA4 = 0.02001953125."""
    frames = np.array([[2.54, 0.0], [-1.0, 0.0]], np.float32)
    assert quantised(frames).tolist() == [[0xA4 - 256, 0], [0x3C, 0], [127, 0], [-50, 0]]
    scale = 0x3CA40000.to_bytes(4, "little")
    wanted = np.frombuffer(scale, np.float32)[0] * np.float32([[127], [-50]])
    np.testing.assert_array_equal(dequantised(quantised(frames))[:, :1], wanted)


def test_silence_is_silent_and_a_constant_is_near() -> None:
    assert not dequantised(quantised(np.zeros((100, 2), np.float32))).any()
    np.testing.assert_allclose(dequantised(quantised(np.full((70, 1), 7.0))), 7.0, rtol=1 / 252)


def read_span(read: Read, n_stored: int, n_frames: int, span: Span) -> np.ndarray:
    layout, dtype = layout_of(STREAMS[0]), np.dtype(np.float32)
    counts = {"n_stored": n_stored, "n_frames": n_frames}
    frames: np.ndarray = layout.read(read, **counts, span=span, dtype=dtype, copy=True)
    return frames


@pytest.mark.parametrize("span", [(0, 200), (0, 0), (64, 128), (63, 65), (130, 200), (199, 200)])
def test_a_span_reads_its_blocks_alone(span: tuple[int, int]) -> None:
    frames = wave(1, 2.0)
    rows, asked = quantised(frames), []

    def read(first: int, last: int) -> list[Piece]:
        asked.append((first, last))
        return [(0, rows[first:last])]

    found = read_span(read, len(rows), 200, span)
    np.testing.assert_array_equal(found, dequantised(rows)[slice(*span)])
    ((first, last),) = asked
    assert first == span[0] // BLOCK_FRAMES * BLOCK_ROWS
    assert last - first <= BLOCK_ROWS * (-(-span[1] // BLOCK_FRAMES) - span[0] // BLOCK_FRAMES)


def test_rows_and_frames_that_do_not_go_together_are_refused() -> None:
    rows = quantised(wave(0, 1.0))
    with pytest.raises(CommitError, match="expected 104 rows in int8 for 100 frames"):
        read_span(lambda a, b: [(0, rows[a:b])], 103, 100, (0, 10))
    rows[:2] = [[0x80 - 256], [0x7F]]  # the bits of infinity
    with pytest.raises(CommitError, match="expected finite scales"):
        dequantised(rows)


def test_nothing_that_is_no_number_is_stored() -> None:
    frames = wave(0, 1.0)
    frames[50, 2] = np.nan
    with pytest.raises(NonFiniteFeatureError):
        CAST("modulation", frames)


@pytest.mark.parametrize("cuts", [[1, 2, 3], [64, 128], [930], [10, 500, 500, 929]])
def test_a_long_clip_is_stored_as_if_it_were_whole(cuts: list[int], tmp_path: Path) -> None:
    frames, held = wave(3, 9.3), CastFeatures()
    edges = [0, *cuts, len(frames)]
    for first, last in pairwise(edges):
        held.spill({"modulation": frames[first:last]}, CAST, str(tmp_path))
    held.spill({"modulation": frames[:0]}, CAST, str(tmp_path), last=True)
    whole = stored({"modulation": frames}, CAST)
    assert held.steps == whole.steps == {"modulation": 930}
    np.testing.assert_array_equal(
        np.asarray(held.streams["modulation"]), whole.streams["modulation"]
    )


def test_frames_of_whole_clips_stay_in_float32() -> None:
    assert [info.layout for info in STREAMS] == ["int8", "clip"]
    assert int8_row(2, 1.0).streams["loudness"].dtype == np.float32


@pytest.mark.parametrize("fmt", FORMATS)
class TestASet:
    def test_rows_come_back_in_float32(self, place: Path, fmt: str) -> None:
        ds = open_features(place, format=fmt)
        assert ds.dtype == "float32"
        for number, (row, seconds) in enumerate(zip(ds, SECONDS, strict=True)):
            frames, found = wave(number, seconds), row.features["modulation"]
            assert found.dtype == np.float32 and found.flags.writeable
            np.testing.assert_array_equal(found, dequantised(quantised(frames)))
            assert row.features["loudness"] == np.float32(number + 0.1)
        assert ds.streams["modulation"].width == FRAMES.width

    @pytest.mark.parametrize(("start_s", "stop_s"), [(0.0, 0.1), (2.5, 3.333), (9.0, 9.3)])
    def test_slices_are_of_frames(
        self, place: Path, fmt: str, start_s: float, stop_s: float
    ) -> None:
        row = open_features(place, format=fmt, streams=["modulation"]).slice(3, start_s, stop_s)
        first, last = round(start_s * 100), -(-round(stop_s * 1000) // 10)
        whole = dequantised(quantised(wave(3, 9.3)))
        np.testing.assert_array_equal(row.features["modulation"], whole[first:last])
        assert row.first_frame == {"modulation": first}

    def test_a_batch_is_padded_as_any_other(self, place: Path, fmt: str) -> None:
        ds = open_features(place, format=fmt, streams=["modulation"])
        batch = collate([ds[0], ds[1]])
        assert batch.features["modulation"].values.shape == (2, 128, 7)
        assert batch.features["modulation"].lengths.tolist() == [30, 128]

    def test_other_types_are_converted_once(self, place: Path, fmt: str) -> None:
        ds = open_features(place, format=fmt, streams=["modulation"], dtype="float64")
        np.testing.assert_array_equal(
            ds[1].features["modulation"], dequantised(quantised(wave(1, 1.28))).astype(np.float64)
        )


def test_statistics_are_those_of_the_values_that_are_read(place: Path) -> None:
    ds = open_features(place)
    stored_ones, computed = ds.statistics, compute_statistics(ds)
    assert set(stored_ones) == {"modulation", "loudness"}
    for name, one in stored_ones.items():
        assert one.count == computed[name].count
        for part in ("sums", "squares", "minimum", "maximum"):
            np.testing.assert_array_equal(getattr(one, part), getattr(computed[name], part))


def test_the_set_verifies_and_says_what_it_is(place: Path) -> None:
    report = verify(Layout.open(place))
    assert report.problems == [] and report.orphans == []
    card = " ".join((place / "README.md").read_text().split())
    assert "In int8 with a scale for each column of a block: `modulation`." in card
    croissant = (place / "croissant.json").read_text()
    assert "int8 with 2 rows of scales before every 64 frames" in croissant


def test_a_cell_is_read_as_the_card_says(place: Path) -> None:
    """By its own lines, without earmill."""
    path = next((place / "data").glob("00001-*.parquet"))
    table = pq.read_table(path)
    card = (place / "README.md").read_text()
    code = re.split("```|# or", card[card.index("rows = numpy.frombuffer") :])[0]
    known = {"numpy": np, "columns": 7, "ds": {"train": table.slice(0, 1).to_pylist()}}
    exec(code.replace("<stream>", "modulation"), known)
    found = np.stack(known["frames"])
    assert len(found) == table.column("modulation_n_steps")[0].as_py() == 930
    np.testing.assert_array_equal(found, dequantised(quantised(wave(3, 9.3))))


def test_a_set_in_int8_reads_with_one_in_float16(place: Path, tmp_path: Path) -> None:
    other = Writer(tmp_path / "half", streams=(FRAMES,))
    other.shard(0, [make_row(9, 1.0, (FRAMES,))])
    other.finalise()
    both = open_features([place, tmp_path / "half"], streams=["modulation"], dtype="float32")
    assert len(both) == len(SECONDS) + 1
    assert both[len(SECONDS)].features["modulation"].dtype == np.float32
    # Frames in float16 are copied from where they were decoded, those in int8 are made first.
    (batch,) = FeatureLoader(both.iterable(shuffle=False, batch_size=len(both)))
    for row, frames in zip(both, batch.features["modulation"].unpad(), strict=True):
        np.testing.assert_array_equal(frames.numpy(), row.features["modulation"])


def test_a_release_that_knows_no_int8_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from earmill.pipeline.formats import stream_layout

    monkeypatch.delitem(stream_layout.LAYOUTS, "int8")
    with pytest.raises(
        OutputError, match=r"expected a layout out of \['frames', 'clip', 'scaled', 'events'\]"
    ):
        open_features(place)


def test_stored_rows_that_lack_a_frame_are_not_published(tmp_path: Path) -> None:
    writer = Writer(tmp_path, dtype="int8", streams=STREAMS)
    row = int8_row(1, 1.0)
    with pytest.raises(CommitError, match="expected 103 rows in int8 for 99 frames, got 104"):
        writer.shard(0, [replace(row, steps={"modulation": 99})])


def test_nested_lists_are_refused_before_any_work() -> None:
    job = {
        "source": {"kind": "files", "uri": "corpus"},
        "extract": [{"model": "dau1997"}],
        "output": {"uri": "out", "dtype": "int8"},
    }
    assert JobSpec.load(job).output.dtype == "int8"
    with pytest.raises(SpecError, match="expected parquet_form binary with dtype int8") as caught:
        JobSpec.load(job, overrides=["output.parquet_form=nested"])
    assert "\n" not in str(caught.value)


def test_zarr_says_what_its_numbers_are(place: Path) -> None:
    store = next((place / "data").glob("00000-*.zarr"))
    about = json.loads((store / "modulation/values/zarr.json").read_text())
    assert about["data_type"] == "int8" and "units" not in about["attributes"]
    assert "2 rows of scales" in about["attributes"]["long_name"]


def test_a_plan_counts_what_is_stored() -> None:
    seconds = [9.3, 1.28]
    job = spec(dtype="int8", formats=["zarr"])
    cost = estimate(make_plan(ListSource(clips(seconds)), job), job, [FRAMES])
    rows = [int8_row(number, s).streams["modulation"] for number, s in enumerate(seconds)]
    assert cost.bytes_out == {"zarr": sum(each.nbytes for each in rows)}


def test_rows_computed_elsewhere_may_differ_by_a_step() -> None:
    frames, loudness = wave(5, 3.0), np.ones((1, 1), np.float32)

    def row(values: np.ndarray) -> FeatureRow:
        held = stored({"modulation": values, "loudness": loudness}, CAST)
        return replace(make_row(5, 3.0, ()), streams=held.streams, steps=held.steps)

    one = row(frames)
    assert differences(one, row(frames))["modulation"][0] == 0
    for factor, close in ((1.0001, True), (1.1, False)):
        size, most = differences(one, row(frames * np.float32(factor)))["modulation"]
        assert size > 0 and (size <= most) is close
