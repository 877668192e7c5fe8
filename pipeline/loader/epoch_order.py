"""The order of rows in an epoch, and its split over ranks. Pure arithmetic, nothing is read.

The order is a function of (seed, epoch), the block sizes and the settings. Keys come from
Philox4x64-10 (Salmon, Moraes, Dror, Shaw 2011, doi:10.1145/2063384.2063405), whose raw numbers are
the same in every numpy and on every machine.

A block shuffle keeps reads cheap. For batches of B rows and S lanes:

    blocks (row groups)   b0 b1 b2 ... shuffled -> b7 b2 b9 b0 | b4 b1 b3 b8 | ...
    lanes                                          lane 0        lane 1        lane S-1
    windows               rows are shuffled inside a window of `window_rows` rows of their lane
    batches               batch 0 = B rows of lane 0, batch 1 = B rows of lane 1, ... round robin

Batch g goes to rank g % world, and there to worker (g // world) % workers. If world * workers
divides S, a lane has one reader, and about every block is read once, by one process. A batch mixes
the blocks of one window of one lane. Larger windows mix better and take more memory.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Even = Literal["pad", "drop"] | bool | None

MAX_LANES = 8
MAX_SEED = 2**63 - 1
BLOCK_SALT, ROW_SALT = 1, 2


@dataclass(frozen=True)
class Settings:
    """Everything but (seed, epoch) and the block sizes that decides an order."""

    shuffle: bool  # False keeps the index order and ignores `lanes` and `window_rows`.
    batch_rows: int
    lanes: int  # Independent sub-orders, interleaved batch by batch.
    window_rows: int  # Rows of one lane that are shuffled together.

    def __post_init__(self) -> None:
        if not isinstance(self.shuffle, bool | np.bool_):
            raise TypeError(f"shuffle must be True or False, got {self.shuffle!r}")
        for name in ("batch_rows", "lanes", "window_rows"):
            if check_whole(name, getattr(self, name)) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}; leave it out for the "
                    "default"
                )


def check_whole(name: str, value: Any) -> int:
    """Return a whole number as an int; refuse all other values, also True and False."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return operator.index(value)


def check_number(name: str, value: Any, what: str = "a number") -> float:
    """Return a number as a float; refuse all other values, also True and False."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    return float(value)


def keys(n: int, *, seed: int, epoch: int, salt: int, part: int = 0) -> NDArray[np.uint64]:
    """Return n sort keys for one purpose (salt), epoch, and set (part) of a mixture. Counters begin
    2^192 blocks apart for each purpose and 2^128 for each part, so no number is used twice."""
    words = {"key": (seed, epoch), "counter": (0, 0, part, salt)}
    return Philox(**{name: np.array(word, np.uint64) for name, word in words.items()}).random_raw(n)


def unit(drawn: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert keys to numbers in [0, 1)."""
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def check_counter(name: str, value: int) -> None:
    """Refuse a seed or epoch that the 64-bit keys cannot hold."""
    if not 0 <= check_whole(name, value) <= MAX_SEED:
        raise ValueError(f"{name} must be an integer from 0 to 2**63 - 1, got {value!r}")


def block_order(block_rows: Rows, *, shuffle: bool, seed: int, epoch: int, part: int = 0) -> Rows:
    """Return the rows of shuffled blocks, block after block; index order without `shuffle`."""
    check_counter("seed", seed)
    check_counter("epoch", epoch)
    if not shuffle:
        return np.arange(int(block_rows.sum()), dtype=np.int64)
    drawn = keys(len(block_rows), seed=seed, epoch=epoch, salt=BLOCK_SALT, part=part)
    return expand(block_rows, np.argsort(drawn, kind="stable"))


def deal(n_rows: int, settings: Settings, *, seed: int, epoch: int) -> Rows:
    """Return positions in the order of the epoch: rows shuffled in windows, lanes interleaved."""
    if not settings.shuffle or n_rows == 0:
        return np.arange(n_rows, dtype=np.int64)
    batch_rows = settings.batch_rows
    n_batches = -(-n_rows // batch_rows)
    lanes = min(settings.lanes, n_batches)
    # Start of each lane, in batches. Lanes differ by one batch. The last lane is the longest,
    # because floor((l + 1) C / S) - floor(l C / S) is ceil(C / S) for l = S - 1. The one short
    # batch is its last, hence the very last batch of the epoch.
    bounds = np.arange(lanes + 1, dtype=np.int64) * n_batches // lanes
    drawn = keys(n_rows, seed=seed, epoch=epoch, salt=ROW_SALT)
    window = windows(bounds * batch_rows, n_rows, settings.window_rows)
    shuffled = np.lexsort((drawn, window)).astype(np.int64, copy=False)
    # Batches of the lanes in round robin: batch t of lane 0, of lane 1, ...
    batch = np.arange(n_batches, dtype=np.int64)
    lane = np.searchsorted(bounds, batch, side="right") - 1
    turn = batch - bounds[lane]
    padded = np.full(n_batches * batch_rows, -1, np.int64)
    padded[:n_rows] = shuffled
    dealt = padded.reshape(-1, batch_rows)[np.lexsort((lane, turn))].reshape(-1)
    return dealt[dealt >= 0]


def expand(block_rows: Rows, blocks: Rows) -> Rows:
    """Return the rows of the blocks, block after block in the given order."""
    first = np.cumsum(block_rows) - block_rows
    sizes = block_rows[blocks]
    done = np.cumsum(sizes) - sizes
    return np.repeat(first[blocks] - done, sizes) + np.arange(sizes.sum(), dtype=np.int64)


def windows(lane_first: Rows, n_rows: int, window_rows: int) -> Rows:
    """Return the window number of each position, ascending, given the starts of lanes."""
    position = np.arange(n_rows, dtype=np.int64)
    lane = np.searchsorted(lane_first, position, side="right") - 1
    begins = (position - lane_first[lane]) % window_rows == 0
    return np.cumsum(begins)


def check_split(rank: int, world_size: int) -> None:
    """Refuse a rank outside its world."""
    if check_whole("world_size", world_size) < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= check_whole("rank", rank) < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")


def check_even(even: Even) -> Even:
    """Refuse an unknown `even` mode."""
    if even not in (None, False, True, "pad", "drop"):
        raise ValueError(f"even must be False, True (= 'pad'), 'pad' or 'drop', got {even!r}")
    return even


def rank_share(
    order: Rows, *, rank: int, world_size: int, batch_rows: int, even: Even, start: int = 0
) -> Rows:
    """Return the rows of one rank from position `start` of the order on, in order; `even` is as in
    `FeatureStream`, and None means "pad" if ranks would get different numbers of batches.

    Ranks take turns with the batches of whole steps of `world_size * batch_rows` rows. The rows
    after the last whole step are cut into `world_size` pieces that differ by one row at most.

        order[start:]   | step 0: r0 r1 .. | step 1: r0 r1 .. | ... | tail: r0 r1 .. |
    """
    check_split(rank, world_size)
    check_even(even)
    n_step = world_size * batch_rows
    n_full = (len(order) - start) // n_step * n_step
    main = order[start : start + n_full].reshape(-1, world_size, batch_rows)[:, rank].reshape(-1)
    tail = order[start + n_full :]
    excess = len(tail) % world_size
    if excess and even == "drop":
        tail = tail[: len(tail) - excess]
    elif excess and (even or (even is None and len(tail) <= world_size)):
        # np.resize repeats the order when it is shorter than the padding itself.
        tail = np.concatenate([tail, np.resize(order, world_size - excess)])
    cut = [r * len(tail) // world_size for r in (rank, rank + 1)]
    return np.concatenate([main, tail[cut[0] : cut[1]]])


def choose_window(block_rows: Rows, *, total_bytes: int, window_bytes: int) -> dict[str, Any]:
    """Choose `lanes` and `window_rows`. All open windows together fit into `window_bytes`: one
    window, or as many lanes (8, 4, 2, 1) as leave each window two blocks."""
    if not 0 < check_number("window_bytes", window_bytes, "a number of bytes") < math.inf:
        raise ValueError(f"window_bytes must be above 0, got {window_bytes!r}")
    n_rows = max(1, int(block_rows.sum()))
    if total_bytes <= window_bytes:
        return {"lanes": 1, "window_rows": n_rows}
    block_bytes = total_bytes / max(1, len(block_rows))
    lanes = MAX_LANES
    while lanes > 1 and lanes * 2 * block_bytes > window_bytes:
        lanes //= 2
    return {"lanes": lanes, "window_rows": max(1, int(window_bytes / lanes * n_rows / total_bytes))}
