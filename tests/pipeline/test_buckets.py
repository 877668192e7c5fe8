"""Batches under a budget: each row once, never above it, little padding, and cheap to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill import Crop, FeatureLoader, Features, open_features
from earmill.pipeline.loader.batches import BucketedBatches, EpochPlan, FixedBatches, _fewer_lanes
from earmill.pipeline.loader.epoch_order import Settings, block_order
from tests.pipeline.reader_data import LOADED_ROWS as N_ROWS
from tests.pipeline.reader_data import mixed_seconds, no_read_ahead, small_row_groups, write_set
from tests.short import drawn

__all__ = ["no_read_ahead"]
quick = drawn(60, derandomize=True)
lengths_st = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.int64)
)
evens_st = st.sampled_from([False, True, "pad", "drop"])


def make(lengths: np.ndarray, **changes: Any) -> BucketedBatches:
    chosen = {"shuffle": True, "batch_rows": 1, "lanes": 3, "window_rows": 12} | changes
    budget, max_rows = chosen.pop("budget", 90), chosen.pop("max_rows", None)
    return BucketedBatches(Settings(**chosen), lengths, budget, max_rows, "batch_frames")


def whole(batching: BucketedBatches, *, seed: int = 3, epoch: int = 0) -> EpochPlan:
    blocks = np.full(len(batching.lengths), 1, np.int64)
    rows = block_order(blocks, shuffle=batching.settings.shuffle, seed=seed, epoch=epoch)
    return batching.whole(rows, np.full(len(rows), epoch), seed=seed, epoch=epoch)


def batches(plan: EpochPlan) -> list[list[int]]:
    return [plan.batch(number)[0].tolist() for number in range(plan.n_batches)]


@quick
@given(
    lengths=lengths_st,
    shuffle=st.booleans(),
    lanes=st.integers(1, 5),
    window_rows=st.integers(1, 70),
    budget=st.integers(40, 200),
    max_rows=st.sampled_from([None, 1, 3]),
    epoch=st.integers(0, 3),
)
def test_each_row_once_and_no_batch_above_its_budget(
    lengths: np.ndarray, budget: int, max_rows: int | None, epoch: int, **chosen: Any
) -> None:
    plan = whole(make(lengths, budget=budget, max_rows=max_rows, **chosen), epoch=epoch)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    for rows in batches(plan):
        assert 0 < len(rows) * lengths[rows].max() <= budget
        assert max_rows is None or len(rows) <= max_rows


@quick
@given(lengths=lengths_st, world=st.integers(1, 5), even=evens_st, start=st.integers(0, 8))
def test_ranks_share_the_batches(lengths: np.ndarray, world: int, even: Any, start: int) -> None:
    """Step t of all ranks together is the plan's batches t * world to (t + 1) * world."""
    batching = make(lengths)
    plan = whole(batching)
    start = min(start, plan.n_batches)
    shares = [
        batches(batching.share(plan, rank=r, world_size=world, even=even, start=start))
        for r in range(world)
    ]
    left = batches(plan)[start:]
    steps = [len(share) for share in shares]
    if even is False:
        assert max(steps) - min(steps) <= 1
    else:
        assert len(set(steps)) == 1
    dealt = [share[t] for t in range(max(steps)) for share in shares if t < len(share)]
    if even == "drop":
        assert dealt == left[: len(left) // world * world]
    else:
        assert dealt[: len(left)] == left
        assert all(batch in batches(plan) for batch in dealt[len(left) :])
        assert len(dealt) - len(left) < world


@quick
@given(lengths=lengths_st, data=st.data())
def test_a_place_is_batches_and_rows_of_the_next(lengths: np.ndarray, data: Any) -> None:
    batching = make(lengths)
    plan = whole(batching)
    k = data.draw(st.integers(0, len(lengths)))
    place = batching.place(plan, k)
    assert batching.row(plan, place) == k
    assert [n for batch in batches(plan.after(k)) for n in batch] == plan.rows[k:].tolist()
    assert batches(plan)[place["position"] + 1 :] == batches(plan.after(k))[1:]


def test_the_order_is_pinned() -> None:
    """A changed order would break the resume of a training run started with an older version."""
    lengths = np.array([3, 9, 4, 8, 2, 2, 7, 3, 9, 5], np.int64)
    plan = whole(make(lengths, budget=18, lanes=2, window_rows=5), seed=7, epoch=1)
    assert batches(plan) == PINNED


PINNED = [[2, 0, 4], [5], [1, 9], [8, 3], [6, 7]]


def spoken(n_rows: int) -> np.ndarray:
    """Lengths as of an utterance corpus: 1 to 16 s at 100 Hz."""
    rng = np.random.default_rng(5)
    return (100 * 2 ** rng.uniform(0, 4, n_rows)).astype(np.int64)


def test_rows_of_similar_length_leave_little_padding() -> None:
    """Against batches of a fixed number of rows of the same set in the same order."""
    lengths = spoken(4000)
    chosen = {"lanes": 4, "window_rows": 500}
    bucketed = whole(make(lengths, budget=16_000, **chosen))
    rows = block_order(np.ones(4000, np.int64), shuffle=True, seed=3, epoch=0)
    fixed = FixedBatches(Settings(shuffle=True, batch_rows=16, **chosen)).whole(
        rows, np.zeros(4000, np.int64), seed=3, epoch=0
    )
    assert bucketed.padding_share(lengths) < 0.1
    assert fixed.padding_share(lengths) > 0.4


def test_batches_are_others_in_the_next_epoch() -> None:
    """Also where the window holds the whole set, whose sorted rows are always the same."""
    batching = make(spoken(2000), budget=16_000, lanes=1, window_rows=2000)
    first, second = (whole(batching, epoch=epoch) for epoch in (0, 1))
    made = [{frozenset(batch) for batch in batches(plan)} for plan in (first, second)]
    assert len(made[0] & made[1]) < 0.1 * len(made[0])


def test_without_shuffle_neighbours_fill_the_budget() -> None:
    lengths = np.array([5, 5, 4, 1, 1, 9, 2, 2, 2], np.int64)
    plan = whole(make(lengths, shuffle=False, budget=10))
    assert batches(plan) == [[0, 1], [2, 3], [4], [5], [6, 7, 8]]


@pytest.fixture(scope="module")
def ds(seven_a_shard: Path) -> Features:
    return open_features(seven_a_shard)


def test_batches_say_how_much_of_them_is_padding(ds: Features) -> None:
    loader = FeatureLoader(ds.iterable(seed=1, batch_frames=300))
    made = list(loader)
    assert len(made) == len(loader)
    held = real = 0
    for batch in made:
        modulation = batch.features["modulation"]
        assert modulation.values[..., 0].numel() <= 300
        assert 0.0 <= batch.padding_share < 1.0
        held += modulation.values[..., 0].numel()
        real += int(modulation.lengths.sum())
    assert loader.padding_share() == pytest.approx(1 - real / held)
    assert sorted(n for batch in made for n in batch.indices.tolist()) == list(range(N_ROWS))


def test_windows_hold_batches_enough_for_rows_of_similar_length(ds: Features) -> None:
    """Where the memory for windows is small, they get fewer and larger, unless they were chosen."""
    tight: dict[str, Any] = {"window_bytes": ds.nbytes // 2}
    rows, budget = ds.iterable(**tight), ds.iterable(batch_frames=200, **tight)
    assert (rows.settings.lanes, budget.settings.lanes) == (1, 1)
    eight = {"lanes": 8, "window_rows": 2}
    assert ds.iterable(batch_frames=200, **eight).settings.lanes == 8
    assert _fewer_lanes(Settings(True, 1, 8, 39), 130.0) == Settings(True, 1, 2, 156)
    assert _fewer_lanes(Settings(True, 1, 8, 39), 39.0) == Settings(True, 1, 8, 39)


def test_a_budget_in_seconds(ds: Features) -> None:
    for batch in FeatureLoader(ds.iterable(seed=1, batch_seconds=4.5, batch_size=5)):
        assert len(batch) * float(batch.seconds.max()) <= 4.5
        assert len(batch) <= 5


def test_a_budget_counts_what_is_read_of_a_row(ds: Features) -> None:
    loader = FeatureLoader(ds.iterable(batch_frames=40, crop=Crop(0.2)))
    assert all(b.features["modulation"].values[..., 0].numel() <= 40 for b in loader)


@pytest.mark.usefixtures("no_read_ahead")
def test_a_bucketed_scan_reads_each_row_group_about_once(tmp_path: Path) -> None:
    with small_row_groups():
        write_set(tmp_path, n_rows=96, rows_per_shard=24, seconds=lambda i: 0.3 + 0.02 * (i % 20))
        ds = open_features(tmp_path, format="parquet", streams=["modulation"], cache_bytes=40_000)
        batches = ds.iterable(batch_frames=200, lanes=2, window_rows=12)
        assert sum(len(batch) for batch in batches) == 96
        assert ds.io.blocks_read <= 1.25 * len(ds.block_rows())


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"batch_frames": 0}, ValueError, "batch_frames must be at least 1, got 0"),
        ({"batch_frames": 1.5}, TypeError, "batch_frames must be a whole number"),
        ({"batch_seconds": "4"}, TypeError, "batch_seconds must be a number of seconds"),
        ({"batch_seconds": -1.0}, ValueError, "batch_seconds must be above 0"),
        ({"batch_seconds": float("nan")}, ValueError, "batch_seconds must be above 0"),
        ({"batch_seconds": 5, "batch_frames": 5}, ValueError, "expected one budget"),
        ({"batch_frames": 50}, ValueError, r"alone has 132 frames, .*allows \(50\); raise it"),
        ({"batch_seconds": 1}, ValueError, "alone has 13.* microseconds"),
        ({"batch_frames": 500, "batch_size": 0}, ValueError, "batch_rows must be at least 1"),
    ],
)
def test_a_wrong_budget_is_refused(
    ds: Features, chosen: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert max(map(mixed_seconds, range(N_ROWS))) == pytest.approx(1.32)
    with pytest.raises(error, match=message):
        ds.iterable(**chosen)
