"""Lists of neighbours: of enough weight to be worth handing over, or small enough for a limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add, gt
from typing import TypeVar

T = TypeVar("T")


def gathered(
    pieces: Iterable[T],
    weight: Callable[[T], float],
    enough: float,
    most: int = sys.maxsize,
    release: Callable[[list[T]], object] = lambda pieces: None,
) -> Iterator[list[T]]:
    """Yield neighbours in lists of `enough` weight or of `most` pieces; a heavy piece ends its
    list. If `pieces` raises, the pieces of an unfinished list are released."""
    held: list[T] = []
    total = 0.0
    try:
        for piece in pieces:
            held.append(piece)
            total += weight(piece)
            if total >= enough or len(held) == most:
                full, held, total = held, [], 0.0
                yield full  # no longer ours to release
    except BaseException:
        release(held)
        raise
    if held:
        yield held


def within(
    pieces: Iterable[T], sizes: Callable[[T], Sequence[float]], limits: Sequence[float]
) -> Iterator[list[T]]:
    """Yield neighbours in lists. The sums of their sizes are at most `limits`, place by place; a
    larger piece has a list of its own."""
    held: list[T] = []
    total: Sequence[float] = ()
    for piece in pieces:
        size = sizes(piece)
        total = [*map(add, total, size)] if held else size
        if held and any(map(gt, total, limits)):
            yield held
            held, total = [], size
        held.append(piece)
    if held:
        yield held
