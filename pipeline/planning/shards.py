"""Shards of a plan: rows that are processed and committed together, and where they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from earmill.pipeline.sources.base import Item

# For rows of which nothing is known before they are read.
UNKNOWN_SECONDS = 10.0
# How many shards' worth of rows that are fetched in one piece stay together.
BLOCK_SHARDS = 8


@dataclass(frozen=True)
class Shard:
    """Rows that are processed and committed together.

    Args:
        shard_id: Five digits or more, in plan order.
        items: Its rows, in order. `planning.parts.StoredShard` reads them when they are needed.
    """

    shard_id: str
    items: tuple[Item, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.items)

    @property
    def seconds(self) -> float:
        """Expected audio in the shard."""
        return sum(item_seconds(item) for item in self.items)


def item_seconds(item: Item) -> float:
    """Estimated seconds of a row, with a fixed guess where nothing is known."""
    return UNKNOWN_SECONDS if item.seconds is None else max(0.0, item.seconds)


def cut(items: Iterable[Item], shard_seconds: float, shard_rows: int) -> Iterator[list[Item]]:
    """Groups of neighbours of at most `shard_seconds` and `shard_rows`, but at least one row.

    Rows of one block share a group, also where it gets up to `BLOCK_SHARDS` times as long by that.
    """
    group: list[Item] = []
    total = 0.0
    for unit in _units(items, shard_seconds * BLOCK_SHARDS, shard_rows):
        seconds = sum(map(item_seconds, unit))
        if group and (total + seconds > shard_seconds or len(group) + len(unit) > shard_rows):
            yield group
            group, total = [], 0.0
        group += unit
        total += seconds
    if group:
        yield group


def _units(items: Iterable[Item], most_s: float, most_rows: int) -> Iterator[Sequence[Item]]:
    """Rows by blocks; one by one where they are of none, or theirs is too large."""
    held: list[Item] = []
    held_s = 0.0
    large: int | None = None
    for item in items:
        if held and item.block != held[-1].block:
            yield held
            held, held_s = [], 0.0
        if item.block is None or item.block == large:
            yield (item,)
            continue
        held.append(item)
        held_s += item_seconds(item)
        if held_s > most_s or len(held) > most_rows:
            yield from ((one,) for one in held)
            held, held_s, large = [], 0.0, item.block
    if held:
        yield held
