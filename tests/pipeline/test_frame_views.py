"""Frames that a collate copies itself: the same batches, one copy less, and never another's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earmill import Crop, FeatureLoader, collate, collate_jagged, collate_packed, open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import MAX_BLOCK_RATIO, FrameView
from tests.pipeline.reader_data import write_chunked, write_set
from tests.pipeline.test_shared_batches import flat, forks
from tests.short import spread

COLLATES = {
    "padded": collate,
    "padded to 8": partial(collate, pad_value=-3.0, multiple_of=8),
    "packed": collate_packed,
    "jagged": collate_jagged,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lent")
    write_chunked(path)
    return path


@pytest.mark.parametrize(
    ("name", "fmt", "dtype", "crop"),
    spread(
        *(3, COLLATES, ["zarr", "parquet"], ["float16", "float32", "float64"]), [None, Crop(0.7)]
    ),
)
def test_batches_are_those_of_rows_that_were_put_together(
    name: str, fmt: str, dtype: str, crop: Crop | None, place: Path
) -> None:
    """No block stays in the cache: its memory is wanted for the next while a batch is gathered."""
    ds = open_features(place, format=fmt, dtype=dtype, cache_bytes=0)
    options: dict[str, Any] = {"seed": 3, "batch_size": 4, "crop": crop}
    got = [*FeatureLoader(ds.iterable(**options), collate_fn=COLLATES[name])]
    # Not one of ours, so it is given tensors.
    own = FeatureLoader(ds.iterable(**options), collate_fn=lambda rows: COLLATES[name](rows))
    for batch, wanted in zip(got, own, strict=True):
        assert batch.row_ids == wanted.row_ids
        for key, tensor in flat(wanted).items():
            assert flat(batch)[key].dtype == tensor.dtype
            assert torch.equal(flat(batch)[key], tensor), key


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_frames_are_copied_once(
    fmt: str, workers: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("put together before they were collated")

    monkeypatch.setattr("earmill.pipeline.formats.block_cache.join_frames", fail)
    stream = open_features(place, format=fmt).iterable(batch_size=4)
    assert sum(len(batch) for batch in FeatureLoader(stream, num_workers=workers)) == 6


def test_a_collate_of_ones_own_gets_tensors_that_are_its_own(place: Path) -> None:
    ds = open_features(place, format="zarr")
    loader = FeatureLoader(ds.iterable(shuffle=False, batch_size=6), collate_fn=list)
    before = [row.features["modulation"].clone() for row in next(iter(loader))]
    for row in next(iter(loader)):
        row.features["modulation"].zero_()
    after = [row.features["modulation"] for row in next(iter(loader))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_normalised_frames_are_not_lent(tmp_path: Path) -> None:
    write_set(tmp_path, n_rows=6, finalised=True)
    ds = open_features(tmp_path)
    stream = ds.iterable(shuffle=False, batch_size=6, normalise=True)
    (batch,) = FeatureLoader(stream)
    wanted = collate([*ds.iterable(shuffle=False, normalise=True)])
    assert torch.equal(batch.features["loudness"].values, wanted.features["loudness"].values)


def test_a_block_is_not_held_for_a_small_part_of_it() -> None:
    block = np.zeros((10 * MAX_BLOCK_RATIO, 3), np.float16)
    for frames, is_held in ((10, True), (9, False)):
        ((_, piece),) = FrameView([(0, block[:frames])], (frames, 3), block.dtype)._pieces
        assert np.shares_memory(piece, block) == is_held


def test_too_few_frames_are_found_when_they_are_viewed() -> None:
    piece = np.zeros((4, 3), np.float16)
    with pytest.raises(CommitError, match="expected 5 frames, the file gave 4"):
        FrameView([(0, piece)], (5, 3), piece.dtype)


@pytest.mark.parametrize("span_s", [None, (0.2, 0.5)])
def test_a_row_is_viewed_only_where_that_is_asked_for(
    span_s: tuple[float, float] | None, place: Path
) -> None:
    ds = open_features(place)
    view = ds.read_row(0, span_s, copy=False).features["modulation"]
    assert isinstance(view, FrameView)
    row = ds[0] if span_s is None else ds.slice(0, *span_s)
    for array in (row.features["modulation"], ds.read_row(0, span_s).features["modulation"]):
        assert isinstance(array, np.ndarray) and array.flags.writeable
        into = np.empty(view.shape, view.dtype)
        view.fill(into)
        np.testing.assert_array_equal(into, array)
