"""A feature set: rows by number and by id, and slices in seconds.

Only the frames that are asked for are fetched: Zarr's inner chunks that hold them, or one column of
a Parquet row group. Decoded blocks are cached in each process, within a bound in bytes. A set can
be pickled into workers and used after a fork: each process opens the files anew. A reader checks
row ids: an index of other files causes an error and never the features of another row.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.formats.block_cache import (
    BlockCache,
    BlockReader,
    IoCounts,
    Piece,
    ShardReader,
)
from earmill.pipeline.formats.format import explain_damage, format_of, is_as_committed
from earmill.pipeline.formats.moments import StreamStatistics
from earmill.pipeline.formats.row_table import EXTRA_PREFIX, fact_names
from earmill.pipeline.loader.rows import FeatureRows, Row, Span
from earmill.pipeline.loader.statistics import framed
from earmill.pipeline.reader.catalog import Catalog, RowLocations, is_extra, read_quarantine
from earmill.pipeline.reader.read_ahead import LOCAL, REMOTE, Needed, ReadAhead, Wanted
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_cache import LocalCache
from earmill.pipeline.storage.paths import rows_path

if TYPE_CHECKING:
    from earmill.pipeline.loader.stream import FeatureDataset, FeatureStream

MAX_OPEN_SHARDS = 128
CachePlace = tuple[Path, int]  # Folder of a local cache, and the maximum bytes of its files.
# Rows that iterating in order names ahead; `ReadAhead` bounds them in bytes.
READ_AHEAD_ROWS = 512


class ProcessHandles:
    """Connections, open shards and cached blocks of a set in one process; never pickled. Safe in
    several threads. If more than `MAX_OPEN_SHARDS` shards are open, the least recently used one is
    closed. The set is not referred to: threads that read ahead must not keep it alive.
    """

    def __init__(
        self, catalog: Catalog, places: RowLocations, layout: Layout, format: str, cache_bytes: int
    ) -> None:
        self.pid, self.lock, self.layout = os.getpid(), threading.Lock(), layout
        self.counts = IoCounts()
        self.cache = BlockCache(cache_bytes, self.counts)
        # Path and content of the table of rows that was read last.
        self.rows: tuple[str, pa.Table] = ("", pa.table({}))
        pace = LOCAL if layout.is_local else REMOTE
        self.ahead = ReadAhead(self.needed, places.shard, places.nbytes, self.cache, pace)
        self._places, self._format = places, format
        # Path of the feature file of a shard, and what its commit states.
        self.file = functools.cache(lambda shard: catalog.shard_file(layout, shard, format))
        self._changed = threading.Condition()
        self._being_opened: set[str] = set()
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        # Shards from which a row was read; the most recent one is last.
        self._read: OrderedDict[str, None] = OrderedDict()
        self._closed = False

    def reader(self, shard: str, *, ahead: bool = False) -> ShardReader:
        """Return the reader of a shard; open it if it is not open. With `ahead`, no row is read
        from the shard yet. If too many shards are open, it replaces a shard that rows were read
        from, except the last of these and shards that cannot read ahead. LookupError if there is
        none, or `close` was called."""
        rel, promise = self.file(shard)
        with self._changed:
            if not ahead:
                self._read[shard] = None
                self._read.move_to_end(shard)
            while shard in self._being_opened:
                self._changed.wait()
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
            if ahead and len(self._open) + len(self._being_opened) >= MAX_OPEN_SHARDS:
                read = [*self._read][:-1]
                done = [key for key in read if isinstance(self._open.get(key), BlockReader)]
                if not done:
                    raise LookupError(f"{MAX_OPEN_SHARDS} shards are open")
                self._close(done[0])
            self._being_opened.add(shard)
        try:
            reader = format_of(self._format).open(self.layout, rel, promise, self.cache)
            with self._changed:
                self._open[shard] = reader
                self.counts.shards_opened += 1
                while len(self._open) > MAX_OPEN_SHARDS:
                    self._close(next(iter(self._open)))
                # A thread that reads ahead may open a shard while another thread closes them all.
                if ahead and self._closed:
                    self._close(shard)
                    raise LookupError("the feature set is closed")
            return reader
        finally:
            with self._changed:
                self._being_opened.discard(shard)
                self._changed.notify_all()

    def needed(self, wanted: Wanted) -> Iterator[Needed]:
        """Yield the blocks that hold a row; none if the format does not read ahead."""
        reader = self.reader(self._places.shard(wanted[0]), ahead=True)
        if isinstance(reader, BlockReader):
            for name, span in self._places.known_ahead(wanted).items():
                yield reader, name, reader.blocks(name, span)

    def close(self) -> None:
        """Stop reading ahead, close all shards and clear the cache."""
        self.ahead.close()
        # No lock is taken: after a fork, another process may hold it for ever.
        self._closed = True
        for shard in [*self._open]:
            self._close(shard)
        self._read.clear()
        self.cache.clear()

    def _close(self, shard: str) -> None:
        self._read.pop(shard, None)
        if (reader := self._open.pop(shard, None)) is not None:
            reader.close()


class FeatureSet(FeatureRows):
    """Base class of feature sets; torch is imported when a torch dataset is made."""

    def torch(self, *, label: str | None = None) -> FeatureDataset:
        """Return a map-style torch dataset of rows; `label` names a column of the source."""
        with needed_modules("torch datasets", "torch"):
            from earmill.pipeline.loader.stream import FeatureDataset

        return FeatureDataset(self, label=label)

    def iterable(self, **settings: Any) -> FeatureStream:
        """Return a torch IterableDataset; see `FeatureStream` for the settings."""
        with needed_modules("torch datasets", "torch"):
            from earmill.pipeline.loader.stream import FeatureStream

        return FeatureStream(self, **settings)


class Features(FeatureSet):
    """An opened feature set; get one from `open_features`. A sequence of `Row`.

    Safe in several threads (one reads at a time), to pickle, and to use after a fork.
    The pickle holds `storage_options`, credentials included; the text form does not.

    Attributes:
        format: Name of the format that is read.
        streams: Descriptions of the streams that are read, by name.
        dtypes: The type of the frames of each stream; events are whole numbers in any case.
        dataset: The content of dataset.json: spec, versions, streams.
        moments: The stored statistics, by stream.
    """

    def __init__(
        self,
        uri: str,
        catalog: Catalog,
        *,
        format: str,
        streams: Sequence[str],
        dtypes: Mapping[str, np.dtype],
        storage_options: Mapping[str, Any],
        cache_bytes: int,
        local_cache: CachePlace | None = None,
    ) -> None:
        self._uri, self._catalog, self.format = uri, catalog, format
        self.streams = {name: catalog.streams[name] for name in streams}
        self.dtypes, self.dataset, self.moments = dict(dtypes), catalog.dataset, catalog.moments
        self._storage_options = storage_options
        self._cache_bytes, self._local_cache = cache_bytes, local_cache
        self._places = RowLocations(catalog, streams, format_of(format))
        self._extras = [name for name in catalog.table.column_names if is_extra(name)]
        self._process: ProcessHandles | None = None

    @property
    def table(self) -> pa.Table:
        """One line for each row, in the order of `ds[i]`: ids, seconds, shard, frames, extras, and
        the values of streams with one row a clip, as `<stream>_<column>`."""
        return self._catalog.table

    def filter(self, where: pc.Expression) -> Features:
        """Return the rows that an expression over the columns of `table` selects, as a set.

        It has no stored statistics, see `compute_statistics`.

        Raises:
            ValueError: The expression does not fit the table.
        Example:
            loud = ds.filter(pyarrow.compute.field("loudness_summary_n5") > 4)
        """
        return Features(
            self._uri,
            self._catalog.where(where),
            format=self.format,
            streams=list(self.streams),
            dtypes=self.dtypes,
            storage_options=self._storage_options,
            cache_bytes=self._cache_bytes,
            local_cache=self._local_cache,
        )

    @property
    def quarantine(self) -> pa.Table:
        """The rows that could not be processed: `row_id`, `uri`, `stage`, `error_class`, `message`,
        `attempts`, `shard`. Each access reads the commits."""
        return read_quarantine(self._here().layout, self._catalog)

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return int(self._catalog.row_bytes.sum())

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Mean, variance and range of every stream of frames, by column, over all good rows.

        Before the dataset is closed, these are the rows committed so far.

        Raises:
            CommitError: The set has no stored statistics: see `compute_statistics`.
        """
        moments, wanted = self.moments, framed(self)
        missing = [name for name in wanted if name not in moments]
        if missing:
            raise CommitError(
                f"{self!r} has no statistics of {missing}: its rows were filtered, or it was "
                "written before they were stored; earmill.compute_statistics(ds) reads every row "
                "once and gives them, also for normalise="
            )
        return {
            name: StreamStatistics.read(moments[name], self.streams[name].width) for name in wanted
        }

    @property
    def fingerprint(self) -> str:
        """Changes when rows are added or the spec changes; resumed positions depend on it."""
        return self._catalog.fingerprint

    @property
    def io(self) -> IoCounts:
        """The counts of shards, blocks and bytes that this process has read."""
        return self._here().counts

    @property
    def is_local(self) -> bool:
        """True if the set lies on this machine or in a mounted file system."""
        return self._here().layout.is_local

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group, in order; rows of a group are cheap to read together."""
        return self._catalog.block_rows

    def __len__(self) -> int:
        return len(self._places.rows)

    def __repr__(self) -> str:
        return f"Features({self._url()!r}, rows={len(self)}, streams={list(self.streams)})"

    def __iter__(self) -> Iterator[Row]:
        due = 0
        for position in range(len(self)):
            if position == due:
                rows = range(position, min(len(self), position + READ_AHEAD_ROWS))
                due += self._here().ahead.want(rows, in_order=True)
            yield self[position]

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows that are read next, in order: threads fetch and decode them ahead.

        This changes no result. Repeat the call as reading goes on. Blocks that are cached or under
        way are not fetched again; requests for rows that are no longer named are cancelled if they
        have not begun. At most half of `cache_bytes` is read ahead.

        Args:
            rows: Numbers of rows.
            spans_s: Span of each row, (start, stop) in s, or None for the whole row. Streams of
                events and int8 frames are not read ahead in spans.
        """
        self._here().ahead.want([self._position(row) for row in rows], spans_s)

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id.

        Raises:
            KeyError: No good row has this id.
            TypeError: The id is not text.
        """
        if not isinstance(row_id, str):
            raise TypeError(f"row ids are text, got {row_id!r}; rows by number are ds[{row_id!r}]")
        sorted_rows, ids = self._catalog.id_order, self.table.column("row_id")
        at = bisect_left(sorted_rows, row_id, key=lambda row: ids[int(row)].as_py())
        if at == len(sorted_rows) or ids[int(sorted_rows[at])].as_py() != row_id:
            first = f"the first is {ids[0].as_py()!r}, " if len(self) else ""
            raise KeyError(
                f"no row {row_id!r} among the {len(self)} good rows of {self._url()}; {first}"
                "all ids are in ds.table['row_id'], rows that failed in ds.quarantine"
            )
        return int(sorted_rows[at])

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureRows.read_row`."""
        process, places = self._here(), self._places
        row_id, seconds = places.cell("row_id", index), float(places.seconds[index])
        if span_s is not None:
            start_s, stop_s = span_s
            if not 0 <= start_s < seconds or not stop_s > start_s:
                raise ValueError(
                    f"expected 0 <= start_s < stop_s inside the clip of {seconds:g} s (row "
                    f"{row_id!r}), got {start_s} to {stop_s}"
                )
            span_s = start_s, seconds if stop_s == math.inf else stop_s
        process.ahead.settle(index)
        frames = places.frames(index, span_s)
        return Row(
            index=index,
            row_id=row_id,
            seconds=seconds,
            extra={k.removeprefix(EXTRA_PREFIX): places.cell(k, index) for k in self._extras},
            features=self._features(process, index, frames, copy=copy) if frames else {},
            first_frame={name: first for name, (first, _) in frames.items()},
            start_s=0.0 if span_s is None else span_s[0],
        )

    def _features(
        self,
        process: ProcessHandles,
        position: int,
        frames: Mapping[str, tuple[int, int]],
        *,
        copy: bool,
    ) -> dict[str, Any]:
        """Return the frames [first, last) of each stream of a row."""
        features, row_id = {}, self._places.cell("row_id", position)
        with process.lock:
            shard = self._places.shard(position)
            rel, promise = process.file(shard)
            name = next(iter(frames))
            try:
                reader = process.reader(shard)
                for name, span in frames.items():
                    features[name] = self._read(reader, name, position, span, copy=copy)
            except Exception:
                where = f"row {row_id!r}, stream {name}"
                file = f"{process.layout.url()}: the {self.format} file of shard {shard}"
                is_whole = functools.partial(is_as_committed, process.layout, rel, promise)
                with explain_damage(where, file, is_whole):
                    raise
        return features

    def _read(
        self, reader: ShardReader, name: str, position: int, span: tuple[int, int], *, copy: bool
    ) -> Any:
        """Return frames [first, last) of a stream of a row, or the events of these steps."""
        places = self._places

        def read(first: int, last: int) -> Iterable[Piece]:
            stored = places.stored(position, name, first, last)
            if isinstance(reader, BlockReader):
                return reader.pieces(name, stored)
            return [(0, reader.read(name, stored))]

        return places.layouts[name].read(
            read,
            n_stored=int(places.sizes[name][position]),
            n_frames=int(places.lengths[name][position]),
            span=span,
            dtype=self.dtypes[name],
            copy=copy,
        )

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row: uri, hashes, decoder, rates, gain, shard."""
        position, process = self._position(index), self._here()
        with process.lock:
            shard = self._places.shard(position)
            path = rows_path(shard, self._catalog.record(process.layout, shard).attempt)
            if process.rows[0] != path:
                process.rows = (path, read_table(process.layout, path))
            table = process.rows[1]
        names = fact_names(table.column_names, self._catalog.streams.values())
        row, row_id = int(self._places.rows[position]), self._places.cell("row_id", position)
        found = table.select(["row_id", *names]).slice(row, 1).to_pylist()
        if not found or found[0].pop("row_id") != row_id:
            raise CommitError(
                f"{path}: row {row_id!r} is not at its place; the index does "
                "not belong to this table: run `earmill verify`"
            )
        return {"shard": shard, "row": row, **found[0]}

    def close(self) -> None:
        """Close the open files of this process; reading opens them again."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def _here(self) -> ProcessHandles:
        """Return the handles of this process; after a fork, the parent's handles are not touched.
        There is no lock, because a lock that is held during a fork stays locked in the child. Two
        threads that come first may open one handle too many, which is closed with the set."""
        process = self._process
        if process is None or process.pid != os.getpid():
            layout = Layout.open(self._uri, self._storage_options)
            if self._local_cache is not None and not layout.is_local:
                layout = replace(layout, cache=LocalCache(*self._local_cache))
            process = ProcessHandles(
                self._catalog, self._places, layout, self.format, self._cache_bytes
            )
            weakref.finalize(self, process.close)
            self._process = process
        return process

    def _url(self) -> str:
        """Return the URL for messages; unlike the given URI, it holds no credentials."""
        return self._here().layout.url()
