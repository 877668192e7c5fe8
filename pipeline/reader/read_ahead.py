"""Blocks that will be needed soon, fetched and decoded by threads of this process.

Whoever knows the next rows says so; each call moves the window on. Rows become the blocks that hold
them, blocks that lie end to end one request. What is under way is bounded in bytes, and whoever
needs a block that is under way waits for it and does not fetch it again. Nothing is told of what
goes wrong here: the row itself is read in any case, and its error names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

from earmill.pipeline.formats.blocks import BlockCache, BlockKey, ReadsAhead

# Decoding lets other threads run: two keep up with one that hands rows out. Requests wait.
LOCAL_THREADS, REMOTE_THREADS = 2, 8
# Decoded bytes of rows ahead; a set's cache bounds it further.
AHEAD_BYTES = 64 * 2**20
# Rows whose blocks are asked for together.
ROWS_AT_ONCE = 8

# A reader, the stream, and the blocks of it that hold a row.
Needed = tuple[ReadsAhead, str, Sequence[int]]


class ReadAhead:
    """Reads ahead of one consumer.

    Args:
        needed: The blocks of a row, by its position.
        row_bytes: Decoded bytes of a row.
        cache: Where blocks go.
        threads: How many requests or decodings at once.
    """

    def __init__(
        self,
        needed: Callable[[int], Iterator[Needed]],
        row_bytes: Callable[[int], int],
        cache: BlockCache,
        threads: int,
    ) -> None:
        self._needed, self._row_bytes, self._cache = needed, row_bytes, cache
        self._pool = ThreadPoolExecutor(threads, "read-ahead")
        self._lock = Lock()
        self._next: deque[int] = deque()
        self._asked: set[int] = set()
        self._planning = False

    def want(self, rows: Sequence[int]) -> None:
        """These rows come next, the first of them now; what an earlier call said is forgotten."""
        window: list[int] = []
        nbytes = 0
        for row in rows:
            nbytes += self._row_bytes(row)
            if window and nbytes > min(AHEAD_BYTES, self._cache.max_bytes // 2):
                break
            window.append(row)
        with self._lock:
            self._asked &= {*window}
            self._next = deque(row for row in window if row not in self._asked)
            begin = bool(self._next) and not self._planning
            self._planning = self._planning or begin
        if begin:
            self._submit(self._plan)

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._next.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None] | None:
        with suppress(RuntimeError):  # closed
            return self._pool.submit(work, *arguments)
        return None

    def _plan(self) -> None:
        """Turn rows into requests until none is left."""
        while rows := self._take():
            with suppress(Exception):
                self._request(rows)

    def _take(self) -> list[int]:
        with self._lock:
            rows = [self._next.popleft() for _ in range(min(ROWS_AT_ONCE, len(self._next)))]
            self._asked.update(rows)
            self._planning = bool(rows)
            return rows

    def _request(self, rows: Sequence[int]) -> None:
        wanted: dict[tuple[str, str], tuple[ReadsAhead, dict[int, None]]] = {}
        for row in rows:
            for reader, stream, blocks in self._needed(row):
                _, numbers = wanted.setdefault((reader.rel, stream), (reader, {}))
                numbers.update(dict.fromkeys(blocks))
        for (rel, stream), (reader, numbers) in wanted.items():
            missing = [key[2] for key in self._cache.claim((rel, stream, n) for n in numbers)]
            self._load(reader, stream, missing)

    def _load(self, reader: ReadsAhead, stream: str, missing: Sequence[int]) -> None:
        """Fetch claimed blocks; each is given back whatever happens."""
        left = {(reader.rel, stream, number) for number in missing}
        try:
            for run in reader.requests(stream, sorted(missing)):
                keys = [(reader.rel, stream, number) for number in run]
                future = self._submit(self._fetch, reader, stream, run, keys)
                if future is None:
                    break
                left.difference_update(keys)
                future.add_done_callback(partial(_release, self._cache, keys))
        finally:
            self._cache.release(left)

    def _fetch(
        self, reader: ReadsAhead, stream: str, run: Sequence[int], keys: Sequence[BlockKey]
    ) -> None:
        with suppress(Exception):
            reader.load(stream, run)


def _release(cache: BlockCache, keys: Sequence[BlockKey], _: Future[None]) -> None:
    cache.release(keys)
