"""Stopping and going on: what a resumed stream gives is exactly what the first had left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from earmill import FeatureLoader, FeatureStream, open_features
from tests.pipeline.reader_data import (
    GROUPED_ROWS,
    forks,
    ids,
    loaded,
    no_process_stays,
    no_read_ahead,
    small_row_groups,
)
from tests.pipeline.reader_data import LOADED_ROWS as N_ROWS
from tests.short import drawn

__all__ = ["no_process_stays", "no_read_ahead"]
quick = drawn(20, derandomize=True)


@pytest.fixture(scope="module")
def small(seven_a_shard: Path) -> Path:
    return seven_a_shard


@pytest.fixture(scope="module")
def grouped(forty_groups: Path) -> Iterator[Path]:
    """The set of 40 row groups; the sinks' sizes stay scaled down for the reader."""
    with small_row_groups():
        yield forty_groups


@quick
@given(
    k=st.integers(0, N_ROWS),
    world=st.integers(1, 3),
    batch_size=st.none() | st.integers(1, 5),
    even=st.sampled_from([False, True, "drop"]),
    shuffle=st.booleans(),
)
def test_resume_at_k_is_the_tail(
    small: Path, k: int, world: int, batch_size: int | None, even: Any, shuffle: bool
) -> None:
    """Stop after any number of rows or batches: the rest is the rest of an undisturbed run."""
    ds = open_features(small)
    for rank in range(world):
        make = partial(
            ds.iterable,
            seed=5,
            epoch=1,
            rank=rank,
            world_size=world,
            batch_size=batch_size,
            even=even,
            shuffle=shuffle,
        )
        whole = ids(make())
        stopped = make()
        items = iter(stopped)
        k = min(k, len(stopped))
        seen = ids(next(items) for _ in range(k))
        assert seen == whole[: len(seen)]
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        if len(seen) == len(whole):
            assert resumed.epoch == 2
            continue
        resumed.set_epoch(1)
        assert ids(resumed) == whole[len(seen) :]
        assert resumed.state_dict()["epoch"] == 2
        resumed.set_epoch(2)
        assert len(ids(resumed)) == len(whole)


@pytest.mark.usefixtures("no_read_ahead")
def test_resume_reads_nothing_of_what_came_before(grouped: Path) -> None:
    stopped = open_features(grouped).iterable(seed=1, lanes=1, window_rows=8)
    rows = iter(stopped)
    for _ in range(GROUPED_ROWS - 8):
        next(rows)
    ds = open_features(grouped, format="parquet", streams=["modulation"])
    resumed = ds.iterable(seed=1, lanes=1, window_rows=8)
    resumed.load_state_dict(stopped.state_dict())
    assert len(ids(resumed)) == 8
    assert ds.io.blocks_read == 2  # one window of two row groups


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_batches_not_prefetched_rows(grouped: Path, workers: int) -> None:
    """Workers are far ahead when the loop stops; the state is what the loop has seen."""
    ds = open_features(grouped)
    make = partial(ds.iterable, seed=8, batch_size=16, lanes=2, window_rows=16)
    whole = loaded(FeatureLoader(make()))
    loader = FeatureLoader(make(), num_workers=workers)
    batches: Any = iter(loader)
    seen = [next(batches).indices.tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()
    resumed = FeatureLoader(make(), num_workers=workers)
    resumed.load_state_dict(state)
    assert seen + loaded(resumed) == whole
    # The epoch is over: state and next iteration are those of the next one.
    assert resumed.state_dict()["epoch"] == 1
    resumed.set_epoch(1)
    again = make()
    again.set_epoch(1)
    assert loaded(resumed) == loaded(FeatureLoader(again)) != whole


def test_a_look_at_the_first_row_costs_nothing(small: Path) -> None:
    """A resume point holds until more of its epoch is read."""
    ds = open_features(small)
    epochs = [ids(ds.iterable(seed=1, epoch=epoch)) for epoch in range(2)]
    stream = ds.iterable(seed=1)
    next(iter(stream))
    assert stream.epoch == 0
    assert ids(stream) == epochs[0]
    stream.set_epoch(0)
    rows = iter(stream)
    for _ in range(10):
        next(rows)
    resumed = ds.iterable(seed=1)
    resumed.load_state_dict(stream.state_dict())
    next(iter(resumed))
    assert ids(resumed) == epochs[0][10:]
    assert ids(resumed) == epochs[1]


@forks
def test_workers_that_stay_see_the_next_epoch(small: Path) -> None:
    stream = open_features(small).iterable(seed=6, batch_size=4)
    loader = FeatureLoader(stream, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([number for batch in loaded(loader) for number in batch])
    assert epochs == [
        ids(open_features(small).iterable(seed=6, batch_size=4, epoch=e)) for e in range(3)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    del loader


@quick
@given(steps=st.integers(0, 6), old=st.integers(1, 4), new=st.integers(1, 4))
def test_another_world_size_takes_over_between_steps(
    small: Path, steps: int, old: int, new: int
) -> None:
    """What the old ranks have had and what the new ones get is each row exactly once."""
    ds = open_features(small)
    make = partial(ds.iterable, seed=9, batch_size=2)
    steps = min(steps, N_ROWS // (2 * old))
    seen: list[int] = []
    states = []
    for rank in range(old):
        stream = make(rank=rank, world_size=old)
        batches = iter(stream)
        seen += ids(next(batches) for _ in range(steps))
        states.append(stream.state_dict())
    if any(state["epoch"] for state in states):
        return  # the old world had finished the epoch
    assert all(state == states[0] for state in states)
    for rank in range(new):
        stream = make(rank=rank, world_size=new)
        stream.load_state_dict(states[0])
        seen += ids(stream)
    assert Counter(seen) == Counter(range(N_ROWS))


def test_a_state_that_does_not_fit_is_refused(small: Path, grouped: Path) -> None:
    ds = open_features(small)
    make: dict[str, Any] = {"seed": 1, "rank": 0, "world_size": 2, "batch_size": 4}
    stream = ds.iterable(**make)
    next(iter(stream))
    state = stream.state_dict()
    cases: list[tuple[FeatureStream, str]] = [
        (ds.iterable(**make | {"seed": 2}), "seed=1, this stream has 2"),
        (ds.iterable(**make | {"batch_size": 5}), "batch_size=4"),
        (ds.iterable(**make, shuffle=False), "shuffle=True"),
        (ds.iterable(**make, even=True), "even=False"),
        (open_features(grouped).iterable(**make), "same dataset"),
    ]
    # A release in which a stream gave rows could stop inside of a batch.
    with pytest.raises(ValueError, match="does not end a whole step of 4 rows"):
        ds.iterable(**make | {"world_size": 3}).load_state_dict(state | {"position": 1})
    for other, message in cases:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    for version in (1, 3):  # version 1 drew without Philox
        with pytest.raises(ValueError, match=f"version 2, got {version}.* anew: set_epoch.0."):
            stream.load_state_dict(state | {"version": version})


def test_a_state_of_batches_by_other_streams_is_refused(small: Path) -> None:
    """The frames of the streams that are read decide the batches."""
    fast, slow = (
        open_features(small, streams=[name]).iterable(seed=1, batch_frames=400)
        for name in ("modulation", "loudness")
    )
    with pytest.raises(ValueError, match="lengths="):
        slow.load_state_dict(fast.state_dict())
    fast.load_state_dict(fast.state_dict())


def test_a_loader_out_of_order_is_refused(small: Path) -> None:
    with pytest.raises(ValueError, match="in_order=False would make positions meaningless"):
        FeatureLoader(open_features(small).iterable(), in_order=False)


@forks
def test_a_bare_loader_with_workers_resumes_but_says_no_position(small: Path) -> None:
    """Workers read ahead of what is handed out, so a position would skip rows or repeat all."""

    def make() -> FeatureStream:
        return open_features(small).iterable(seed=3, batch_size=4)

    whole = ids(make())
    stream = make()
    batches = iter(DataLoader(stream, batch_size=None, num_workers=2))
    next(batches)
    with pytest.raises(RuntimeError, match="FeatureLoader"):
        stream.state_dict()
    rest = list(batches)
    assert rest
    with pytest.raises(RuntimeError, match="FeatureLoader"):
        stream.state_dict()
    stream.set_epoch(1)
    assert stream.state_dict()["epoch"] == 1 and stream.state_dict()["position"] == 0

    counted = FeatureLoader(make(), num_workers=2)
    batches = iter(counted)
    taken = next(batches).indices.tolist() + next(batches).indices.tolist()
    state = counted.state_dict()
    batches.close()
    resumed = make()
    resumed.load_state_dict(state)
    left = DataLoader(resumed, batch_size=None, num_workers=2)
    assert taken + ids(left) == whole
