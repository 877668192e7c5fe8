"""Weighted mixing: shares, passes over each set, and one order for all ranks and workers."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill import Crop, FeatureLoader, Features, collate, mix, open_features
from tests.pipeline.reader_data import forks, ids, loaded, write_set
from tests.short import drawn

SIZES = (12, 5, 8)
quick = drawn(40, derandomize=True)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Features]:
    root = tmp_path_factory.mktemp("mixing")
    for n_rows in SIZES:
        write_set(root / str(n_rows), n_rows=n_rows, rows_per_shard=4, formats=("parquet",))
    return [open_features(root / str(n_rows)) for n_rows in SIZES]


def planned(stream: Any) -> list[int]:
    """Row numbers of an epoch on this rank, without reading."""
    rows: list[int] = stream.left().rows.tolist()
    return rows


def test_every_set_has_the_share_of_its_weight(sets: list[Features]) -> None:
    mixed = mix(sets, [6, 3, 1], draws=40)
    assert (mixed.draws, mixed.counts, sum(mixed.counts)) == (40, (24, 12, 4), 40)
    seen = Counter(row.set for row in mixed.iterable(seed=1))
    assert seen == {0: 24, 1: 12, 2: 4}
    assert mix(sets, [1, 1, 1]).draws == sum(SIZES)


@quick
@given(
    weights=st.lists(st.floats(0.01, 50), min_size=3, max_size=3),
    draws=st.integers(1, 60),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_a_set_is_gone_through_before_it_begins_again(
    sets: list[Features], weights: list[float], draws: int, epochs: int, shuffle: bool
) -> None:
    """Over any number of epochs, rows of one set differ by one draw at most; counts are exact."""
    mixed = mix(sets, weights, draws=draws)
    stream = mixed.iterable(seed=3, shuffle=shuffle)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        rows = planned(stream)
        assert len(rows) == draws
        seen.update(rows)
    first = 0
    for n_rows, count, weight in zip(SIZES, mixed.counts, mixed.weights, strict=True):
        drawn = [seen[first + k] for k in range(n_rows)]
        assert sum(drawn) == epochs * count
        assert max(drawn) - min(drawn) <= 1
        assert abs(count - weight * draws) < 1
        first += n_rows


def test_any_stretch_longer_than_a_window_holds_the_shares(sets: list[Features]) -> None:
    mixed = mix(sets, [6, 3, 1], draws=400)
    stream = mixed.iterable(seed=1, lanes=1, window_rows=20)
    which = np.searchsorted(np.cumsum(SIZES), planned(stream), side="right")
    for first in range(0, 400, 20):
        shares = np.bincount(which[first : first + 20], minlength=3)
        assert abs(shares - [12, 6, 2]).max() <= 2


@quick
@given(
    world=st.integers(1, 4),
    even=st.sampled_from([False, "pad", "drop"]),
    budget=st.booleans(),
    draws=st.integers(1, 70),
)
def test_ranks_draw_the_epoch_together(
    sets: list[Features], world: int, even: Any, budget: bool, draws: int
) -> None:
    chosen: dict[str, Any] = {"batch_frames": 300} if budget else {"batch_size": 3}
    make = partial(mix(sets, [5, 2, 3], draws=draws).iterable, seed=2, even=even, **chosen)
    whole = Counter(planned(make()))
    streams = [make(rank=rank, world_size=world) for rank in range(world)]
    seen = Counter(n for stream in streams for n in planned(stream))
    if even is False:
        assert seen == whole
    else:
        assert len({stream.n_batches for stream in streams}) == 1
        assert not (whole - seen if even == "pad" else seen - whole)


@quick
@given(k=st.integers(0, 10), world=st.integers(1, 2), budget=st.booleans())
def test_a_mixture_resumes(sets: list[Features], k: int, world: int, budget: bool) -> None:
    """From any batch on, by a few numbers, with and without a budget."""
    chosen: dict[str, Any] = {"batch_frames": 300} if budget else {"batch_size": 4}
    make = partial(
        mix(sets, [5, 2, 3], draws=30).iterable, seed=2, rank=0, world_size=world, **chosen
    )
    whole = planned(make())
    stopped = make()
    batches = iter(stopped)
    k = min(k, stopped.n_batches - 1)
    seen = ids(next(batches) for _ in range(k))
    assert seen == whole[: len(seen)]
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert planned(resumed) == whole[len(seen) :]


@forks
def test_workers_that_stay_resume_with_crops_of_a_mixture(sets: list[Features]) -> None:
    """All of it at once: budget, crops, two workers over epochs, a stop and a resume."""
    make = partial(
        mix(sets, [5, 2, 3], draws=30).iterable, seed=2, batch_frames=120, crop=Crop(0.2)
    )

    def run(loader: FeatureLoader, epochs: range) -> list[Any]:
        found = []
        for epoch in epochs:
            loader.set_epoch(epoch)
            found += [(b.indices.tolist(), b.sets.tolist(), b.start_s.tolist()) for b in loader]
        return found

    whole = run(FeatureLoader(make()), range(2))
    loader = FeatureLoader(make(), num_workers=2, persistent_workers=True)
    assert run(loader, range(2)) == whole
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    del loader, batches
    resumed = FeatureLoader(make(), num_workers=2)
    resumed.load_state_dict(state)
    assert run(resumed, range(2)) == whole[2:]


def test_crops_differ_from_pass_to_pass(sets: list[Features]) -> None:
    """A row that is drawn ten times in an epoch is cut ten times anew."""
    mixed = mix(sets[1:2], [1], draws=50)
    starts: dict[int, set[float]] = {}
    for row in mixed.iterable(seed=1, crop=Crop(0.1)):
        starts.setdefault(row.index, set()).add(row.start_s)
    assert max(map(len, starts.values())) > 5


def test_an_even_prefix_is_taken_over_by_another_world(sets: list[Features]) -> None:
    make = partial(mix(sets, [5, 2, 3], draws=40).iterable, seed=2, batch_frames=300)
    streams = [make(rank=rank, world_size=2) for rank in range(2)]
    seen: list[int] = []
    states = []
    for stream in streams:
        batches = iter(FeatureLoader(stream, collate_fn=ids))
        seen += next(batches) + next(batches)
        states.append(stream.state_dict())
    assert states[0] == states[1]
    for rank in range(3):
        stream = make(rank=rank, world_size=3)
        stream.load_state_dict(states[rank % 2])
        seen += planned(stream)
    assert Counter(seen) == Counter(planned(make()))
    # A release in which a stream gave rows could stop inside of a batch.
    inside = states[0] | {"within": 1}
    with pytest.raises(ValueError, match="does not end a whole step of a batch per rank"):
        make(rank=0, world_size=3).load_state_dict(inside)


def test_the_set_of_each_row_is_in_the_batch(sets: list[Features]) -> None:
    mixed = mix(sets, [1, 1, 1])
    for batch in FeatureLoader(mixed.iterable(seed=1, batch_size=5)):
        wanted = np.searchsorted(np.cumsum(SIZES), batch.indices.numpy(), side="right")
        assert batch.sets.tolist() == wanted.tolist()
    assert collate([sets[0][0]]).sets.tolist() == [0]
    assert loaded(FeatureLoader(mixed.iterable(batch_size=25)))


@pytest.mark.parametrize(
    ("weights", "draws", "error", "message"),
    [
        ([1, 1], None, ValueError, "expected 3 weights, one a set, got 2"),
        ([1, 1, 0], None, ValueError, "weights are above 0, got 0"),
        ([1, 1, float("nan")], None, ValueError, "weights are above 0, got nan"),
        ([1, 1, "2"], None, TypeError, "weights are numbers, got '2'"),
        ("abc", None, TypeError, "weights takes a list of numbers"),
        ([1, 1, 1], 0, ValueError, "draws must be at least 1, got 0"),
        ([1, 1, 1], 1.5, TypeError, "draws must be a whole number"),
    ],
)
def test_a_wrong_mixture_is_refused(
    sets: list[Features], weights: Any, draws: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mix(sets, weights, draws=draws)


def test_what_is_no_list_of_sets_is_refused(sets: list[Features], tmp_path: Path) -> None:
    for wrong in ("features", sets[0], [str(tmp_path)], None):
        with pytest.raises(TypeError, match="expected a list of opened feature sets"):
            mix(wrong, [1])  # type: ignore[arg-type]
    other = open_features(sets[0]._uri, dtype="float64")
    with pytest.raises(ValueError, match="expected sets of the same dtypes"):
        mix([sets[0], other], [1, 1])
