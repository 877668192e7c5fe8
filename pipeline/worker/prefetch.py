"""Work done ahead of its consumer: in order, in threads, and never more than so many bytes early.

    items --feeder thread--> pool --> finished, waiting --> consumer
                |  at most `in_flight` |  about `budget_bytes`  |

The feeder pulls the items itself, so fetching overlaps too. The budget is checked before a piece is
started, when its size is not known yet: up to `in_flight` pieces may exceed it. One piece is always
allowed, so a single piece above the budget still gets through.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

from earmill.pipeline.common.counts import counts

T = TypeVar("T")
R = TypeVar("R")


class _Gate:
    """Counts what is under way and what waits, and holds the feeder back."""

    def __init__(self, budget_bytes: int, in_flight: int) -> None:
        self._budget_bytes, self._in_flight = budget_bytes, in_flight
        self._changed = threading.Condition()
        self._running = 0
        self._waiting = 0
        self._waiting_bytes = 0
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """Of finished pieces that nobody has taken yet."""
        return 0 if self._closed else self._waiting_bytes

    def enter(self) -> bool:
        """Wait for room for one more piece; False once the consumer is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room())
            self._running += 1
            return not self._closed

    def finished(self, nbytes: int) -> None:
        """A piece is done and waits for the consumer."""
        with self._changed:
            self._running -= 1
            self._waiting += 1
            self._waiting_bytes += nbytes
            self._changed.notify_all()

    def taken(self, nbytes: int) -> None:
        """The consumer has the piece."""
        with self._changed:
            self._waiting -= 1
            self._waiting_bytes -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody will take anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        if self._running + self._waiting == 0:
            return True
        return self._running < self._in_flight and self._waiting_bytes < self._budget_bytes


def prefetched(
    items: Iterable[T],
    work: Callable[[T], R],
    *,
    pool: Executor,
    nbytes: Callable[[R], int],
    budget_bytes: int,
    in_flight: int,
    feeders: Executor | None = None,
) -> Generator[R, None, None]:
    """`map(work, items)` with the work done ahead in `pool`.

    An exception of `work` or of `items` is raised at its place in the order. Closing the generator
    early waits for the feeder, so nobody pulls from `items` afterwards; pieces under way end by
    themselves.

    Args:
        nbytes: Size of a finished piece. budget_bytes: How much may wait for the consumer.
        in_flight: How many pieces may be under way at once.
        feeders: Where `items` is pulled from; None takes a thread of its own. It must have a free
            thread for every call that runs at the same time.
    """
    gate = _Gate(budget_bytes, in_flight)
    counts.watch(gate)
    line: queue.SimpleQueue[Future[tuple[R, int]] | BaseException | None] = queue.SimpleQueue()

    def weighed(item: T) -> tuple[R, int]:
        size = 0
        try:
            result = work(item)
            size = nbytes(result)
            return result, size
        finally:
            gate.finished(size)

    def feed() -> None:
        try:
            for item in items:
                if not gate.enter():
                    return
                line.put(pool.submit(weighed, item))
            line.put(None)
        except BaseException as error:
            line.put(error)

    wait_for_feeder = _start(feed, feeders)
    try:
        while (entry := line.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield _take(entry, gate)
    finally:
        gate.close()
        wait_for_feeder()


def _start(feed: Callable[[], None], feeders: Executor | None) -> Callable[[], object]:
    """Run `feed` beside us; the value waits for its end."""
    if feeders is not None:
        return feeders.submit(feed).result
    thread = threading.Thread(target=feed, name="feeder", daemon=True)
    thread.start()
    return thread.join


def _take(future: Future[tuple[R, int]], gate: _Gate) -> R:
    try:
        result, size = future.result()
    except BaseException:
        gate.taken(0)
        raise
    gate.taken(size)
    return result
