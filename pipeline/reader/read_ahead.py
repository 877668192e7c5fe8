"""Blocks that will be needed soon, fetched and decoded by threads of this process.

Whoever knows the next rows says so; each call moves the window on. Rows become the blocks that hold
them, blocks that lie close together one request. What is under way is bounded in bytes, and whoever
needs a block that is under way waits for it and does not fetch it again. Nothing is told of what
goes wrong here: the row itself is read in any case, and its error names it.

A disk gives a block as fast as many, and the first is wanted soon: rows are taken a few at a time.
A remote store makes every request wait: rows are taken by the quarter of a window, so that requests
are large and few, and the shards they lie in are opened side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from earmill.pipeline.formats.blocks import Block, BlockCache, BlockKey, ReadsAhead

# A row, and the stretch of it that is read, s; None for all of it.
Wanted = tuple[int, tuple[float, float] | None]
# A reader, the stream, and the blocks of it that hold a row.
Needed = tuple[ReadsAhead, str, Sequence[int]]


@dataclass(frozen=True)
class Pace:
    """How far and how hard to read ahead.

    Args:
        threads: How many requests or decodings at once.
        max_bytes: Decoded bytes of rows ahead; a set's cache bounds it further.
        rows_at_once: Rows whose blocks are asked for together; None for all of a shard.
        share: Rows are taken when less than this share of the window is under way.
    """

    threads: int
    max_bytes: int
    rows_at_once: int | None
    share: float


# Decoding lets other threads run: two keep up with one that hands rows out. Requests wait.
LOCAL = Pace(threads=2, max_bytes=64 * 2**20, rows_at_once=8, share=1.0)
REMOTE = Pace(threads=16, max_bytes=128 * 2**20, rows_at_once=None, share=0.75)


class ReadAhead:
    """Reads ahead of one consumer.

    Args:
        needed: The blocks of a row.
        shard_of: The shard of a row.
        nbytes: Decoded bytes of what is wanted of a row.
        cache: Where blocks go.
        pace: How far and how hard.
    """

    def __init__(
        self,
        needed: Callable[[Wanted], Iterator[Needed]],
        shard_of: Callable[[int], Any],
        nbytes: Callable[[Wanted], int],
        cache: BlockCache,
        pace: Pace,
    ) -> None:
        self._needed, self._shard_of, self._nbytes = needed, shard_of, nbytes
        self._cache, self._pace = cache, pace
        self._pool = ThreadPoolExecutor(pace.threads, "read-ahead")
        self._lock = Lock()
        self._asked: set[Wanted] = set()
        self._planning = 0

    def want(self, rows: Iterable[Wanted]) -> None:
        """These come next, the first of them now; what an earlier call said is forgotten."""
        most = min(self._pace.max_bytes, self._cache.max_bytes // 2)
        window: list[Wanted] = []
        total = under_way = 0
        for row in rows:
            nbytes = self._nbytes(row)
            total += nbytes
            if window and total > most:
                break
            window.append(row)
            under_way += nbytes * (row in self._asked)
        with self._lock:
            self._asked &= {*window}
            if under_way > self._pace.share * most:
                return
            new = [row for row in window if row not in self._asked]
            self._asked.update(new)
        for part in self._parts(new):
            self._submit_plan(part)

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._asked.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _parts(self, rows: Sequence[Wanted]) -> list[list[Wanted]]:
        """Rows of a shard each, where shards are worth opening side by side."""
        if self._pace.rows_at_once is not None:
            return [[*rows]] if rows else []
        parts: dict[Any, list[Wanted]] = {}
        for row in rows:
            parts.setdefault(self._shard_of(row[0]), []).append(row)
        return [*parts.values()]

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None] | None:
        with suppress(RuntimeError):  # closed
            return self._pool.submit(work, *arguments)
        return None

    def _submit_plan(self, rows: Sequence[Wanted]) -> None:
        self._count_plans(1)
        future = self._submit(self._plan, rows)
        if future is None:
            self._count_plans(-1)
        else:
            future.add_done_callback(lambda _: self._count_plans(-1))

    def _count_plans(self, step: int) -> None:
        with self._lock:
            self._planning += step

    def _plan(self, rows: Sequence[Wanted]) -> None:
        """Turn rows into requests, a few at a time: the rest stands behind the first requests."""
        with self._lock:
            left = [row for row in rows if row in self._asked]
        now = left[: self._pace.rows_at_once]
        with suppress(Exception):
            self._request(now)
        if len(now) < len(left):
            self._submit_plan(left[len(now) :])

    def _request(self, rows: Sequence[Wanted]) -> None:
        wanted: dict[str, tuple[ReadsAhead, dict[Block, None]]] = {}
        for row in rows:
            for reader, stream, numbers in self._needed(row):
                _, blocks = wanted.setdefault(reader.rel, (reader, {}))
                blocks.update(((stream, number), None) for number in numbers)
        for rel, (reader, blocks) in wanted.items():
            claimed = self._cache.claim((rel, *block) for block in blocks)
            self._load(reader, [(stream, number) for _, stream, number in claimed])

    def _load(self, reader: ReadsAhead, blocks: Sequence[Block]) -> None:
        """Fetch claimed blocks; each is given back whatever happens."""
        left: set[BlockKey] = {(reader.rel, *block) for block in blocks}
        try:
            for run in reader.requests(blocks):
                keys: list[BlockKey] = [(reader.rel, *block) for block in run]
                future = self._submit(_fetch, reader, run)
                if future is None:
                    break
                left.difference_update(keys)
                future.add_done_callback(partial(_release, self._cache, keys))
        finally:
            self._cache.release(left)


def _fetch(reader: ReadsAhead, run: Sequence[Block]) -> None:
    with suppress(Exception):
        reader.load(run)


def _release(cache: BlockCache, keys: Sequence[BlockKey], _: Future[None]) -> None:
    cache.release(keys)
