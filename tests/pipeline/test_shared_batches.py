"""Slots of shared memory: batches stay the same; a slot is used again, never while it is held."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields
from functools import partial
from multiprocessing import reduction, resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from earmill import (
    Batch,
    FeatureLoader,
    Features,
    collate,
    collate_jagged,
    collate_packed,
    open_features,
)
from earmill.pipeline.loader.collate import takes_views
from earmill.pipeline.loader.feature_loader import FREE, TAKEN, BatchRing, _Batches
from tests.pipeline.reader_data import forks, write_set

N_ROWS = 26
SLOT_BYTES = 2**20


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Features:
    path: Path = tmp_path_factory.mktemp("shared")
    write_set(path, n_rows=N_ROWS, rows_per_shard=7, formats=("parquet",))
    return open_features(path)


def sent(ring: BatchRing, rows: Any, collate_fn: Any = collate) -> Any:
    """A batch through the queue: collated in a slot, pickled, and opened."""
    batches = _Batches(None, collate_fn)  # type: ignore[arg-type]
    made = batches._sent(ring.slot(0), rows, takes_views(collate_fn))
    return pickle.loads(pickle.dumps(made))


def states(ring: BatchRing, n: int = 2) -> list[int]:
    return [int(state) for state in ring._memory[:n]]


def tensors(batch: Batch) -> list[torch.Tensor]:
    """Every tensor of a batch."""
    columns = (*batch.extra.values(), batch.label)
    found = [batch.indices, batch.seconds, batch.start_s, batch.sets]
    found += [each for each in columns if isinstance(each, torch.Tensor)]
    for value in batch.features.values():
        if isinstance(value, torch.Tensor):
            found += [value.values(), value.offsets()]
        else:
            found += [getattr(value, each.name) for each in fields(value)]
    return found


def flat(batch: Batch) -> dict[str, torch.Tensor]:
    found = {name: getattr(batch, name) for name in ("indices", "seconds", "start_s", "sets")}
    for name, value in batch.features.items():
        parts = value.unbind() if isinstance(value, torch.Tensor) else None
        parts = parts or (value.unpad() if hasattr(value, "unpad") else value.unpack())
        found |= {f"{name} {i}": part for i, part in enumerate(parts)}
    return found


@pytest.mark.parametrize(
    "collate_fn",
    [collate, partial(collate, pad_value=-3.0, multiple_of=8), collate_packed, collate_jagged],
)
def test_a_batch_arrives_as_it_was_collated(ds: Features, collate_fn: Any) -> None:
    rows = [ds[i] for i in (3, 9, 4)]
    ring = BatchRing(1, 2, SLOT_BYTES)
    slot = ring.slot(0)
    assert slot is not None
    inside = collate_fn(rows, allocate=slot.empty)
    value = slot.sent(inside)
    assert slot._used < 1.05 * sum(t.nbytes for t in tensors(inside)) + 1024
    got, wanted = pickle.loads(pickle.dumps(value)), collate_fn(rows)
    assert (got.row_ids, got.extra["text"]) == (wanted.row_ids, wanted.extra["text"])
    assert torch.equal(got.extra["label"], wanted.extra["label"]) and got.label is None
    assert list(got.extra) == list(wanted.extra)
    for name, tensor in flat(wanted).items():
        assert torch.equal(flat(got)[name], tensor), name
    padded = got.features["modulation"]
    if hasattr(padded, "mask"):
        assert torch.equal(padded.values, wanted.features["modulation"].values)
    assert len(pickle.dumps(value)) < 3000


def test_a_slot_is_free_when_the_last_tensor_on_it_is_gone(ds: Features) -> None:
    ring = BatchRing(1, 2, SLOT_BYTES)
    assert states(ring) == [FREE, FREE]
    first = sent(ring, [ds[1]])
    assert states(ring) == [TAKEN, FREE]
    second = sent(ring, [ds[2]])
    assert states(ring) == [TAKEN, TAKEN]
    kept = first.features["modulation"].values[0, 2:5]
    copy = kept.clone()
    del first
    assert states(ring) == [TAKEN, TAKEN]  # a view is enough to hold it
    third = sent(ring, [ds[3], ds[5]])  # no slot is free: torch's way
    assert third.indices.tolist() == [3, 5]
    assert torch.equal(kept, copy)
    del kept
    assert states(ring) == [FREE, TAKEN]
    fourth = sent(ring, [ds[4]])
    assert states(ring) == [TAKEN, TAKEN]
    assert (second.indices.tolist(), fourth.indices.tolist()) == ([2], [4])


def test_what_has_no_room_or_is_no_batch_goes_torchs_way(ds: Features) -> None:
    small = BatchRing(1, 2, 4096)
    batch = sent(small, [ds[n] for n in range(N_ROWS)])
    assert batch.indices.tolist() == list(range(N_ROWS))
    assert states(small) == [FREE, FREE]
    ring = BatchRing(1, 2, SLOT_BYTES)
    assert sent(ring, [ds[0]], lambda rows: [row.index for row in rows]) == [0]
    assert states(ring) == [FREE, FREE]


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 4096], ids=["no batch", "half fits"])
def test_what_goes_torchs_way_holds_nothing_of_a_slot(ds: Features, slot_bytes: int) -> None:
    """It is pickled later, by another thread, when the next batch may be in the slot already."""
    ring = BatchRing(1, 1, slot_bytes)
    as_dict = slot_bytes == SLOT_BYTES
    rows = [ds[3], ds[9], ds[4]]
    batches = _Batches(None, (lambda r: flat(collate(r))) if as_dict else collate)  # type: ignore[arg-type]
    batches.ring = ring
    made = batches._sent(ring.slot(0), rows, not as_dict)
    inside = ring.bytes_of(0)
    low, high = inside.ctypes.data, inside.ctypes.data + len(inside)
    for tensor in (made if as_dict else flat(made)).values():
        assert not low <= tensor.data_ptr() < high
    assert (batches.ring is None) == as_dict
    inside[:] = 255
    wanted = flat(collate(rows))
    for name, tensor in (made if as_dict else flat(made)).items():
        assert torch.equal(tensor, wanted[name])


@forks
def test_a_fork_that_forgets_a_batch_frees_no_slot_of_its_parent(ds: Features) -> None:
    ring = BatchRing(1, 2, SLOT_BYTES)
    batch = sent(ring, [ds[1]])
    child = os.fork()
    if child == 0:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert states(ring) == [TAKEN, FREE]
    del batch
    assert states(ring) == [FREE, FREE]


def test_the_ring_outlives_its_owner_while_a_batch_is_held(ds: Features) -> None:
    ring = BatchRing(1, 2, SLOT_BYTES)
    batch = sent(ring, [ds[7]])
    del ring
    assert torch.equal(
        batch.features["modulation"].values[0], collate([ds[7]]).features["modulation"].values[0]
    )


def test_a_ring_travels_to_a_spawned_worker() -> None:
    """By its descriptor, as `spawn` pickles it: the same memory, not a copy."""
    ring = BatchRing(2, 2, 4096)
    there = pickle.loads(reduction.ForkingPickler.dumps(ring))
    resource_sharer.stop()  # type: ignore[attr-defined]
    there.bytes_of(3)[:4] = [1, 2, 3, 4]
    there.take(3)
    assert ring.bytes_of(3)[:4].tolist() == [1, 2, 3, 4]
    assert states(ring, 4) == [FREE, FREE, FREE, TAKEN]


@forks
@pytest.mark.parametrize("room", [True, False], ids=["ring", "torch"])
def test_the_loop_may_keep_every_batch(
    ds: Features, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More batches are held than there are slots: none is written over. Without shared memory of
    its own the loader gives the same."""
    monkeypatch.setattr("earmill.pipeline.loader.feature_loader.can_share", lambda: room)
    make = partial(ds.iterable, seed=1, batch_size=2)
    wanted = list(FeatureLoader(make()))
    loader = FeatureLoader(make(), num_workers=2, prefetch_factor=1)
    got = list(loader)
    assert (loader._batches.ring is not None) == room
    assert len(got) == len(wanted) == 13
    for one, other in zip(got, wanted, strict=True):
        for name, tensor in flat(other).items():
            assert torch.equal(flat(one)[name], tensor)


@forks
def test_an_epoch_that_is_left_early_loses_no_slot(ds: Features) -> None:
    loader = FeatureLoader(
        ds.iterable(seed=1, batch_size=2), num_workers=1, persistent_workers=True
    )
    for _ in range(4):
        batches = iter(loader)
        next(batches)
        del batches
    assert sum(len(batch) for batch in loader) == N_ROWS
    ring = loader._batches.ring
    assert ring is not None
    assert np.count_nonzero(ring._memory[:6]) <= 1
    del loader


def test_pinned_memory_is_that_of_every_tensor(
    ds: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the DataLoader's own thread pins what arrives; a device is not needed to see which."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    ring = BatchRing(1, 2, SLOT_BYTES)
    batch = sent(ring, [ds[3], ds[4]])
    moved = pin_memory(batch)
    assert isinstance(moved, Batch)
    assert {id(part) for part in tensors(moved)} == {id(part) for part in pinned}
    for name, tensor in flat(batch).items():
        assert torch.equal(flat(moved)[name], tensor)
    del batch, tensor
    assert states(ring) == [FREE, FREE]  # the slot is not held by the copy


def test_options_that_the_stream_decides_are_refused(ds: Features) -> None:
    stream = ds.iterable(batch_size=2)
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):
        with pytest.raises(TypeError, match=f"{name} is not an option of FeatureLoader"):
            FeatureLoader(stream, **{name: True})
    with pytest.raises(TypeError, match="num_workers must be a whole number, got '2'"):
        FeatureLoader(stream, num_workers="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers must be 0 or more, got -1"):
        FeatureLoader(stream, num_workers=-1)
    with pytest.raises(TypeError, match="collate_fn must be a function of a list of rows"):
        FeatureLoader(stream, collate_fn="padded")  # type: ignore[arg-type]
