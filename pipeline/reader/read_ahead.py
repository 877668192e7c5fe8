"""Blocks that are needed soon, fetched and decoded ahead by threads of this process.

The consumer names the next rows; each call moves the window on. Bytes in flight are bounded. Errors
are dropped here, because the row is read in any case. Blocks of a local disk come as fast alone, so
rows are taken a few at a time. A request to a remote store costs a round trip, so rows are taken by
the quarter of a window, and shards as a whole if they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from earmill.pipeline.formats.block_cache import Block, BlockCache, BlockKey, BlockReader
from earmill.pipeline.loader.rows import Span

# A row, and the span of it that is read; None for the whole row.
Wanted = tuple[int, Span | None]
Spans = Sequence[Span | None]
# A reader, a stream, and the blocks of the stream that hold a row.
Needed = tuple[BlockReader, str, Sequence[int]]


@dataclass(frozen=True)
class ReadAheadPolicy:
    threads: int  # Threads that fetch and decode.
    planners: int  # Threads that turn rows into requests; 0 uses the threads that fetch.
    max_bytes: int  # Decoded bytes of the window; the cache of a set bounds it further.
    rows_at_once: int | None  # Rows whose blocks are requested together; None for a shard's rows.
    share: float  # New rows are requested if less than this share of the window is in flight.


# Decoding releases the GIL, so two threads keep up with the thread that returns rows. Requests wait
# for the store, so they need more threads.
LOCAL = ReadAheadPolicy(
    threads=2,
    planners=0,
    max_bytes=64 * 2**20,
    rows_at_once=8,
    share=1.0,
)
REMOTE = ReadAheadPolicy(
    threads=16,
    planners=8,
    max_bytes=192 * 2**20,
    rows_at_once=None,
    share=0.75,
)
# Shares of the cache that the window may take.
SHARE, IN_ORDER_SHARE = 0.5, 0.75
FIRST_REQUESTS = 8  # Threads for small requests.
# A reader in order names rows again after this share of the window, or after `MAX_STEP` rows. Going
# through all rows ahead takes as long as reading one row.
STEP_SHARE, MAX_STEP = 0.125, 64


class ReadAhead:
    """Prefetch of blocks for one consumer. `needed` yields the blocks of a row. `nbytes` returns
    the decoded bytes of rows or spans."""

    def __init__(
        self,
        needed: Callable[[Wanted], Iterator[Needed]],
        shard_of: Callable[[int], Any],
        nbytes: Callable[[Sequence[int], Spans | None], np.ndarray],
        cache: BlockCache,
        pace: ReadAheadPolicy,
    ) -> None:
        self._needed, self._shard_of, self._nbytes = needed, shard_of, nbytes
        self._cache, self._pace = cache, pace
        self._pool = ThreadPoolExecutor(pace.threads, "read-ahead")
        self._planners = self._pool
        if pace.planners:
            self._planners = ThreadPoolExecutor(pace.planners, "read-ahead-plan")
        # Small requests have a pool of their own and do not queue after large requests.
        self._first = ThreadPoolExecutor(FIRST_REQUESTS, "read-ahead-first")
        self._lock = Lock()
        self._asked: set[Wanted] = set()
        self._plans: dict[int, Future[None]] = {}  # Rows for which requests are being made.

    def want(
        self, rows: Sequence[int], spans: Spans | None = None, *, in_order: bool = False
    ) -> int:
        """Name the rows that come next, in order, in place of earlier rows; return the number of
        rows after which the next call is due. `in_order`: no block is needed again after its rows
        were read."""
        share = IN_ORDER_SHARE if in_order else SHARE
        most = min(self._pace.max_bytes, int(share * self._cache.max_bytes))
        nbytes = self._nbytes(rows, spans)
        ends = np.cumsum(nbytes)
        count = min(len(rows), max(1, int(np.searchsorted(ends, most, "right"))))
        with self._lock:
            if self._pace.rows_at_once is None:
                count = self._whole_shards(rows, ends, count, most)
            chosen = [None] * count if spans is None else spans[:count]
            window: list[Wanted] = [*zip(rows[:count], chosen, strict=True)]
            there = [row in self._asked for row in window]
            under_way = int(nbytes[:count][np.array(there, bool)].sum())
            self._asked &= {*window}
            room = under_way <= self._pace.share * most
            new = [row for row in window if row not in self._asked] if room else []
            self._asked.update(new)
        # Shards are opened concurrently if each is requested as a whole.
        parts: dict[Any, list[Wanted]] = {}
        for row in new:
            shard = None if self._pace.rows_at_once else self._shard_of(row[0])
            parts.setdefault(shard, []).append(row)
        for part in parts.values():
            self._submit_plan(part)
        step = int(np.searchsorted(ends, STEP_SHARE * most, "right"))
        return min(max(1, step), MAX_STEP)

    def settle(self, position: int) -> None:
        """Wait until the requests for a row are made, or the reader would make them again. Without
        planners the reader is as fast alone."""
        plan = self._plans.get(position) if self._pace.planners else None
        if plan is not None:
            with suppress(Exception, CancelledError):
                plan.result()

    def close(self) -> None:
        """Cancel all requests that have not begun."""
        with self._lock:
            self._asked.clear()
        for pool in (self._planners, self._first, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _whole_shards(self, rows: Sequence[int], ends: np.ndarray, count: int, most: int) -> int:
        """Return the rows of the window without a last shard that does not fit as a whole, unless
        it fits into no window by itself, or is requested already."""
        if count == len(rows):
            return count
        shard, begin, end = self._shard_of(rows[count]), count, count
        while begin and self._shard_of(rows[begin - 1]) == shard:
            begin -= 1
        while end < len(rows) and self._shard_of(rows[end]) == shard:
            end += 1
        if not begin or end == len(rows) or ends[end - 1] - ends[begin - 1] > most:
            return count
        cut = {*rows[begin:count]}
        begun = any(row in cut for row, _ in self._asked)
        return count if begun else begin

    def _submit_plan(self, rows: Sequence[Wanted]) -> None:
        def done(future: Future[None]) -> None:
            for row, _ in rows:
                if self._plans.get(row) is future:
                    del self._plans[row]

        with suppress(RuntimeError):  # closed
            future = self._planners.submit(self._plan, rows)
            self._plans.update((row, future) for row, _ in rows)
            future.add_done_callback(done)

    def _plan(self, rows: Sequence[Wanted]) -> None:
        """Make requests for the first rows, and queue the other rows after these requests."""
        with self._lock:
            left = [row for row in rows if row in self._asked]
        now = left[: self._pace.rows_at_once]
        with suppress(Exception):
            self._request(now)
        if len(now) < len(left):
            self._submit_plan(left[len(now) :])

    def _request(self, rows: Sequence[Wanted]) -> None:
        wanted: dict[str, tuple[BlockReader, dict[Block, None]]] = {}
        for row in rows:
            for reader, stream, numbers in self._needed(row):
                _, blocks = wanted.setdefault(reader.rel, (reader, {}))
                blocks.update(((stream, number), None) for number in numbers)
        for rel, (reader, blocks) in wanted.items():
            claimed = self._cache.claim(((rel, *block) for block in blocks), ahead=True)
            self._load(reader, [(stream, number) for _, stream, number in claimed])

    def _load(self, reader: BlockReader, blocks: Sequence[Block]) -> None:
        """Fetch claimed blocks; every claim is released in any case."""
        left: set[BlockKey] = {(reader.rel, *block) for block in blocks}
        try:
            for run in reader.requests(blocks, self._first):
                keys: list[BlockKey] = [(reader.rel, *block) for block in run]
                try:
                    future = self._pool.submit(reader.load, run)
                except RuntimeError:  # closed
                    break
                left.difference_update(keys)
                future.add_done_callback(partial(_release, self._cache, keys))
        finally:
            self._cache.release(left)


def _release(cache: BlockCache, keys: Sequence[BlockKey], _: Future[None]) -> None:
    cache.release(keys)
