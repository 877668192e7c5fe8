"""Types of a training step: float32 features whatever stands beside them, labels as tensors."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from earmill import (
    Batch,
    Crop,
    FeatureLoader,
    Features,
    Recordings,
    collate,
    collate_jagged,
    collate_packed,
    mix,
    open_features,
)
from earmill.pipeline.formats.values import Caster, as_stored
from earmill.pipeline.loader.stream import labelled
from tests.pipeline.event_data import SPIKES, write_spikes
from tests.pipeline.reader_data import STREAMS, Writer, forks, make_row, stream, write_set

COLLATES = [collate, collate_packed, collate_jagged]
ENVELOPE = as_stored([replace(stream("envelope", (1, 1), 100.0), unit="input unit")], "float16")
N_ROWS = 8


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows: in float16, with a scaled stream beside it, in int8, and in float32."""
    root = tmp_path_factory.mktemp("types")
    found = {name: root / name for name in ("half", "scaled", "int8", "single")}
    write_set(found["half"], n_rows=N_ROWS, finalised=True)
    write_set(found["scaled"], n_rows=N_ROWS, streams=(*STREAMS, *ENVELOPE), finalised=True)
    write_set(found["single"], n_rows=N_ROWS, dtype="float32", finalised=True)
    streams = as_stored(STREAMS, "int8")
    cast = Caster("int8", streams)
    writer = Writer(found["int8"], streams=streams, dtype="int8")
    rows = []
    for number in range(N_ROWS):
        row = make_row(number, 1.0, STREAMS, "float32")
        held = {name: cast(name, values)[0] for name, values in row.streams.items()}
        steps = {name: len(values) for name, values in row.streams.items()}
        rows.append(replace(row, streams=held, steps=steps))
    writer.shard(0, rows)
    writer.finalise()
    return found


def all_of(value: Any) -> torch.Tensor:
    """The values of a stream of a batch."""
    return value if isinstance(value, torch.Tensor) else value.values


@pytest.mark.parametrize("name", ["half", "scaled", "int8", "single"])
def test_features_come_as_float32_everywhere(places: dict[str, Path], name: str) -> None:
    ds = open_features(places[name])
    sets = [ds, open_features([places[name], places[name]]), mix([ds], [1])]
    sets += [open_features(places[name], format="parquet"), Recordings(ds)]
    for each in sets:
        for row in (each[0], each.slice(0, 0.0, 0.01), next(iter(each))):
            assert {values.dtype for values in row.features.values()} == {np.dtype(np.float32)}
    for each in sets[:-1]:
        assert {*each.dtypes.values()} == {each.dtype} == {np.dtype(np.float32)}
        streams = [{}, {"crop": Crop(0.1)}, {"normalise": True}]
        rows = [each.torch()[0], *(next(iter(each.iterable(**options))) for options in streams)]
        for row in rows:
            assert {values.dtype for values in row.features.values()} == {torch.float32}
        for collate_fn in COLLATES:
            stream = each.iterable(batch_size=4, collate_fn=collate_fn, normalise=True)
            for batch in (next(iter(stream)), next(iter(FeatureLoader(stream)))):
                assert {all_of(v).dtype for v in batch.features.values()} == {torch.float32}


def test_a_first_training_step_needs_no_conversion(places: dict[str, Path]) -> None:
    for name in ("half", "scaled", "int8", "single"):
        ds = open_features(places[name], streams=["modulation"])
        loader: Any = DataLoader(ds.iterable(seed=1, batch_size=4, label="label"), batch_size=None)
        model = torch.nn.Linear(7, 5)
        for batch in loader:
            padded = batch.features["modulation"]
            means = padded.values.sum(1) / padded.lengths[:, None] / 1000
            torch.nn.functional.cross_entropy(model(means), batch.label).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_another_type_is_asked_for(places: dict[str, Path], dtype: str) -> None:
    for name, path in places.items():
        for ds in (open_features(path, dtype=dtype), open_features([path, path], dtype=dtype)):
            assert {*ds.dtypes.values()} == {np.dtype(dtype)}
            kind = getattr(torch, dtype)
            batches = [next(iter(FeatureLoader(ds.iterable(batch_size=4))))]
            batches += [next(iter(ds.iterable(batch_size=4, normalise=True)))]
            for batch in batches:
                assert {all_of(v).dtype for v in batch.features.values()} == {kind}, name
            row = ds[0].features["modulation"]
            wanted = open_features(path)[0].features["modulation"].astype(dtype)
            np.testing.assert_array_equal(row, wanted)


def test_features_have_the_byte_order_of_the_machine(places: dict[str, Path]) -> None:
    ds = open_features(places["single"], dtype=">f4")
    batch = next(iter(ds.iterable(batch_size=4, shuffle=False)))
    wanted = open_features(places["single"])[0].features["modulation"]
    np.testing.assert_array_equal(batch.features["modulation"].unpad()[0].numpy(), wanted)


def test_the_stored_type_of_a_stream_is_its_own(places: dict[str, Path]) -> None:
    """Other streams do not change it; several sets take the widest type of a stream."""
    kinds = {
        "half": {"modulation": "float16", "loudness": "float16"},
        "scaled": {"modulation": "float16", "loudness": "float16", "envelope": "float32"},
        "int8": {"modulation": "float32", "loudness": "float32"},
        "single": {"modulation": "float32", "loudness": "float32"},
    }
    for name, wanted in kinds.items():
        ds = open_features(places[name], dtype="stored")
        assert {k: v.name for k, v in ds.dtypes.items()} == wanted
        assert {k: v.dtype.name for k, v in ds[0].features.items()} == wanted
        batch = next(iter(FeatureLoader(ds.iterable(batch_size=4))))
        found = {k: str(all_of(v).dtype).removeprefix("torch.") for k, v in batch.features.items()}
        assert found == wanted
        one = open_features(places[name], dtype="stored", streams=["modulation"])
        assert one.dtype.name == wanted["modulation"]
    both = open_features([places["half"], places["single"]], dtype="stored")
    assert {*both.dtypes.values()} == {np.dtype("float32")} == {both[0].features["loudness"].dtype}
    halves = open_features([places["half"], places["half"]], dtype="stored")
    assert halves[0].features["loudness"].dtype == np.float16


def test_events_are_counts_in_float32(tmp_path: Path) -> None:
    write_spikes(tmp_path)
    for dtype in (None, "float64", "stored"):
        ds = open_features(tmp_path, dtype=dtype)
        assert ds[0].features[SPIKES.name].count.dtype == np.int32
        batch = next(iter(FeatureLoader(ds.iterable(batch_size=2))))
        assert all_of(batch.features[SPIKES.name]).dtype == torch.float32


def test_a_batch_takes_a_type_and_keeps_what_counts(places: dict[str, Path]) -> None:
    """Half-precision training converts features; lengths and seconds stay exact."""
    ds = open_features(places["half"])
    for collate_fn in COLLATES:
        batch = next(iter(ds.iterable(batch_size=4, collate_fn=collate_fn, label="label")))
        other = torch.zeros(1, dtype=torch.bfloat16)
        for moved in (
            batch.to(torch.bfloat16),
            batch.to("cpu", torch.bfloat16),
            batch.to(dtype=torch.bfloat16, device="cpu"),
            batch.to(other),
        ):
            assert isinstance(moved, Batch)
            assert {all_of(v).dtype for v in moved.features.values()} == {torch.bfloat16}
            assert moved.indices.dtype == moved.label.dtype == torch.int64
            assert moved.seconds.dtype == moved.start_s.dtype == torch.float64
            assert torch.equal(moved.seconds, batch.seconds)
            for value in moved.features.values():
                for name in ("lengths", "offsets"):
                    if hasattr(value, name) and not isinstance(value, torch.Tensor):
                        assert getattr(value, name).dtype == torch.int64


def rows_with(columns: list[dict[str, Any]], features: Features) -> list[Any]:
    return [replace(features[k], extra=extra) for k, extra in enumerate(columns)]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([3, 1, 2], torch.tensor([3, 1, 2])),
        ([2**53 + 1, 1, 2], torch.tensor([2**53 + 1, 1, 2])),
        ([True, False, True], torch.tensor([True, False, True])),
        ([0.1, 2.0, 3.0], torch.tensor([0.1, 2.0, 3.0], dtype=torch.float64)),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([1, None, 2], [1, None, 2]),
        ([1, "b", 2.0], [1, "b", 2.0]),
        ([2**70, 1, 2], [2**70, 1, 2]),
        ([[1, 2], [3], []], [[1, 2], [3], []]),
        ([datetime(2025, 1, 1)] * 3, [datetime(2025, 1, 1)] * 3),
    ],
    ids=str,
)
def test_columns_are_tensors_of_numbers_and_lists_of_others(
    places: dict[str, Path], values: list[Any], wanted: Any
) -> None:
    rows = rows_with([{"x": value} for value in values], open_features(places["half"]))
    for collate_fn in COLLATES:
        found = collate_fn(rows).extra["x"]
        assert type(found) is type(wanted)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        else:
            assert found == wanted


def test_rows_of_several_sources_may_lack_columns(places: dict[str, Path]) -> None:
    rows = rows_with([{"a": 1}, {"b": "x"}], open_features(places["half"]))
    assert collate(rows).extra == {"a": [1, None], "b": [None, "x"]}


@forks
@pytest.mark.parametrize("workers", [0, 1])
def test_labels_come_as_losses_take_them(places: dict[str, Path], workers: int) -> None:
    ds = open_features(places["half"])
    loaders: list[Any] = [
        FeatureLoader(ds.iterable(batch_size=4, label="label"), num_workers=workers),
        DataLoader(ds.iterable(batch_size=4, label="label"), batch_size=None, num_workers=workers),
        DataLoader(ds.torch(label="label"), batch_size=4, collate_fn=collate, num_workers=workers),
    ]
    for loader in loaders:
        seen = 0
        for batch in loader:
            wanted = [int(index) % 5 for index in batch.indices]
            assert batch.label.dtype == torch.int64 and batch.label.tolist() == wanted
            assert batch.extra["label"].tolist() == wanted
            assert all(isinstance(text, str | None) for text in batch.extra["text"])
            seen += len(batch)
        assert seen == N_ROWS
    number = replace(ds[0], label=0.5), replace(ds[1], label=1.25)
    assert collate(number).label.dtype == torch.float32
    assert collate([replace(ds[0], label="yes")]).label == ["yes"]
    assert collate([ds[0]]).label is None


def test_a_label_that_is_not_there_is_named(places: dict[str, Path]) -> None:
    ds = open_features(places["half"])
    for make in (ds.torch, ds.iterable):
        with pytest.raises(ValueError, match=r"the source's columns \['label', 'text'\], got"):
            make(label="lable")
    with pytest.raises(ValueError, match=r"none in column 'text' of row 'speaker 0/clip_0000.wav'"):
        ds.torch(label="text")[0]
    with pytest.raises(ValueError, match="none in column 'mark'"):
        labelled(replace(ds[0], extra={"mark": float("nan")}), "mark")


def test_batches_of_batches_are_refused(places: dict[str, Path]) -> None:
    """A DataLoader must not collate the batches of a stream again."""
    loader: Any = DataLoader(
        open_features(places["half"]).iterable(batch_size=4), batch_size=2, collate_fn=collate
    )
    with pytest.raises(TypeError, match=r"got batches, .*batch_size=None. hands them on"):
        next(iter(loader))


@pytest.mark.parametrize("collate_fn", [collate, collate_packed])
def test_functions_of_torch_take_batches(places: dict[str, Path], collate_fn: Any) -> None:
    stream = open_features(places["half"]).iterable(
        batch_size=4, label="label", collate_fn=collate_fn
    )
    batch = next(iter(stream))

    def mean(scale: torch.Tensor, of: Batch) -> torch.Tensor:
        return scale * of.features["modulation"].values.mean() + of.label.sum()

    wanted = mean(torch.tensor(2.0), batch)
    gradient, value = torch.func.grad_and_value(mean)(torch.tensor(2.0), batch)
    assert torch.equal(value, wanted) and float(gradient) != 0
    compiled = torch.compile(mean, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.tensor(2.0), batch), wanted)


@pytest.mark.parametrize("collate_fn", COLLATES)
def test_pinning_reaches_every_tensor(
    places: dict[str, Path], collate_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader with `pin_memory=True` calls this method; pinning real memory needs a GPU."""
    stream = open_features(places["half"]).iterable(
        batch_size=4, label="label", collate_fn=collate_fn
    )
    batch = next(iter(stream))
    pinned: list[int] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor
    )
    found = batch.pin_memory()
    assert isinstance(found, Batch) and found.row_ids == batch.row_ids
    parts = 1 if collate_fn is collate_jagged else 2
    # Four tensors of the batch, a label, a column, and the tensors of two streams.
    assert len(pinned) == 4 + 2 + 2 * parts
