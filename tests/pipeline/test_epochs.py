"""Epochs: each iteration is the next one, and a place in one is kept, whoever iterates."""

from __future__ import annotations

import json
from copy import copy
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from earmill import Crop, FeatureLoader, Features, collate, open_features
from earmill.pipeline.loader.stream import EpochPlace
from tests.pipeline.reader_data import LOADED_ROWS as N_ROWS
from tests.pipeline.reader_data import forks, ids, no_process_stays
from tests.short import only

__all__ = ["no_process_stays"]

WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2}, id="fork"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="that stay"),
]
#: Without those that start anew in each epoch, or that stay.
STAYING = [
    WORKERS[0],
    pytest.param({"num_workers": 2}, id="fork", marks=pytest.mark.long),
    WORKERS[2],
]
STARTED = [*WORKERS[:2], pytest.param(*WORKERS[2].values, id="that stay", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def ds(seven_a_shard: Path) -> Features:
    return open_features(seven_a_shard)


def orders(ds: Features, count: int, **chosen: Any) -> list[list[int]]:
    """The order of each of the first epochs, by streams of their own."""
    found = [ids(ds.iterable(epoch=epoch, **chosen)) for epoch in range(count)]
    assert len({tuple(order) for order in found}) == count
    return found


@forks
@pytest.mark.parametrize("options", WORKERS)
def test_a_loader_reads_the_next_epoch_each_time(ds: Features, options: dict[str, Any]) -> None:
    loader = FeatureLoader(ds.iterable(seed=1, batch_size=4), **options)
    for epoch, wanted in enumerate(orders(ds, 3, seed=1, batch_size=4)):
        assert loader.epoch == epoch
        for batch, place in zip(loader, range(0, N_ROWS, 4), strict=True):
            assert batch.indices.tolist() == wanted[place : place + 4]
            assert loader.epoch == epoch
    assert loader.epoch == 3
    del loader


@forks
@pytest.mark.parametrize("options", STARTED)
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "rows"])
def test_a_bare_loader_reads_the_next_epoch_each_time(
    ds: Features, options: dict[str, Any], batched: bool
) -> None:
    chosen: dict[str, Any] = {"seed": 1, **({"batch_size": 4} if batched else {})}
    bare = {"batch_size": None} if batched else {"batch_size": 4, "collate_fn": collate}
    wanted = orders(ds, 3, **chosen)
    loader: Any = DataLoader(ds.iterable(**chosen), **bare, **options)
    found = [ids(loader) for _ in range(3)]
    if batched or options.get("num_workers", 0) < 2:
        assert found == wanted
    # Workers take turns by batches of their own, so that batches of rows come in another order.
    assert [sorted(each) for each in found] == [sorted(each) for each in wanted]
    assert len({tuple(each) for each in found}) == 3
    del loader


@pytest.mark.parametrize("stay", only([True], [True, False]))
def test_spawned_workers_read_the_next_epoch_each_time(ds: Features, stay: bool) -> None:
    """Few, as a new interpreter takes seconds."""
    stream = ds.iterable(seed=1, batch_size=4)
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": stay}
    loader: Any = DataLoader(stream, batch_size=None, **options)
    assert [ids(loader), ids(loader)] == orders(ds, 2, seed=1, batch_size=4)
    del loader


@forks
@pytest.mark.parametrize("options", STAYING)
def test_crops_are_others_in_each_epoch(ds: Features, options: dict[str, Any]) -> None:
    stream = ds.iterable(seed=1, batch_size=4, crop=Crop(0.2), shuffle=False)
    loader: Any = DataLoader(stream, batch_size=None, **options)
    starts = [tuple(s for batch in loader for s in batch.start_s.tolist()) for _ in range(3)]
    assert len({*starts}) == 3
    del loader


@forks
@pytest.mark.parametrize("options", STAYING)
@pytest.mark.parametrize("taken", only([2], [2, 5]))
def test_an_epoch_that_is_left_early_is_not_read_again(
    ds: Features, options: dict[str, Any], taken: int
) -> None:
    """A limit of batches an epoch must not train on the same batches each time. The next epoch is
    another in every process, however far workers have read ahead."""
    wanted = orders(ds, 3, seed=1, batch_size=4)
    for bare in (True, False):
        stream = ds.iterable(seed=1, batch_size=4)
        loader: Any = (
            DataLoader(stream, batch_size=None, **options)
            if bare
            else FeatureLoader(stream, **options)
        )
        for order in wanted:
            assert ids(islice(loader, taken)) == order[: 4 * taken]
        del loader


@forks
@pytest.mark.parametrize("options", STARTED)
def test_a_loader_that_never_asks_for_more_than_there_is_ends_its_epoch(
    ds: Features, options: dict[str, Any]
) -> None:
    """Lightning stops at the length of a loader, and keeps the iterator until the next epoch."""
    loader = FeatureLoader(ds.iterable(seed=1, batch_frames=300), **options)
    for epoch in range(3):
        count = len(loader)
        wanted = [*FeatureLoader(ds.iterable(seed=1, batch_frames=300, epoch=epoch))]
        batches = iter(loader)
        assert ids(next(batches) for _ in range(count)) == ids(wanted)
    del loader, batches


@forks
@pytest.mark.parametrize("options", STAYING)
def test_an_epoch_that_is_set_wins(ds: Features, options: dict[str, Any]) -> None:
    wanted = orders(ds, 6, seed=1, batch_size=4)
    for bare in (True, False):
        stream = ds.iterable(seed=1, batch_size=4)
        loader: Any = (
            DataLoader(stream, batch_size=None, **options)
            if bare
            else FeatureLoader(stream, **options)
        )
        for epoch in (4, 2, 2, 0):
            stream.set_epoch(epoch)
            assert ids(loader) == wanted[epoch]
        assert ids(loader) == wanted[1]
        for epoch in range(2, 4):  # as a loop does that counts epochs itself
            stream.set_epoch(epoch)
            assert ids(loader) == wanted[epoch]
        del loader


@forks
def test_workers_agree_although_a_script_seeds_torch_before_each_epoch(ds: Features) -> None:
    loader: Any = DataLoader(ds.iterable(seed=1, batch_size=4), batch_size=None, num_workers=2)
    for wanted in orders(ds, 3, seed=1, batch_size=4):
        torch.manual_seed(7)
        assert ids(loader) == wanted


@pytest.mark.parametrize("stay", [False, True])
def test_workers_agree_on_an_epoch_in_whatever_order_they_begin(stay: bool) -> None:
    """One by one, the others long done: each finds its own iteration, left early or not."""
    place = EpochPlace(0)
    place.set(5, 2, 1)
    places = [copy(place) for _ in range(3)]
    seeds = (11,) * 5 if stay else (11, 99, 99, 4, 7)  # 99: a script seeds torch before each epoch
    orders = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 1, 2) if stay else (1,), (2, 1, 0))
    for iteration, (seed, order) in enumerate(zip(seeds, orders, strict=True)):
        places = places if stay else [copy(place) for _ in range(3)]
        for worker in order:
            begun = places[worker].join(worker, seed + worker, 3)
            assert begun[:3] == ((5 + iteration, 0, 0) if iteration else (5, 2, 1))


@forks
@pytest.mark.parametrize("options", STARTED)
@pytest.mark.parametrize(
    "batched", [True, pytest.param(False, marks=pytest.mark.long)], ids=["batches", "rows"]
)
@pytest.mark.parametrize("positions", only(["some"], ["some", "many"]))
def test_a_stateful_loader_goes_on_where_it_stood(
    ds: Features, options: dict[str, Any], batched: bool, positions: str
) -> None:
    """Inside of an epoch, at its end, and through the epoch after it, in a new loader."""
    chosen: dict[str, Any] = {"seed": 3, **({"batch_size": 5} if batched else {})}
    bare: dict[str, Any] = (
        {"batch_size": None} if batched else {"batch_size": 5, "collate_fn": collate}
    )

    def make() -> Any:
        return StatefulDataLoader(ds.iterable(**chosen), **bare, **options)

    # Batches come in the order of a stream without workers, batches of rows do not.
    whole = make()
    each = (ds.iterable(epoch=epoch, **chosen) if batched else whole for epoch in range(3))
    wanted = [[batch.indices.tolist() for batch in epoch] for epoch in each]
    del whole
    few = [(0, 2), (0, len(wanted[0])), (1, 3)]
    for epoch, steps in few if positions == "some" else [(0, 0), *few, (0, 5)]:
        stopped = make()
        for _ in range(epoch):
            for _ in stopped:
                pass
        batches = iter(stopped)
        for _ in range(steps):
            next(batches)
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        rest = [batch.indices.tolist() for batch in resumed]
        if steps == len(wanted[0]) and batched and not options:
            # Nothing is left: a stream that was iterated in this process begins its next epoch.
            assert rest == wanted[1]
            continue
        assert rest == wanted[epoch][steps:]
        assert [batch.indices.tolist() for batch in resumed] == wanted[epoch + 1]
        del stopped, resumed, batches


@forks
def test_a_finished_epoch_is_not_gone_on_with(ds: Features) -> None:
    for options in ({}, {"num_workers": 2}):
        loader: Any = StatefulDataLoader(
            ds.iterable(seed=3, batch_size=5), batch_size=None, **options
        )
        assert ids(loader) == orders(ds, 1, seed=3, batch_size=5)[0]
        resumed: Any = StatefulDataLoader(
            ds.iterable(seed=3, batch_size=5), batch_size=None, **options
        )
        resumed.load_state_dict(loader.state_dict())
        assert ids(resumed) == orders(ds, 2, seed=3, batch_size=5)[1]


def test_the_state_of_a_worker_fits_no_other(ds: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(worker: int, workers: int) -> None:
        info = SimpleNamespace(id=worker, num_workers=workers, seed=worker)
        monkeypatch.setattr("earmill.pipeline.loader.stream.get_worker_info", lambda: info)

    inside(1, 2)
    stream = ds.iterable(seed=1, batch_size=4)
    next(iter(stream))
    state = stream.state_dict()
    ds.iterable(seed=1, batch_size=4).load_state_dict(state)
    for worker, workers in ((0, 2), (1, 3)):
        inside(worker, workers)
        with pytest.raises(ValueError, match="same number of workers and ranks"):
            ds.iterable(seed=1, batch_size=4).load_state_dict(state)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="got that of one worker of a DataLoader"):
        ds.iterable(seed=1, batch_size=4).load_state_dict(state)


def test_the_length_is_that_of_what_iterating_gives(ds: Features) -> None:
    rows, batches = ds.iterable(seed=1), ds.iterable(seed=1, batch_frames=300)
    assert len(rows) == len(list(rows)) == N_ROWS
    assert len(batches) == len(list(batches)) == batches.n_batches != N_ROWS
    loader: Any = DataLoader(ds.iterable(seed=1, batch_size=4), batch_size=None)
    assert len(loader) == 7
