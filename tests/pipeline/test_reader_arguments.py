"""Arguments of the reader that cannot be meant: refused at once, never as damage or fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earmill import (
    FeatureDataset,
    FeatureLoader,
    Features,
    FeatureStream,
    collate,
    open_features,
)
from earmill.pipeline.loader.stream import STATE_VERSION

from .reader_data import ids, write_set


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Features:
    """Twelve rows."""
    place: Path = tmp_path_factory.mktemp("arguments")
    write_set(place, n_rows=12, formats=("parquet",))
    return open_features(place)


@pytest.mark.parametrize("uri", [None, 5, b"x", "", {"a": 1}, [None], [""], iter("ab")])
def test_what_is_no_place_is_no_feature_set(uri: Any) -> None:
    with pytest.raises(TypeError, match=r"expected (the place|a path or a URI) of a feature set"):
        open_features(uri)


@pytest.mark.parametrize("row_id", [5, None, b"x", 1.5])
def test_a_row_id_is_text(ds: Features, row_id: Any) -> None:
    both = open_features([ds._uri])
    for rows in (ds, both):
        for call in (rows.by_id, rows.index_of):
            with pytest.raises(TypeError, match=f"row ids are text, got {row_id!r}"):
                call(row_id)


@pytest.mark.parametrize("cache_bytes", ["1", -1, None, float("nan")])
def test_a_wrong_cache_size_is_not_damage(ds: Features, cache_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"cache_bytes must be a number of bytes from 0, got "):
        open_features(ds._uri, cache_bytes=cache_bytes)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("shuffle", "no"), ("shuffle", 0), ("seed", 1.5), ("seed", "1"), ("epoch", 0.5),
     ("lanes", 1.5),
     ("window_rows", 2.5), ("batch_size", 2.5), ("batch_size", True), ("rank", 0.0),
     ("world_size", "2"), ("window_bytes", "1"), ("window_bytes", True)],
)  # fmt: skip
def test_a_stream_names_what_it_cannot_use(ds: Features, name: str, wrong: Any) -> None:
    said = "batch_rows" if name == "batch_size" else name
    ranks = {"rank": 0, "world_size": 1}
    with pytest.raises(TypeError, match=f"{said} must be .*, got {wrong!r}"):
        FeatureStream(ds, **ranks | {name: wrong})


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_windows_hold_some_bytes(ds: Features, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"window_bytes must be above 0, got {wrong}"):
        FeatureStream(ds, window_bytes=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"multiple_of": 1.5}, "multiple_of must be a whole number, got 1.5"),
     ({"multiple_of": "8"}, "multiple_of must be a whole number, got '8'"),
     ({"pad_value": "0"}, "pad_value must be a number, got '0'"),
     ({"pad_value": None}, "pad_value must be a number, got None")],
)  # fmt: skip
def test_padding_is_a_number(ds: Features, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        collate([ds[0]], **options)


def test_whole_numbers_of_numpy_are_numbers(ds: Features) -> None:
    two, one = np.int64(2), np.int64(1)
    stream = FeatureStream(ds, rank=one, world_size=two, seed=two, batch_size=two, epoch=one)
    assert len(ids(stream)) == 6
    with pytest.raises(TypeError, match=r"epoch must be a whole number, got 1\.5"):
        stream.set_epoch(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [({"position": -5}, ValueError, "has position=-5, expected a number from 0"),
     ({"position": 999}, ValueError, "has position=999, this stream has 0 to 12"),
     ({"start": 99}, ValueError, "has start=99"),
     ({"position": 1.5}, TypeError, "position must be a whole number"),
     ({"epoch": "x"}, TypeError, "epoch must be a whole number"),
     ({"world_size": 0}, ValueError, "world_size must be at least 1")],
)  # fmt: skip
def test_a_state_out_of_its_epoch_leaves_no_rows_out(
    ds: Features, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    stream = FeatureStream(ds, batch_size=4)
    with pytest.raises(error, match=message):
        stream.load_state_dict(stream.state_dict() | changed)
    with pytest.raises(ValueError, match=r"got one without \['batch_size', "):
        stream.load_state_dict({"version": STATE_VERSION})
    assert len(ids(stream)) == 12


def test_a_loader_says_what_it_loads(ds: Features) -> None:
    for wrong in (ds, FeatureDataset(ds)):
        with pytest.raises(TypeError, match=f"FeatureStream, .*got {type(wrong).__name__}"):
            FeatureLoader(wrong)  # type: ignore[arg-type]
