"""The epoch order: a permutation, pinned, shared out exactly once, and cheap to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.loader.batches import FixedBatches
from earmill.pipeline.loader.epoch_order import (
    Settings,
    block_order,
    choose_window,
    deal,
    keys,
    rank_share,
)
from tests.short import drawn

blocks_st = st.lists(st.integers(1, 9), min_size=1, max_size=30).map(
    lambda sizes: np.array(sizes, np.int64)
)
settings_st = st.builds(
    Settings,
    shuffle=st.booleans(),
    batch_rows=st.integers(1, 5),
    lanes=st.integers(1, 6),
    window_rows=st.integers(1, 20),
)
bad_even: Any = "maybe"
quick = drawn(60, derandomize=True)


def epoch_order(block_rows: np.ndarray, chosen: Settings, *, seed: int, epoch: int) -> np.ndarray:
    """The rows of shuffled blocks, dealt out as a stream of fixed batches does."""
    rows = block_order(block_rows, shuffle=chosen.shuffle, seed=seed, epoch=epoch)
    return rows[deal(len(rows), chosen, seed=seed, epoch=epoch)]


def order_of(n_blocks: int, rows: int, **changes: int) -> np.ndarray:
    chosen = {"batch_rows": 4, "lanes": 2, "window_rows": 24} | changes
    seed, epoch = chosen.pop("seed", 3), chosen.pop("epoch", 0)
    block_rows = np.full(n_blocks, rows, np.int64)
    return epoch_order(block_rows, Settings(shuffle=True, **chosen), seed=seed, epoch=epoch)


def worker_batches(
    share: np.ndarray, *, worker: int, workers: int, batch_rows: int
) -> list[np.ndarray]:
    """What one worker of a rank with this share reads, by the plan."""
    one = FixedBatches(Settings(shuffle=False, batch_rows=batch_rows, lanes=1, window_rows=1))
    plan = one.whole(share, share, seed=0, epoch=0)
    return [plan.batch(number)[0] for number in range(worker, plan.n_batches, workers)]


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 of one counter, word by word after Salmon et al. 2011, section 3.3."""
    a, b, c, d = counter
    for turn in range(10):
        k0 = (key[0] + turn * 0x9E3779B97F4A7C15) % 2**64
        k1 = (key[1] + turn * 0xBB67AE8584CAA73B) % 2**64
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (
            second >> 64 ^ b ^ k0,
            second % 2**64,
            first >> 64 ^ d ^ k1,
            first % 2**64,
        )
    return [a, b, c, d]


def test_keys_are_philox_of_seed_epoch_and_purpose() -> None:
    """The authors' known answer first (kat_vectors of Random123), then ours by it."""
    known = "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"
    assert philox((0, 0, 0, 0), (0, 0)) == [int(word, 16) for word in known.split()]
    for seed, epoch, salt in ((0, 0, 1), (7, 1, 2), (2**63 - 1, 2**63 - 1, 1)):
        expected = [w for k in (1, 2) for w in philox((k, 0, 0, salt), (seed, epoch))]
        assert keys(8, seed=seed, epoch=epoch, salt=salt).tolist() == expected


def test_order_is_pinned() -> None:
    """A changed order would break the resume of a training run started with an older version."""
    sizes = np.array([3, 2, 4, 1], np.int64)
    chosen = Settings(shuffle=True, batch_rows=2, lanes=2, window_rows=3)
    assert epoch_order(sizes, chosen, seed=7, epoch=1).tolist() == PINNED


PINNED = [6, 7, 0, 2, 5, 8, 1, 4, 9, 3]


@quick
@given(blocks_st, settings_st, st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_order_is_a_permutation(
    block_rows: np.ndarray, chosen: Settings, seed: int, epoch: int
) -> None:
    order = epoch_order(block_rows, chosen, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(block_rows.sum()))


def test_seed_and_epoch_change_the_order_and_repeat_it() -> None:
    orders = [tuple(order_of(8, 6, seed=s, epoch=e)) for s in (0, 1) for e in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert tuple(order_of(8, 6, seed=1, epoch=2)) == orders[-1]


def test_without_shuffle_the_index_order_stays() -> None:
    chosen = Settings(shuffle=False, batch_rows=3, lanes=4, window_rows=2)
    order = epoch_order(np.array([2, 3, 2], np.int64), chosen, seed=1, epoch=5)
    assert order.tolist() == list(range(7))


@quick
@given(
    blocks_st,
    settings_st,
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([False, True, "pad", "drop"]),
)
def test_ranks_and_workers_see_each_row_once(
    block_rows: np.ndarray, chosen: Settings, world: int, workers: int, even: bool | str
) -> None:
    order = epoch_order(block_rows, chosen, seed=1, epoch=0)
    shares = []
    for rank in range(world):
        split: dict[str, Any] = {
            "rank": rank,
            "world_size": world,
            "batch_rows": chosen.batch_rows,
            "even": even,
        }
        share = rank_share(order, **split)
        dealt = [
            list(worker_batches(share, worker=w, workers=workers, batch_rows=chosen.batch_rows))
            for w in range(workers)
        ]
        # The loader takes one batch of each worker in turn.
        turns = max(len(batches) for batches in dealt)
        merged = [b for t in range(turns) for batches in dealt for b in batches[t : t + 1]]
        assert np.concatenate([*merged, np.zeros(0, np.int64)]).tolist() == share.tolist()
        shares.append(share)
    counts = np.bincount(np.concatenate(shares), minlength=len(order))
    sizes = [len(share) for share in shares]
    if even is False:
        assert (counts == 1).all()
        assert max(sizes) - min(sizes) <= 1
    elif even == "drop":
        assert counts.max(initial=0) <= 1
        assert (counts == 0).sum() == len(order) % world
        assert len(set(sizes)) == 1
    else:
        n_padding = -len(order) % world
        repeated = np.bincount(np.resize(order, n_padding), minlength=len(order))
        assert (counts == 1 + repeated).all()  # from the front of the order, once each
        assert len(set(sizes)) == 1


def test_global_batches_do_not_depend_on_the_world() -> None:
    """Step for step, the ranks together see the same rows whatever the world size."""
    order = order_of(8, 6)
    for world in (1, 2, 3):
        shares = [
            rank_share(order, rank=r, world_size=world, batch_rows=4, even=False)
            for r in range(world)
        ]
        for step in range(len(order) // (4 * world)):
            seen = np.concatenate([share[step * 4 : step * 4 + 4] for share in shares])
            first = step * 4 * world
            assert seen.tolist() == order[first : first + 4 * world].tolist()


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1)])
def test_each_block_has_one_reader_when_the_split_divides_the_lanes(
    world: int, workers: int
) -> None:
    """64 blocks of 8 rows in 4 lanes: only a block cut by a lane boundary may have two readers."""
    order = order_of(64, 8, lanes=4, window_rows=32)
    readers: dict[int, set[tuple[int, int]]] = {}
    for rank in range(world):
        share = rank_share(order, rank=rank, world_size=world, batch_rows=4, even=False)
        for worker in range(workers):
            for rows in worker_batches(share, worker=worker, workers=workers, batch_rows=4):
                for block in rows // 8:
                    readers.setdefault(int(block), set()).add((rank, worker))
    assert sum(len(who) for who in readers.values()) <= 64 + 3


def test_rows_stay_inside_their_window() -> None:
    """One lane, windows of 3 blocks: each run of 24 rows holds exactly 3 whole blocks, mixed."""
    order = order_of(12, 8, lanes=1, window_rows=24)
    for first in range(0, 96, 24):
        blocks, counts = np.unique(order[first : first + 24] // 8, return_counts=True)
        assert counts.tolist() == [8, 8, 8]
        assert order[first : first + 8].tolist() != sorted(order[first : first + 8].tolist())
        assert len(blocks) == 3


def test_whole_shuffle_is_uniform() -> None:
    """Mean position of each row over 400 epochs of a full shuffle: 19.5 within 5 sigma."""
    rows = 40
    chosen = {"lanes": 1, "window_rows": rows, "batch_rows": 1}
    positions = np.stack([np.argsort(order_of(8, 5, epoch=e, **chosen)) for e in range(400)])
    sigma = np.sqrt((rows**2 - 1) / 12 / 400)
    assert np.abs(positions.mean(0) - (rows - 1) / 2).max() < 5 * sigma


@quick
@given(
    blocks_st,
    settings_st,
    st.integers(1, 4),
    st.integers(0, 200),
    st.sampled_from([False, "pad", "drop"]),
)
def test_resume_is_the_tail(
    block_rows: np.ndarray, chosen: Settings, world: int, position: int, even: bool | str
) -> None:
    """Splitting what is left after whole steps gives what the first split had left."""
    order = epoch_order(block_rows, chosen, seed=5, epoch=2)
    steps = min(position, len(order) // (world * chosen.batch_rows))
    start = steps * world * chosen.batch_rows
    for rank in range(world):
        split: dict[str, Any] = {
            "rank": rank,
            "world_size": world,
            "batch_rows": chosen.batch_rows,
            "even": even,
        }
        whole, rest = rank_share(order, **split), rank_share(order, **split, start=start)
        assert rest.tolist() == whole[steps * chosen.batch_rows :].tolist()


def test_choose_window_shuffles_a_small_set_whole_and_bounds_a_large_one() -> None:
    blocks = np.full(100, 10, np.int64)
    assert choose_window(blocks, total_bytes=1000, window_bytes=1000) == {
        "lanes": 1,
        "window_rows": 1000,
    }
    large = choose_window(blocks, total_bytes=100_000, window_bytes=16_000)
    assert large == {"lanes": 8, "window_rows": 20}
    # A budget of three blocks: one lane, and its window is the budget.
    assert choose_window(blocks, total_bytes=100_000, window_bytes=3000) == {
        "lanes": 1,
        "window_rows": 30,
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: order_of(2, 2, seed=-1), "seed must be an integer from 0"),
        (lambda: order_of(2, 2, epoch=2**63), "epoch must be an integer from 0"),
        (lambda: order_of(2, 2, lanes=0), "lanes must be at least 1, got 0"),
        (
            lambda: rank_share(np.arange(3), rank=2, world_size=2, batch_rows=1, even=False),
            "rank must be from 0 to world_size - 1 = 1, got 2",
        ),
        (
            lambda: rank_share(np.arange(3), rank=0, world_size=0, batch_rows=1, even=False),
            "world_size must be at least 1, got 0",
        ),
        (
            lambda: rank_share(np.arange(3), rank=0, world_size=2, batch_rows=1, even=bad_even),
            "even must be False, True",
        ),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call()  # type: ignore[operator]
