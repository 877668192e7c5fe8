"""When the stages of a piece of work began and ended, by the wall clock.

A few readings of the clock a shard, none a row: cheap enough to be always on. Stages overlap (a
shard's first clips are in the models while its last ones are fetched): their times do not add up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# (began, ended), seconds since 1970.
Stretch = tuple[float, float]


class Stages:
    """Stages of one piece of work; any number of threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[str, Stretch] = {}

    def mark(self, stage: str, began_s: float, ended_s: float) -> None:
        """A stage went on in this time too."""
        with self._lock:
            before = self._stretches.get(stage, (began_s, ended_s))
            self._stretches[stage] = (min(before[0], began_s), max(before[1], ended_s))

    def touch(self, stage: str) -> None:
        """A stage goes on now."""
        now_s = time.time()
        self.mark(stage, now_s, now_s)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, the stage goes on."""
        began_s = time.time()
        try:
            yield
        finally:
            self.mark(name, began_s, time.time())

    def during(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the stage is the making of them, from the first to the last."""
        with self.stage(stage):
            yield from items

    def stretches(self) -> dict[str, Stretch]:
        """Stage to when it began and ended, in the order of beginning."""
        with self._lock:
            return dict(sorted(self._stretches.items(), key=lambda entry: entry[1]))
