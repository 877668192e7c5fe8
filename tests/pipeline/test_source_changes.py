"""What a listing has that a plan has not, told by going through both once."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from earmill.pipeline.operations.open_job import compare
from earmill.pipeline.sources.base import Item, Reference


def rows(names: list[str], size: int = 10) -> list[Item]:
    return [Item(name, f"/corpus/{name}", size=size, position=n) for n, name in enumerate(names)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{n:03d}" for n in range(60)]
    planned = rows(rng.sample(names, rng.randrange(1, 60)))
    listed = rows(rng.sample(names, rng.randrange(1, 60)))
    if seed % 2:
        planned, listed = (sorted(each, key=lambda item: item.row_id) for each in (planned, listed))
    other = {item.row_id for item in listed if rng.random() < 0.3}
    listed = [replace(item, size=11) if item.row_id in other else item for item in listed]
    was, now = ({item.row_id for item in each} for each in (planned, listed))
    found = compare(planned, listed)
    assert found.added == tuple(sorted(now - was))
    assert found.removed == tuple(sorted(was - now))
    assert found.changed == tuple(sorted(was & now & other))


def test_a_file_that_was_missing_has_changed_when_it_is_there() -> None:
    """A plan without its size and time would see no later change of it."""
    missing, there = Item("a", "/corpus/a.wav"), Item("a", "/corpus/a.wav", size=10, mtime=1.0)
    assert compare([missing], [there]).changed == ("a",)
    # A store that does not answer is no change.
    assert not compare([there], [missing]) and not compare([missing], [missing])
    of_pair = [replace(there, reference=Reference("b.wav", size=size)) for size in (None, 9)]
    assert compare(of_pair[:1], of_pair[1:]).changed == ("a",)


def test_rows_in_the_same_order_are_not_held() -> None:
    count = 20_000

    def some(first: int) -> Iterator[Item]:
        return (Item(f"{n:07d}", f"/corpus/{n:07d}.wav", size=n) for n in range(first, count))

    tracemalloc.start()
    try:
        # One row is gone at the beginning: all others are met a row later.
        found = compare(some(0), some(1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.removed == ("0000000",) and not (found.added or found.changed)
    assert peak < 100 * count, "a row takes some 300 bytes"
