"""Crops: the same time of every stream, drawn from (seed, epoch, row), and nothing else read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earmill import Crop, FeatureLoader, Features, collate_packed, open_features
from earmill.pipeline.loader.crops import _GOLDEN, _mixed, uniform
from tests.pipeline.event_data import STEP_HZ, counts, write_spikes
from tests.pipeline.reader_data import LOADED_ROWS as N_ROWS
from tests.pipeline.reader_data import (
    LOUDNESS_HZ,
    MODULATION_HZ,
    STREAMS,
    Writer,
    chunked_seconds,
    make_row,
    mixed_seconds,
    stream,
    values,
    write_chunked,
)

CROP_S = 0.3


@pytest.fixture(scope="module")
def ds(seven_a_shard: Path) -> Features:
    return open_features(seven_a_shard)


def starts(stream: Any) -> dict[int, float]:
    return {row.index: row.start_s for row in stream}


def test_all_streams_are_cut_at_the_same_time(ds: Features) -> None:
    seen = set()
    for row in ds.iterable(seed=1, crop=Crop(CROP_S)):
        whole = mixed_seconds(row.index) < CROP_S + 1 / LOUDNESS_HZ
        for name, rate_hz, width in (
            ("modulation", MODULATION_HZ, 7),
            ("loudness", LOUDNESS_HZ, 1),
        ):
            n_frames = int(mixed_seconds(row.index) * rate_hz + 1e-6)
            first = round(row.start_s * rate_hz)
            if not whole:
                assert len(row.features[name]) == round(CROP_S * rate_hz)
                assert first + len(row.features[name]) <= n_frames
                assert row.first_frame[name] == first == pytest.approx(row.start_s * rate_hz)
            kept = values(row.index, n_frames, width)[first:][: len(row.features[name])]
            assert torch.equal(row.features[name], torch.from_numpy(kept))
        seen.add(row.start_s)
    assert len(seen) > N_ROWS / 3


def test_starts_come_from_seed_epoch_and_row(ds: Features) -> None:
    crop = Crop(CROP_S)
    first = starts(ds.iterable(seed=1, crop=crop))
    for split in ({"lanes": 2, "window_rows": 3}, {"shuffle": False}):
        assert starts(ds.iterable(seed=1, crop=crop, **split)) == first
    batches = [*ds.iterable(seed=1, crop=crop, batch_frames=200)]
    found = {}
    for batch in batches:
        found |= dict(zip(batch.indices.tolist(), batch.start_s.tolist(), strict=True))
    assert found == first
    ranks = [starts(ds.iterable(seed=1, crop=crop, rank=r, world_size=2)) for r in (0, 1)]
    assert ranks[0] | ranks[1] == first
    assert starts(ds.iterable(seed=1, crop=crop, epoch=1)) != first
    assert starts(ds.iterable(seed=2, crop=crop)) != first


def test_the_numbers_are_those_of_splitmix() -> None:
    """The first two of seed 1234567 as its authors' program prints them; all starts come."""
    state = np.array([1234567, (1234567 + _GOLDEN) % 2**64], np.uint64)
    found = _mixed(state + np.uint64(_GOLDEN)).tolist()
    assert found == [6457827717110365317, 3203168211198807973]
    rows = np.arange(20_000)
    drawn = uniform(3, rows, np.zeros_like(rows))
    assert 0 <= drawn.min() and drawn.max() < 1
    counts = np.bincount((drawn * 10).astype(int), minlength=10)
    assert abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_every_start_is_drawn_and_none_past_the_end(ds: Features) -> None:
    """Row 1 has 46 frames of loudness's rate or more than a crop: the first and last both come."""
    seen: set[float] = set()
    stream = ds.iterable(seed=1, crop=Crop(0.9), shuffle=False)
    longest = max(range(N_ROWS), key=mixed_seconds)
    for epoch in range(120):
        stream.set_epoch(epoch)
        stream.load_state_dict(stream.state_dict() | {"position": longest})
        seen.add(next(iter(stream)).start_s)
    last = int(mixed_seconds(longest) * LOUDNESS_HZ + 1e-6) - 45
    assert seen == {k / LOUDNESS_HZ for k in range(last + 1)}


def test_a_fixed_crop_moves_back_where_the_clip_ends(ds: Features) -> None:
    for row in ds.iterable(crop=Crop(0.2, start_s=0.5)):
        latest = int(mixed_seconds(row.index) * LOUDNESS_HZ + 1e-6) / LOUDNESS_HZ - 0.2
        assert row.start_s == pytest.approx(max(0.0, min(0.5, latest)))


def test_a_batch_of_crops_says_where_they_begin(ds: Features) -> None:
    for batch in FeatureLoader(ds.iterable(seed=1, batch_size=4, crop=Crop(CROP_S))):
        wanted = starts(ds.iterable(seed=1, crop=Crop(CROP_S)))
        assert batch.start_s.tolist() == [wanted[n] for n in batch.indices.tolist()]


def test_a_clip_is_cut_that_its_slowest_stream_does_not_exceed(tmp_path: Path) -> None:
    slow = stream("slow", (1,), 10.0)
    clips = [make_row(k, s, (STREAMS[0], slow)) for k, s in enumerate((0.45, 0.5, 0.59, 0.3))]
    Writer(tmp_path, streams=(STREAMS[0], slow)).shard(0, clips)
    cropped = open_features(tmp_path).iterable(shuffle=False, crop=Crop(0.41), batch_frames=42 * 4)
    (batch,) = cropped
    assert batch.features["modulation"].lengths.tolist() == [41, 41, 41, 30]
    assert batch.start_s.tolist() == [0, 0, 0, 0]


def test_events_are_cut_with_the_frames(tmp_path: Path) -> None:
    write_spikes(tmp_path)
    stream = open_features(tmp_path).iterable(seed=2, crop=Crop(0.25))
    cut = [row for row in stream if row.start_s]
    assert cut
    for row in cut:
        first = round(row.start_s * STEP_HZ)
        wanted = counts(row.index, row.seconds)[first : first + round(0.25 * STEP_HZ)]
        np.testing.assert_array_equal(row.features["spikes"].dense(), wanted)
        assert row.first_frame["modulation"] == round(row.start_s * 100)
        assert len(row.features["modulation"]) == 25


def test_only_the_crop_is_fetched(tmp_path: Path) -> None:
    write_chunked(tmp_path)
    read = []
    for crop in (None, Crop(0.1, start_s=0.5)):
        ds = open_features(tmp_path, format="zarr", streams=["modulation"], cache_bytes=0)
        assert sum(len(row.features["modulation"]) for row in ds.iterable(crop=crop)) > 0
        read.append(ds.io.blocks_read)
    assert chunked_seconds(0) == 1.0
    assert read[1] <= 2 * len(ds)
    assert read[0] > 4 * read[1]


def test_crops_resume_and_pack(ds: Features) -> None:
    def make() -> FeatureLoader:
        return FeatureLoader(
            ds.iterable(seed=4, batch_size=4, crop=Crop(CROP_S)), collate_fn=collate_packed
        )

    whole = [(b.indices.tolist(), b.start_s.tolist()) for b in make()]
    stopped = make()
    batches = iter(stopped)
    next(batches), next(batches)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [(b.indices.tolist(), b.start_s.tolist()) for b in resumed] == whole[2:]
    with pytest.raises(ValueError, match=r"with crop=\[0.3, None\], this stream has None"):
        ds.iterable(seed=4, batch_size=4).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((0,), ValueError, "seconds must be above 0"),
        ((-1.0,), ValueError, "seconds must be seconds from 0"),
        ((float("inf"),), ValueError, "seconds must be seconds from 0"),
        (("2",), TypeError, "seconds must be a number of seconds, got '2'"),
        ((True,), TypeError, "seconds must be a number"),
        ((1.0, -0.1), ValueError, "start_s must be seconds from 0"),
        ((1.0, "random"), TypeError, "start_s must be a number of seconds"),
    ],
)
def test_a_wrong_crop_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Crop(*given)


def test_what_is_no_crop_is_refused(ds: Features) -> None:
    with pytest.raises(TypeError, match=r"expected crop=Crop\(seconds\) or None, got 2.0"):
        ds.iterable(crop=2.0)
