"""Work done ahead of its consumer, in order, in threads, within a budget of bytes.

    items --feeder thread--> pool --> finished, waiting --> consumer
                |  at most `in_flight` |  about `budget_bytes`  |

The budget is checked before a piece is started, when its size is not known yet: up to `in_flight`
pieces may exceed it. One piece is always allowed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from earmill.pipeline.common.monitoring import counts

T = TypeVar("T")
R = TypeVar("R")


class _Gate:
    """Counts pieces in work and finished pieces that wait, and holds the feeder back."""

    def __init__(self, budget_bytes: int, in_flight: int) -> None:
        self._budget_bytes, self._in_flight = budget_bytes, in_flight
        self._changed = threading.Condition()
        self._running = self._waiting = 0
        self._is_closed = False
        self.waiting_bytes = 0  # Bytes of finished pieces that wait for the consumer.

    def enter(self) -> bool:
        """Wait for room for one more piece; return False once the consumer is gone."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or self._running + self._waiting == 0
                    or (self._running < self._in_flight and self.waiting_bytes < self._budget_bytes)
                )
            )
            self._running += 1
            return not self._is_closed

    def count(self, running: int, waiting: int, nbytes: int) -> None:
        with self._changed:
            self._running += running
            self._waiting += waiting
            self.waiting_bytes = 0 if self._is_closed else self.waiting_bytes + nbytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed, self.waiting_bytes = True, 0
            self._changed.notify_all()


def prefetched(
    items: Iterable[T],
    work: Callable[[T], R],
    *,
    pool: Executor,
    nbytes: Callable[[R], int],
    budget_bytes: int,
    in_flight: int,
    feeders: Executor | None = None,
    release: Callable[[T | R], object] = lambda piece: None,
) -> Generator[R, None, None]:
    """Yield `map(work, items)`, the work done ahead in `pool`, `in_flight` pieces at a time.

    An exception of `work` or of `items` is raised at its place in the order. Closing the generator
    early waits for the feeder, so `items` is not read afterwards. Items whose work has not begun
    then, and results that are not taken, are released.

    Args:
        nbytes: Returns the size of a finished piece; about `budget_bytes` of them may wait.
        feeders: Pool with a free thread for each call, which reads `items`; None makes one.
        release: Closes the files of an item or of a result, in any thread.
    """
    gate = _Gate(budget_bytes, in_flight)
    counts.watch(gate)
    line: queue.SimpleQueue[tuple[T, Future[tuple[R, int]]] | BaseException | None]
    line = queue.SimpleQueue()

    def weighed(item: T) -> tuple[R, int]:
        size = 0
        try:
            result = work(item)
            size = nbytes(result)
            return result, size
        finally:
            gate.count(-1, 1, size)

    def feed() -> None:
        try:
            for item in items:
                if not gate.enter():
                    release(item)
                    return
                line.put((item, pool.submit(weighed, item)))
            line.put(None)
        except BaseException as error:
            line.put(error)

    def ended(piece: Future[tuple[R, int]]) -> None:
        if piece.exception() is None:
            release(piece.result()[0])

    feeder = (feeders or ThreadPoolExecutor(1, "feeder")).submit(feed)
    try:
        while (entry := line.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            result, size = entry[1].result()
            gate.count(0, -1, -size)
            yield result
    finally:
        gate.close()
        feeder.result()
        while not line.empty():
            if isinstance(entry := line.get(), tuple):
                item, piece = entry
                if piece.cancel():
                    release(item)  # its work has not begun
                else:
                    piece.add_done_callback(ended)
