"""What one process has open of a feature set, and the blocks that rows of it lie in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import cast

import pyarrow as pa

from earmill.pipeline.formats.block_cache import ReadsAhead, ShardReader
from earmill.pipeline.reader.catalog import Catalog
from earmill.pipeline.reader.open_shards import OpenShards
from earmill.pipeline.reader.read_ahead import Needed, ReadAhead, Wanted
from earmill.pipeline.reader.row_places import RowPlaces
from earmill.pipeline.reader.shard_paths import ShardPaths
from earmill.pipeline.storage.layout import Layout


@dataclass
class Process:
    """What belongs to one process and is never pickled: connections, handles, cached blocks."""

    layout: Layout
    shards: OpenShards
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The table of rows that was read last, with its path.
    rows: tuple[str, pa.Table] = ("", pa.table({}))
    ahead: ReadAhead | None = None

    def reader(self, paths: ShardPaths, fmt: str, *, ahead: bool = False) -> ShardReader:
        """The reader of a shard."""
        return self.shards.get(self.layout, paths.data[fmt], fmt, paths.promises[fmt], ahead=ahead)

    def close(self) -> None:
        """Let go of threads, handles and blocks."""
        if self.ahead is not None:
            self.ahead.close()
        self.shards.close()


def needed(
    process: Process, catalog: Catalog, places: RowPlaces, fmt: str, wanted: Wanted
) -> Iterator[Needed]:
    """The blocks that hold what is wanted of a row; none where the format does not read ahead.

    Without the set itself, which threads must not keep alive.
    """
    reader = reader_of(process, catalog, places, fmt, wanted[0])
    if hasattr(reader, "requests"):
        ahead = cast(ReadsAhead, reader)
        for name, span in places.wanted(wanted).items():
            yield ahead, name, ahead.blocks(name, span)


def prepare(
    process: Process,
    catalog: Catalog,
    places: RowPlaces,
    fmt: str,
    position: int,
    pool: Executor,
) -> None:
    """Open the shard of a row that is read soon, and fetch what reading it asks for first."""
    reader = reader_of(process, catalog, places, fmt, position)
    if hasattr(reader, "requests"):
        cast(ReadsAhead, reader).prepare(places.layouts, pool)


def reader_of(
    process: Process, catalog: Catalog, places: RowPlaces, fmt: str, position: int
) -> ShardReader:
    """The reader of a row's shard, opened if it is not."""
    paths = catalog.shard_paths(process.layout, places.shard(position))
    return process.reader(paths, fmt, ahead=True)
