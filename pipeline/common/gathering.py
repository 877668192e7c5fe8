"""Gathering of neighbours, where handing over one small piece costs more than the work on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
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
