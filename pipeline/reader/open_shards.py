"""Random access into published shards of any format, through a cache bounded in bytes.

Every reader answers one question: frames [first, last) of one stream of one row. Zarr fetches the
inner chunks that hold them, Parquet the row group of the row and only that stream's column. Blocks
are kept decoded and read-only; what leaves is always a fresh array, so nobody can edit the cache.
Starts and lengths come from the caller's index; every row is looked up by its id as well, so that
an index of other files gives an error and never the features of another row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from threading import Condition

from earmill.pipeline.formats.block_cache import (
    BlockCache,
    IoCounts,
    ShardReader,
)
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.registry import format_of
from earmill.pipeline.storage.layout import Layout


class OpenShards:
    """The shards one process has open, least recently used closed first. Safe in several threads,
    which open different shards at the same time.

    Args:
        max_open: File handles at most.
        max_bytes: Bound of the block cache they share.
        reads: Streams that are read.
    """

    def __init__(self, *, max_open: int, max_bytes: int, reads: Sequence[str] = ()) -> None:
        self.counts = IoCounts()
        self.cache = BlockCache(max_bytes, self.counts)
        self._max_open, self._reads = max_open, reads
        self._changed = Condition()
        self._under_way: set[str] = set()
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        # Of those that are open: the ones that rows were read from, the last of them behind.
        self._read: OrderedDict[str, None] = OrderedDict()

    def get(
        self, layout: Layout, rel: str, fmt: str, promise: Promise, *, ahead: bool = False
    ) -> ShardReader:
        """The reader of one data file, opened if it is not.

        Args:
            ahead: No row is read from it yet. Where too many are open, one that rows were read from
                is closed for it, if it holds no handle and is not the last of those.
        Raises:
            LookupError: There is none.
        """
        with self._changed:
            if not ahead:
                self._read[rel] = None
                self._read.move_to_end(rel)
            while rel in self._under_way:
                self._changed.wait()
            if rel in self._open:
                self._open.move_to_end(rel)
                return self._open[rel]
            if ahead and len(self._open) + len(self._under_way) >= self._max_open:
                self._make_room()
            self._under_way.add(rel)
        try:
            promise = replace(promise, reads=self._reads)
            return self._keep(rel, format_of(fmt).open(layout, rel, promise, self.cache))
        finally:
            with self._changed:
                self._under_way.discard(rel)
                self._changed.notify_all()

    def _make_room(self) -> None:
        done = [rel for rel in [*self._read][:-1] if hasattr(self._open.get(rel), "requests")]
        if not done:
            raise LookupError(f"{self._max_open} shards are open")
        self._drop(done[0])

    def _drop(self, rel: str) -> None:
        self._read.pop(rel, None)
        self._open.pop(rel).close()

    def _keep(self, rel: str, reader: ShardReader) -> ShardReader:
        with self._changed:
            self._open[rel] = reader
            self.counts.shards_opened += 1
            while len(self._open) > self._max_open:
                self._drop(next(iter(self._open)))
        return reader

    def close(self) -> None:
        """Close them all and forget what they held."""
        while self._open:
            self._drop(next(iter(self._open)))
        self._read.clear()
        self.cache.clear()
