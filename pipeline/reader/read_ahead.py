"""Blocks that will be needed soon, fetched and decoded by threads of this process.

Whoever knows the next rows says so; each call moves the window on. Rows become the blocks that hold
them, blocks that lie close together one request. What is under way is bounded in bytes, and whoever
needs a block that is under way waits for it and does not fetch it again. Nothing is told of what
goes wrong here: the row itself is read in any case, and its error names it.

A disk gives a block as fast as many, and the first is wanted soon: rows are taken a few at a time.
A remote store makes every request wait and every request costs the client as much as a MB: rows are
taken by the quarter of a window, and shards as a whole where they fit in it, so that requests are
large and few; the shards they lie in are opened side by side, and the next ones before any of their
rows is in the window, as it takes two to three round trips, one after the other, to know where rows
lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from earmill.pipeline.formats.block_cache import Block, BlockCache, BlockKey, ReadsAhead

# A stretch of a row, s.
Span = tuple[float, float]
# A row, and the stretch of it that is read; None for all of it.
Wanted = tuple[int, Span | None]
Spans = Sequence[Span | None]
# A reader, the stream, and the blocks of it that hold a row.
Needed = tuple[ReadsAhead, str, Sequence[int]]


@dataclass(frozen=True)
class Pace:
    """How far and how hard to read ahead.

    Args:
        threads: How many requests or decodings at once.
        planners: Threads that turn rows into requests; 0 leaves that to those that carry them out.
        max_bytes: Decoded bytes of rows ahead; a set's cache bounds it further.
        rows_at_once: Rows whose blocks are asked for together; None for all of a shard.
        requests_at_once: Requests that a thread takes together.
        share: Rows are taken when less than this share of the window is under way.
        shards_ahead: Shards behind the window that are opened.
    """

    threads: int
    planners: int
    max_bytes: int
    rows_at_once: int | None
    requests_at_once: int
    share: float
    shards_ahead: int


# Decoding lets other threads run: two keep up with one that hands rows out. Requests wait.
LOCAL = Pace(
    threads=2,
    planners=0,
    max_bytes=64 * 2**20,
    rows_at_once=8,
    requests_at_once=4,
    share=1.0,
    shards_ahead=0,
)
REMOTE = Pace(
    threads=16,
    planners=8,
    max_bytes=192 * 2**20,
    rows_at_once=None,
    requests_at_once=1,
    share=0.75,
    shards_ahead=4,
)
# Of the cache, what rows ahead may take.
SHARE, IN_ORDER_SHARE = 0.5, 0.75
# Small requests at once, and rows that are looked at for the shards that come next.
FIRST_REQUESTS, ROWS_LOOKED_AT = 8, 64
# Who reads in order says again what comes next when so much of the window was read, and after so
# many rows at most: looking at all rows ahead takes as long as reading one.
STEP_SHARE, MAX_STEP = 0.125, 64


class ReadAhead:
    """Reads ahead of one consumer.

    Args:
        needed: The blocks of a row.
        prepare: Opens the shard of a row that is read soon; makes small requests in the pool.
        shard_of: The shard of a row.
        nbytes: Decoded bytes of what is wanted of rows.
        cache: Where blocks go.
        pace: How far and how hard.
    """

    def __init__(
        self,
        needed: Callable[[Wanted], Iterator[Needed]],
        prepare: Callable[[int, Executor], object],
        shard_of: Callable[[int], Any],
        nbytes: Callable[[Sequence[int], Spans | None], np.ndarray],
        cache: BlockCache,
        pace: Pace,
    ) -> None:
        self._needed, self._prepare = needed, prepare
        self._shard_of, self._nbytes = shard_of, nbytes
        self._cache, self._pace = cache, pace
        self._pool = ThreadPoolExecutor(pace.threads, "read-ahead")
        self._planners = self._pool
        if pace.planners:
            self._planners = ThreadPoolExecutor(pace.planners, "read-ahead-plan")
        # Small requests do not stand behind large ones; threads begin with the first.
        self._first = ThreadPoolExecutor(FIRST_REQUESTS, "read-ahead-first")
        self._lock = Lock()
        self._asked: set[Wanted] = set()
        # Of rows that are being planned.
        self._plans: dict[int, Future[None]] = {}
        # Shards that were opened before their rows are wanted.
        self._prepared: set[Any] = set()
        self._planning = 0

    def want(
        self, rows: Sequence[int], spans: Spans | None = None, *, in_order: bool = False
    ) -> int:
        """These come next, the first of them now; what an earlier call said is forgotten.

        Args:
            spans: The stretch of each, None for all of all of them.
            in_order: No block is needed again once the rows in it were read: more of the cache may
                hold what comes.
        Returns:
            After how many of them the next call is due, where they are read one after the other.
        """
        share = IN_ORDER_SHARE if in_order else SHARE
        most = min(self._pace.max_bytes, int(share * self._cache.max_bytes))
        nbytes = self._nbytes(rows, spans)
        ends = np.cumsum(nbytes)
        count = min(len(rows), max(1, int(np.searchsorted(ends, most, "right"))))
        with self._lock:
            if self._pace.rows_at_once is None:
                count = self._whole_shards(rows, ends, count, most)
            stretches = [None] * count if spans is None else spans[:count]
            window: list[Wanted] = [*zip(rows[:count], stretches, strict=True)]
            there = [row in self._asked for row in window]
            under_way = int(nbytes[:count][np.array(there, bool)].sum())
            self._asked &= {*window}
            room = under_way <= self._pace.share * most
            new = [row for row in window if row not in self._asked] if room else []
            self._asked.update(new)
        for part in self._parts(new):
            self._submit_plan(part)
        if self._pace.shards_ahead:
            self._prepare_next(rows[count:])
        step = int(np.searchsorted(ends, STEP_SHARE * most, "right"))
        return min(max(1, step), MAX_STEP)

    def settle(self, position: int) -> None:
        """Wait until the requests for a row are made, if somebody is about to make them: a second
        one for the same bytes would come no earlier."""
        plan = self._plans.get(position)
        if plan is not None:
            with suppress(Exception, CancelledError):
                plan.result()

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._asked.clear()
        for pool in (self._planners, self._first, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _whole_shards(self, rows: Sequence[int], ends: np.ndarray, count: int, most: int) -> int:
        """Of `count` rows that fit in the window those before a shard that does not fit behind
        others, but would by itself: it is taken as a whole later."""
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

    def _prepare_next(self, rows: Sequence[int]) -> None:
        """Open the shards of rows that are not wanted yet: round trips that they need not wait
        for."""
        soon: dict[Any, int] = {}
        # Few of them are looked at: this is done for every few rows that are read.
        for row in rows[:: 1 + len(rows) // ROWS_LOOKED_AT]:
            if len(soon) < self._pace.shards_ahead:
                soon.setdefault(self._shard_of(row), row)
        new = [row for shard, row in soon.items() if shard not in self._prepared]
        self._prepared = {*soon}
        with suppress(RuntimeError):  # closed
            for row in new:
                self._planners.submit(self._prepare, row, self._first)

    def _parts(self, rows: Sequence[Wanted]) -> list[list[Wanted]]:
        """Rows of a shard each, where shards are worth opening side by side."""
        if self._pace.rows_at_once is not None:
            return [[*rows]] if rows else []
        parts: dict[Any, list[Wanted]] = {}
        for row in rows:
            parts.setdefault(self._shard_of(row[0]), []).append(row)
        return [*parts.values()]

    def _submit_plan(self, rows: Sequence[Wanted]) -> None:
        self._count_plans(1)
        try:
            future = self._planners.submit(self._plan, rows)
        except RuntimeError:  # closed
            self._count_plans(-1)
            return
        if self._pace.planners:
            self._plans.update((row, future) for row, _ in rows)
        future.add_done_callback(partial(self._planned, rows))

    def _planned(self, rows: Sequence[Wanted], future: Future[None]) -> None:
        for row, _ in rows:
            if self._plans.get(row) is future:
                del self._plans[row]
        self._count_plans(-1)

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
            claimed = self._cache.claim(((rel, *block) for block in blocks), ahead=True)
            self._load(reader, [(stream, number) for _, stream, number in claimed])

    def _load(self, reader: ReadsAhead, blocks: Sequence[Block]) -> None:
        """Fetch claimed blocks; each is given back whatever happens."""
        left: set[BlockKey] = {(reader.rel, *block) for block in blocks}
        try:
            requests = reader.requests(blocks, self._first)
            while runs := [*islice(requests, self._pace.requests_at_once)]:
                keys: list[BlockKey] = [(reader.rel, *block) for run in runs for block in run]
                try:
                    future = self._pool.submit(_fetch, reader, runs)
                except RuntimeError:  # closed
                    break
                left.difference_update(keys)
                future.add_done_callback(partial(_release, self._cache, keys))
        finally:
            self._cache.release(left)


def _fetch(reader: ReadsAhead, runs: Sequence[Sequence[Block]]) -> None:
    for run in runs:
        with suppress(Exception):
            reader.load(run)


def _release(cache: BlockCache, keys: Sequence[BlockKey], _: Future[None]) -> None:
    cache.release(keys)
