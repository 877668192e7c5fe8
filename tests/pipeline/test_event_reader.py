"""Events read back: three forms, slices against dense counts, batches, and nothing else fetched."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import earmill.pipeline.formats.parquet.format as parquet_sink
import earmill.pipeline.formats.zarr.write as zarr_sink
from amtcore.features.spike_events import SpikeEvents
from earmill import FeatureLoader, open_features
from earmill.pipeline.loader.collate import (
    collate_jagged,
    collate_packed,
    collate_padded,
    per_channel,
)
from tests.pipeline.event_data import (
    N_NEURONS,
    SECONDS,
    SILENT,
    SPIKES,
    STEP_HZ,
    counts,
    write_spikes,
)
from tests.pipeline.reader_data import CELL_BYTES, PAGE_BYTES
from tests.short import drawn

FORMATS = ("zarr", "parquet")
LONG = 3
EVENT_BYTES = 12


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips in two shards over many small chunks, before finalise."""
    path = tmp_path_factory.mktemp("spiky")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_sink, "CHUNK_BYTES", 40 * EVENT_BYTES)
        patch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
        patch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (2048, 4096))
        write_spikes(path)
    return path


@pytest.fixture(scope="module")
def finalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finalised")
    write_spikes(path, finalised=True)
    return path


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("place", ["spiky", "finalised"])
def test_every_clip_comes_back_in_three_forms(
    fmt: str, place: str, request: pytest.FixtureRequest
) -> None:
    ds = open_features(request.getfixturevalue(place), format=fmt)
    for number, row in enumerate(ds):
        wanted = counts(number, SECONDS[number])
        events = row.features["spikes"]
        assert isinstance(events, SpikeEvents)
        assert (events.first_frame, events.n_frames, events.n_channels) == (0, *wanted.shape)
        step, neuron = np.nonzero(wanted)
        assert np.array_equal(events.frame, step) and events.frame.dtype == np.int64
        assert np.array_equal(events.channel, neuron)
        assert np.array_equal(events.count, wanted[step, neuron])
        assert np.array_equal(events.dense(), wanted)
        assert np.array_equal(events.sparse_tensor().to_dense().numpy(), wanted)
        assert len(row.features["modulation"]) == int(SECONDS[number] * 100 + 1e-6)
        assert row.first_frame == {"modulation": 0, "spikes": 0}


def test_index_and_commits_give_the_same_table(finalised: Path, spiky: Path) -> None:
    before, after = open_features(spiky), open_features(finalised)
    assert before.table.equals(after.table)
    assert before.fingerprint == after.fingerprint
    assert "spikes_n_steps" in after.table.column_names


def test_sizes_are_those_of_the_stored_form(finalised: Path) -> None:
    ds = open_features(finalised)
    n_events = sum(np.count_nonzero(counts(i, seconds)) for i, seconds in enumerate(SECONDS))
    n_frames = sum(int(seconds * 100 + 1e-6) for seconds in SECONDS)
    assert ds.nbytes == EVENT_BYTES * n_events + 2 * 7 * n_frames


@pytest.mark.parametrize("fmt", FORMATS)
@drawn(40, derandomize=True)
@given(
    number=st.sampled_from([0, SILENT, LONG]),
    start_ms=st.integers(0, 7299),
    length_ms=st.integers(1, 3000),
)
def test_a_slice_is_the_counts_of_its_steps(
    spiky: Path, fmt: str, number: int, start_ms: int, length_ms: int
) -> None:
    """Against integer arithmetic in milliseconds on dense counts."""
    whole = counts(number, SECONDS[number])
    start_ms %= round(SECONDS[number] * 1000)
    stop_ms = start_ms + length_ms
    ds = open_features(spiky, format=fmt)
    part = ds.slice(number, start_ms / 1000, stop_ms / 1000)
    step_ms = round(1000 / STEP_HZ)
    kept = [k for k in range(len(whole)) if k * step_ms < stop_ms and (k + 1) * step_ms > start_ms]
    events = part.features["spikes"]
    assert np.array_equal(events.dense(), whole[kept])
    assert events.n_frames == len(kept)
    if kept:
        assert events.first_frame == part.first_frame["spikes"] == kept[0]
        assert ((events.frame >= kept[0]) & (events.frame <= kept[-1])).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_slices_join_to_the_whole(spiky: Path, fmt: str) -> None:
    ds = open_features(spiky, format=fmt)
    edges = (0.0, 0.29, 0.57, 3.0, 7.3)
    parts = [ds.slice(LONG, a, b).features["spikes"] for a, b in pairwise(edges)]
    joined, whole = SpikeEvents.concatenate(parts), ds[LONG].features["spikes"]
    assert np.array_equal(joined.to_columns(), whole.to_columns())
    assert joined.n_frames == whole.n_frames


def test_a_slice_fetches_few_chunks(spiky: Path) -> None:
    """Of some forty chunks: those of the span, and the ones a bisection looks into."""
    ds = open_features(spiky, format="zarr", streams=["spikes"])
    n_chunks = -(-np.count_nonzero(counts(LONG, SECONDS[LONG])) // 40)
    assert n_chunks > 30
    part = ds.slice(LONG, 3.0, 3.1)
    assert len(part.features["spikes"]) > 0
    assert ds.io.blocks_read <= 2 + np.ceil(np.log2(n_chunks)) + 1
    assert ds.io.bytes_read == ds.io.blocks_read * 40 * EVENT_BYTES


@pytest.mark.parametrize("name", ["modulation", "spikes"])
def test_the_other_stream_is_not_fetched(finalised: Path, name: str) -> None:
    ds = open_features(finalised, format="parquet", streams=[name])
    assert list(ds[0].features) == [name]
    sizes = ds.table.column(f"{name}_n_frames").to_pylist()[:3]
    row_bytes = EVENT_BYTES if name == "spikes" else 2 * 7
    assert ds.io.bytes_read == row_bytes * sum(sizes) + PAGE_BYTES + 3 * CELL_BYTES


def test_dtype_converts_frames_alone(finalised: Path) -> None:
    row = open_features(finalised, dtype="float32")[0]
    assert row.features["modulation"].dtype == np.float32
    events = row.features["spikes"]
    assert events.channel.dtype == events.count.dtype == np.int32


def test_provenance_and_pickles_know_events(finalised: Path) -> None:
    ds = pickle.loads(pickle.dumps(open_features(finalised)))
    assert not {"spikes_n_steps", "spikes_start"} & set(ds.provenance(0))
    row = pickle.loads(pickle.dumps(ds[0]))
    assert np.array_equal(row.features["spikes"].dense(), counts(0, SECONDS[0]))


def undone(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return list(value.unbind())
    return value.unpad() if hasattr(value, "unpad") else value.unpack()


@pytest.mark.parametrize("collate", [collate_padded, collate_packed, collate_jagged])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_dense_counts(finalised: Path, collate: Any, workers: int) -> None:
    ds = open_features(finalised)
    loader: Any = DataLoader(
        ds.torch(), batch_size=len(SECONDS), collate_fn=collate, num_workers=workers
    )
    (batch,) = loader
    parts = undone(batch.features["spikes"])
    for number, part in enumerate(parts):
        wanted = counts(number, SECONDS[number])
        assert part.dtype == torch.float32
        np.testing.assert_array_equal(part.numpy(), wanted)


def test_datasets_keep_events_sparse_until_they_are_collated(finalised: Path) -> None:
    ds = open_features(finalised)
    row = ds.torch()[0]
    assert isinstance(row.features["spikes"], SpikeEvents)
    assert isinstance(row.features["modulation"], torch.Tensor)
    stream = ds.iterable(seed=1, batch_size=2)
    seen = sorted(int(i) for batch in FeatureLoader(stream) for i in batch.indices)
    assert seen == list(range(len(SECONDS)))


def test_a_padded_batch_masks_what_is_past_the_clip(finalised: Path) -> None:
    ds = open_features(finalised)
    spikes = collate_padded([ds[0], ds[SILENT]]).features["spikes"]
    assert spikes.values.shape == (2, 200, N_NEURONS)
    assert spikes.lengths.tolist() == [100, 200]
    assert spikes.values[0][100:].abs().sum() == 0 and spikes.values[1].abs().sum() == 0


def test_per_channel_cuts_the_neurons_of_each_channel(finalised: Path) -> None:
    ds = open_features(finalised)
    wanted = counts(0, SECONDS[0])
    alone = per_channel(ds[0].features["spikes"].dense(), SPIKES)
    batch = per_channel(collate_padded([ds[0], ds[1]]).features["spikes"].values, SPIKES)
    assert len(alone) == len(batch) == len(SPIKES.fc_hz)
    for channel, (one, many) in enumerate(zip(alone, batch, strict=True)):
        np.testing.assert_array_equal(one, wanted[:, 2 * channel : 2 * channel + 2].T)
        np.testing.assert_array_equal(many[0, :, :100].numpy(), one)


def test_the_reader_needs_no_models_and_rows_with_spikes_no_torch(finalised: Path) -> None:
    """They take seconds to load."""
    code = (
        "import sys, earmill.pipeline.reader.features; "
        "heavy = ('torch', 'numba', 'amtcore.models', 'amtcore.stages', 'amtcore.kernels'); "
        "print(any(m.startswith(heavy) for m in sys.modules)); "
        f"import earmill; row = earmill.open_features({str(finalised)!r})[0]; "
        "print(row.features['spikes'].n_spikes > 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
