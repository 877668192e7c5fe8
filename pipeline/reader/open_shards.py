"""Open shards of a feature set in one process, and their decoded blocks in a bounded cache.

Each reader returns frames [first, last) of one stream of one row. Zarr fetches the inner chunks
that hold these frames; Parquet fetches one column of the row group that holds the row. Blocks are
cached decoded and read-only, and readers return copies, so a caller cannot edit the cache. The
index gives the start and length of each row. A reader checks the row id as well: an index of other
files causes an error and never the features of another row.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import cast

import pyarrow as pa

from earmill.pipeline.formats.block_cache import BlockCache, IoCounts, ReadsAhead, ShardReader
from earmill.pipeline.formats.format import Format, Promise
from earmill.pipeline.reader.catalog import Catalog, RowLocations
from earmill.pipeline.reader.read_ahead import Needed, ReadAhead, Wanted
from earmill.pipeline.storage.layout import Layout


class OpenShards:
    """The open shards of a process; the least recently used shard is closed first.

    Safe in several threads, which open different shards at the same time.

    Args:
        max_open: Maximum number of open shards.
        max_bytes: Maximum bytes of their common block cache.
        reads: Streams that are read.
    """

    def __init__(self, *, max_open: int, max_bytes: int, reads: Sequence[str] = ()) -> None:
        self.counts = IoCounts()
        self.cache = BlockCache(max_bytes, self.counts)
        self._max_open, self._reads = max_open, reads
        self._changed = threading.Condition()
        self._being_opened: set[str] = set()
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        # Shards from which a row was read; the most recent one is last.
        self._read: OrderedDict[str, None] = OrderedDict()

    def get(
        self, layout: Layout, rel: str, fmt: Format, promise: Promise, *, ahead: bool = False
    ) -> ShardReader:
        """Return the reader of a feature file; open it if it is not open.

        Args:
            ahead: True if no row is read from it yet. If too many shards are open, it replaces a
                shard that rows were read from, except the last of these and shards that cannot read
                ahead.
        Raises:
            LookupError: With `ahead`, no shard can be closed.
        """
        with self._changed:
            if not ahead:
                self._read[rel] = None
                self._read.move_to_end(rel)
            while rel in self._being_opened:
                self._changed.wait()
            if rel in self._open:
                self._open.move_to_end(rel)
                return self._open[rel]
            if ahead and len(self._open) + len(self._being_opened) >= self._max_open:
                done = [key for key in [*self._read][:-1] if can_read_ahead(self._open.get(key))]
                if not done:
                    raise LookupError(f"{self._max_open} shards are open")
                self._close(done[0])
            self._being_opened.add(rel)
        try:
            promise = replace(promise, reads=self._reads)
            reader = fmt.open(layout, rel, promise, self.cache)
            with self._changed:
                self._open[rel] = reader
                self.counts.shards_opened += 1
                while len(self._open) > self._max_open:
                    self._close(next(iter(self._open)))
            return reader
        finally:
            with self._changed:
                self._being_opened.discard(rel)
                self._changed.notify_all()

    def close(self) -> None:
        """Close all shards and clear the cache."""
        while self._open:
            self._close(next(iter(self._open)))
        self._read.clear()
        self.cache.clear()

    def _close(self, rel: str) -> None:
        self._read.pop(rel, None)
        self._open.pop(rel).close()


@dataclass
class ProcessHandles:
    """Connections, open shards and cached blocks of a set in one process; never pickled.

    It does not refer to the set: threads that read ahead must not keep the set alive.

    Args:
        catalog: The catalog of the set.
        places: Where rows lie.
        fmt: Format that is read.
        format: Name of the format.
        layout: Where the set lies.
        shards: The open shards.
        files: Path of the feature file of each shard, and what its commit states.
        rows: Path and content of the table of rows that was read last.
        ahead: Reads ahead, once rows are named.
    """

    catalog: Catalog
    places: RowLocations
    fmt: Format
    format: str
    layout: Layout
    shards: OpenShards
    files: dict[str, tuple[str, Promise]] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    rows: tuple[str, pa.Table] = ("", pa.table({}))
    ahead: ReadAhead | None = None

    def file(self, shard: str) -> tuple[str, Promise]:
        """Return the path of the feature file of a shard, and what its commit states."""
        if shard not in self.files:
            self.files[shard] = self.catalog.shard_file(self.layout, shard, self.format, self.fmt)
        return self.files[shard]

    def reader(self, shard: str, *, ahead: bool = False) -> ShardReader:
        """Return the reader of a shard; see `OpenShards.get`."""
        rel, promise = self.file(shard)
        return self.shards.get(self.layout, rel, self.fmt, promise, ahead=ahead)

    def needed(self, wanted: Wanted) -> Iterator[Needed]:
        """Yield the blocks that hold a row; none if the format does not read ahead."""
        reader = self.reader(self.places.shard(wanted[0]), ahead=True)
        if can_read_ahead(reader):
            ahead = cast(ReadsAhead, reader)
            for name, span in self.places.known_ahead(wanted).items():
                yield ahead, name, ahead.blocks(name, span)

    def prepare(self, position: int, pool: Executor) -> None:
        """Open the shard of a row that is read soon, and fetch what locates its blocks."""
        reader = self.reader(self.places.shard(position), ahead=True)
        if can_read_ahead(reader):
            cast(ReadsAhead, reader).prepare(self.places.layouts, pool)

    def close(self) -> None:
        """Stop reading ahead, close all shards and clear the cache."""
        if self.ahead is not None:
            self.ahead.close()
        self.shards.close()


def can_read_ahead(reader: ShardReader | None) -> bool:
    """Return True if the reader is a `ReadsAhead`."""
    # isinstance would look up every method of the protocol on each call.
    return hasattr(reader, "requests")
