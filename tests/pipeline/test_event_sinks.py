"""Streams of events on disk: exact round trips, opened by every library, wrong ones refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError, OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.digest import differences, digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.row_table import row_table
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.encoded import encode
from tests.pipeline.event_data import (
    FRAMES,
    N_NEURONS,
    SECONDS,
    SILENT,
    SPIKES,
    STREAMS,
    counts,
    spike_row,
    spike_rows,
    write_spikes,
)
from tests.short import drawn

FORMATS = ("zarr", "parquet")


def write(fmt: str, folder: Path, rows: list[FeatureRow]) -> Path:
    encoding = Encoding("float16", attrs={"spec_sha256": "ab" * 32})
    return encode(fmt, rows, STREAMS, folder=folder, name=f"shard.{fmt}", encoding=encoding)


def dense(events: Any, row: int) -> np.ndarray:
    """Counts (step, neuron) from stored rows, by hand."""
    made = np.zeros_like(counts(row, SECONDS[row]))
    for step, neuron, count in np.array(events, np.int64).reshape(-1, 3):
        made[step, neuron] += count
    return made


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_read_back_is_what_was_written(fmt: str, tmp_path: Path) -> None:
    rows = spike_rows()
    digest = digest_rows(rows, STREAMS, "float16")
    assert digest.streams["spikes"].dtype == "int32" and digest.streams["spikes"].width == 3
    assert digest.streams["modulation"].dtype == "float16"
    assert differences(digest, format_of(fmt).digest(write(fmt, tmp_path, rows), STREAMS)) == []


@pytest.mark.parametrize("fmt", FORMATS)
@drawn(10, derandomize=True)
@given(
    clips=st.lists(
        arrays(np.int32, st.tuples(st.integers(0, 6), st.just(N_NEURONS)),
               elements=st.sampled_from([0, 0, 0, 1, 9])),
        max_size=4,
    )
)  # fmt: skip
def test_any_counts_survive(
    fmt: str, clips: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [
        replace(
            spike_row(0, 0.02),
            row_id=str(number),
            streams={
                "modulation": np.zeros((2, FRAMES.width), np.float16),
                "spikes": SpikeEvents.from_dense(clip).to_columns(),
            },
            steps={"spikes": len(clip)},
        )
        for number, clip in enumerate(clips)
    ]
    path = write(fmt, tmp_path_factory.mktemp("any"), rows)
    assert format_of(fmt).digest(path, STREAMS) == digest_rows(rows, STREAMS, "float16")


@pytest.mark.parametrize("fmt", FORMATS)
def test_steps_are_part_of_what_is_compared(fmt: str, tmp_path: Path) -> None:
    """A silent clip of other length differs in its steps alone."""
    rows = spike_rows()
    longer = [*rows]
    longer[SILENT] = replace(rows[SILENT], steps={"spikes": 201})
    path = write(fmt, tmp_path, longer)
    found = differences(digest_rows(rows, STREAMS, "float16"), format_of(fmt).digest(path, STREAMS))
    assert found == ["stream spikes: the values read back differ from those written"]


def test_rows_say_how_many_steps_and_events_they_have() -> None:
    table = row_table(spike_rows(), STREAMS)
    sizes = [np.count_nonzero(counts(row, seconds)) for row, seconds in enumerate(SECONDS)]
    assert sizes[SILENT] == sizes[-1] == 0 < sizes[0]
    assert table.column("spikes_n_frames").to_pylist() == sizes
    assert table.column("spikes_start").to_pylist() == np.cumsum([0, *sizes[:-1]]).tolist()
    assert table.column("spikes_n_steps").to_pylist() == [100, 200, 4, 1460, 0]
    assert "modulation_n_steps" not in table.column_names


def test_zarr_opens_in_xarray_as_ragged_events(tmp_path: Path) -> None:
    path = write("zarr", tmp_path, spike_rows())
    with xr.open_zarr(path, group="spikes", consolidated=True) as data:
        assert data["values"].dtype == "int32" and data["values"].dims == ("obs", "column")
        assert data["values"].attrs["columns"] == ["frame", "channel", "count"]
        assert data["n_steps"].dtype == "int64"
        assert data["n_steps"].values.tolist() == [100, 200, 4, 1460, 0]
        assert StreamInfo.from_dict(data.attrs["stream"]) == SPIKES
        for row, seconds in enumerate(SECONDS):
            start, size = int(data["row_start"][row]), int(data["row_size"][row])
            got = dense(data["values"][start : start + size].values, row)
            np.testing.assert_array_equal(got, counts(row, seconds))
    with xr.open_zarr(path, group="modulation", consolidated=True) as data:
        assert "n_steps" not in data and data["values"].dtype == "float16"


def test_parquet_reads_alike_in_pyarrow_polars_duckdb_and_datasets(tmp_path: Path) -> None:
    from datasets import load_dataset

    path = str(write("parquet", tmp_path, spike_rows()))
    assert str(pq.read_schema(path).field("spikes").type) == "binary"
    described = json.loads(pq.read_schema(path).metadata[b"earmill.streams"])
    assert tuple(StreamInfo.from_dict(info) for info in described) == STREAMS
    with duckdb.connect() as base:
        duck = base.sql(f"select spikes, spikes_n_steps from '{path}'").fetchall()
    hf = load_dataset(
        "parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache")
    ).with_format("arrow")
    arrow = pq.read_table(path)
    read = {
        "pyarrow": (arrow["spikes"].to_pylist(), arrow["spikes_n_steps"].to_pylist()),
        "polars": (pl.read_parquet(path)["spikes"].to_list(), arrow["spikes_n_steps"].to_pylist()),
        "duckdb": ([line[0] for line in duck], [line[1] for line in duck]),
        "datasets": (hf[:]["spikes"].to_pylist(), hf[:]["spikes_n_steps"].to_pylist()),
    }
    for library, (events, steps) in read.items():
        assert steps == [100, 200, 4, 1460, 0], library
        for row, seconds in enumerate(SECONDS):
            got = dense(np.frombuffer(events[row], "<i4").reshape(-1, 3), row)
            assert np.array_equal(got, counts(row, seconds)), (library, row)


def test_a_layout_is_that_of_the_stream_and_of_its_stored_form() -> None:
    events, frames = layout_of(SPIKES), layout_of(FRAMES)
    assert layout_of(SPIKES.to_dict()) == events and layout_of(FRAMES.to_dict()) == frames
    assert (events.stored_width, events.stored_dtype("float16")) == (3, "int32")
    assert events.place_columns == ("spikes_start", "spikes_n_frames", "spikes_n_steps")
    assert (frames.stored_width, frames.stored_dtype("float16")) == (FRAMES.width, "float16")
    assert frames.place_columns == ("modulation_start", "modulation_n_frames")
    assert (events.length_column, frames.length_column) == (
        "spikes_n_steps",
        "modulation_n_frames",
    )
    assert (events.row_bytes("float16"), frames.row_bytes("float16")) == (12, 2 * FRAMES.width)


def test_a_layout_of_another_release_is_refused(tmp_path: Path) -> None:
    write_spikes(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"layout": "events"', '"layout": "runs"'))
    with pytest.raises(OutputError, match=r"layout out of .* for stream 'spikes', got 'runs'"):
        open_features(tmp_path)


def planted(change: Callable[[np.ndarray], Any]) -> FeatureRow:
    """A good row whose events were changed."""
    row = spike_row(0, 0.5)
    events = np.array([[3, 0, 1], [3, 5, 2], [99, 1, 1]], np.int32)
    changed = change(events)
    events = events if changed is None else changed
    return replace(row, streams={**row.streams, "spikes": events})


def put(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def change(events: np.ndarray) -> None:
        events[row, column] = value

    return change


WRONG: dict[str, tuple[FeatureRow, str]] = {
    "a step past the clip": (planted(put(2, 0, 100)), "a frame from 0 to 99, got 100 in event 2"),
    "a negative step": (planted(put(0, 0, -1)), "a frame from 0 to 99, got -1 in event 0"),
    "no such neuron": (planted(put(1, 1, 6)), "a channel from 0 to 5, got 6 in event 1"),
    "a negative neuron": (planted(put(1, 1, -1)), "a channel from 0 to 5, got -1 in event 1"),
    "a count of none": (planted(put(1, 2, 0)), "counts of 1 or more, got 0 in event 1"),
    "steps that go back": (
        planted(lambda events: events[[2, 0]]),
        r"ascending \(frame, channel\), got \(99, 1\) before \(3, 0\)",
    ),
    "an event twice": (
        planted(put(1, 1, 0)),
        r"ascending \(frame, channel\), got \(3, 0\) before \(3, 0\)",
    ),
    "another type": (
        planted(lambda events: events.astype(np.int64)),
        r"expected \(events, 3\) int32, got \(3, 3\) int64",
    ),
    "dense counts": (
        planted(lambda _: counts(0, 0.5)),
        r"expected \(events, 3\) int32, got \(100, 6\) int32",
    ),
    "no steps": (replace(spike_row(0, 0.5), steps={}), r"the steps of \['spikes'\], got those of"),
    "steps of frames": (
        replace(spike_row(0, 0.5), steps={"spikes": 100, "modulation": 50}),
        r"the steps of \['spikes'\], got those of \['modulation', 'spikes'\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_events_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    row, message = WRONG[name]
    with pytest.raises(CommitError, match=f"clip_0000.wav'.*{message}"):
        write_spikes(tmp_path, [row])
    assert list(Layout.open(tmp_path).list("data")) == []


def test_good_events_at_every_edge_are_taken(tmp_path: Path) -> None:
    edges = np.array([[0, 0, 1], [0, 5, 2**31 - 1], [99, 0, 1], [99, 5, 1]], np.int32)
    write_spikes(tmp_path, [planted(lambda _: edges)])
    assert commits(Layout.open(tmp_path))["00000"].frames["spikes"] == 4


def test_a_set_with_events_is_whole_and_its_damage_is_found(tmp_path: Path) -> None:
    layout = write_spikes(tmp_path, finalised=True).layout
    report = verify(layout)
    assert report.ok and report.rows_ok == len(SECONDS) and report.rows_bad == 1
    record = commits(layout)["00000"]
    assert record.frames["spikes"] == sum(len(row.streams["spikes"]) for row in spike_rows()[:3])
    for rel in ("spikes/values/c/0/0", "spikes/n_steps/c/0"):
        path = Path(layout.path(f"{record.path('zarr')}/{rel}"))
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        (problem,) = verify(layout).problems
        assert rel in problem and "content changed" in problem
        path.write_bytes(good)
    path = Path(layout.path(f"{record.path('zarr')}/spikes/values/c/0/0"))
    path.unlink()
    (problem,) = verify(layout, hashes=False).problems
    assert "spikes/values/c/0/0: missing" in problem


def test_the_index_has_steps_and_the_cards_say_events(tmp_path: Path) -> None:
    layout = write_spikes(tmp_path, finalised=True).layout
    index = pq.read_table(layout.path(layout.list("index")[0]))
    assert index.column("spikes_n_steps").to_pylist() == [100, 200, 4, 1460, 0, None]
    card = layout.read_bytes("README.md").decode()
    assert "int32 rows (frame, channel, count) instead of frames: `spikes`" in card
    described = json.loads(layout.read_bytes("croissant.json"))
    fields = {field["name"]: field for field in described["recordSet"][1]["field"]}
    spikes = fields["spikes"]
    assert "bytes of (-1, 3) int32, little endian" in spikes["description"]
    assert "(frame, channel, count) of 6 neurons" in spikes["description"]
    assert f"(-1, {FRAMES.width}) float16" in fields["modulation"]["description"]
    assert "spikes: dau1997, 6 neurons at 200 Hz" in described["description"]


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    def stored(folder: Path) -> dict[str, bytes]:
        paths = [write(fmt, folder, spike_rows()) for fmt in FORMATS]
        files = [f for path in paths for f in [path, *path.rglob("*")] if f.is_file()]
        return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}

    first = stored(tmp_path / "a")
    assert first == stored(tmp_path / "b") and len(first) > 8
