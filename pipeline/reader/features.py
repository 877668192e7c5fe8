"""A feature set: rows by number and by id, and slices in seconds.

Only the frames that are asked for are fetched. Decoded blocks are cached in each process, within a
bound in bytes. A set can be pickled into workers and used after a fork: each process opens the
files anew.
"""

from __future__ import annotations

import hashlib
import operator
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.formats.block_cache import (
    FrameSpan,
    GivesPieces,
    IoCounts,
    Piece,
    ShardReader,
)
from earmill.pipeline.formats.format import explain_damage, format_of, is_as_committed
from earmill.pipeline.formats.moments import StoredMoments, StreamStatistics
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows
from earmill.pipeline.loader.rows import Row, Span, set_table
from earmill.pipeline.loader.statistics import framed
from earmill.pipeline.reader.catalog import (
    Catalog,
    RowLocations,
    fact_names,
    is_extra,
    read_quarantine,
)
from earmill.pipeline.reader.open_shards import OpenShards, ProcessHandles
from earmill.pipeline.reader.read_ahead import LOCAL, REMOTE, ReadAhead
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_cache import LocalCache
from earmill.pipeline.storage.paths import rows_path

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.dataset.description import DatasetFile
    from earmill.pipeline.loader.rows import FeatureRows
    from earmill.pipeline.loader.stream import FeatureDataset, FeatureStream


MAX_OPEN_SHARDS = 128
# Folder of a local cache, and the maximum bytes of its files.
CachePlace = tuple[Path, int]
# Rows that iterating in order names ahead; `ReadAhead` bounds them in bytes.
READ_AHEAD_ROWS = 512


class FeatureSet:
    """Base class of feature sets, which are `FeatureRows` and sequences of `Row`.

    torch is imported when a torch dataset is made.

    Attributes:
        mixture: Rows of each set in an epoch, if sets are mixed by weight; else None.
    """

    mixture: tuple[int, ...] | None = None

    @property
    def dtype(self: FeatureRows) -> np.dtype:
        """The type of frames; the widest if streams differ, as `dtype="stored"` allows."""
        return np.result_type(*self.dtypes.values())

    def __iter__(self: FeatureRows) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def _repr_html_(self: FeatureRows) -> str:
        return set_table(f"{type(self).__name__}: {len(self)} rows", self.streams)

    def block_order(
        self: FeatureRows, *, shuffle: bool, seed: int, epoch: int
    ) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and the epoch for each."""
        rows = order.block_order(self.block_rows(), shuffle=shuffle, seed=seed, epoch=epoch)
        return rows, np.full(len(rows), epoch, np.int64)

    def read_row(
        self: FeatureRows, index: int, span_s: Span | None = None, *, copy: bool = True
    ) -> Row:
        """Read a row, or a span of it, for a collate.

        Args:
            index: The row's number, from 0.
            span_s: Start and end of the span, s; None for the whole row.
            copy: Return fresh arrays. If False, frames may be views of cached blocks (`FrameView`).
        """
        return self[index] if span_s is None else self.slice(index, *span_s)

    def torch(self: FeatureRows, *, label: str | None = None) -> FeatureDataset:
        """Return a map-style torch dataset of rows; `label` names a column of the source."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.loader.stream import FeatureDataset

        return FeatureDataset(self, label=label)

    def iterable(self: FeatureRows, **settings: Any) -> FeatureStream:
        """Return a torch IterableDataset; see `loader.stream.FeatureStream` for the settings."""
        with needed_modules("torch datasets"):
            from earmill.pipeline.loader.stream import FeatureStream

        return FeatureStream(self, **settings)

    def index_of(self, row_id: str) -> int:
        """Return the position of a row id."""
        raise NotImplementedError

    def by_id(self: Any, row_id: str) -> Row:
        """Return the row of an id; raises as `index_of`."""
        row: Row = self[self.index_of(row_id)]
        return row

    def _position(self: FeatureRows, index: SupportsIndex) -> int:
        """Return a row number from 0; negative numbers count from the end."""
        if isinstance(index, str):
            raise TypeError(f"rows are numbered from 0, got {index!r}; use ds.by_id for row ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a feature set with {len(self)} rows")
        return number % len(self)


class CombinedFeatures(FeatureSet):
    """Base class of several sets as one.

    Attributes:
        sets: The sets, in order.
    """

    sets: tuple[Features, ...]

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return sum(each.nbytes for each in self.sets)

    @property
    def is_local(self) -> bool:
        """True if all sets lie on this machine or in a mounted file system."""
        return all(each.is_local for each in self.sets)

    @property
    def fingerprint(self) -> str:
        """Changes when a set changes, or the order of sets; resumed positions depend on it."""
        names = ",".join(each.fingerprint for each in self.sets)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Close the open files of this process; reading opens them again."""
        for each in self.sets:
            each.close()


class Features(FeatureSet):
    """An opened feature set; get one from `open_features`. A sequence of `Row`.

    Safe in several threads (one reads at a time), to pickle, and to use after a fork.
    The pickle holds `storage_options`, credentials included; the text form does not.

    Attributes:
        format: Name of the format that is read.
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
        self._uri = uri
        self._catalog = catalog
        self.format = format
        self._names = tuple(streams)
        self._dtypes = dict(dtypes)
        self._storage_options = storage_options
        self._cache_bytes, self._local_cache = cache_bytes, local_cache
        self._fmt = format_of(format)
        self._places = RowLocations(catalog, streams, self._fmt)
        self._extras = [name for name in catalog.table.column_names if is_extra(name)]
        self._process: ProcessHandles | None = None

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""
        return {name: self._catalog.streams[name] for name in self._names}

    @property
    def table(self) -> pa.Table:
        """One line for each row, in the order of `ds[i]`: ids, seconds, shard, frames, extras."""
        return self._catalog.table

    @property
    def quarantine(self) -> pa.Table:
        """The rows that could not be processed: `row_id`, `uri`, `stage`, `error_class`, `message`,
        `attempts`, `shard`. Each access reads the commits."""
        return read_quarantine(self._here().layout, self._catalog)

    @property
    def dataset(self) -> DatasetFile:
        """The content of dataset.json: spec, versions, streams."""
        return self._catalog.dataset

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream; events are whole numbers in any case."""
        return dict(self._dtypes)

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return int(self._catalog.row_bytes.sum())

    @property
    def moments(self) -> Mapping[str, StoredMoments]:
        """The stored statistics, by stream."""
        return self._catalog.moments

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
                f"{self!r} has no statistics of {missing}: it was written before they were stored; "
                "earmill.compute_statistics(ds) reads every row once and gives them, also for "
                "normalise="
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
        return self._here().shards.counts

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
        return f"Features({self._url()!r}, rows={len(self)}, streams={list(self._names)})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Return a row by number; negative numbers count from the end."""
        return self._row(self._position(index), None)

    def __iter__(self) -> Iterator[Row]:
        due = 0
        for position in range(len(self)):
            if position == due:
                rows = range(position, min(len(self), position + READ_AHEAD_ROWS))
                due += self._ahead().want(rows, in_order=True)
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
        self._ahead().want([self._position(row) for row in rows], spans_s)

    def _ahead(self) -> ReadAhead:
        """Return the read-ahead of this process."""
        process = self._here()
        if process.ahead is None:
            process.ahead = ReadAhead(
                process.needed,
                process.prepare,
                self._places.shard,
                self._places.nbytes,
                process.shards.cache,
                LOCAL if process.layout.is_local else REMOTE,
            )
        return process.ahead

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
            raise KeyError(
                f"no row {row_id!r} among the {len(self)} good rows of {self._url()}; ids are in "
                "ds.table['row_id'], rows that failed in ds.quarantine"
            )
        return int(sorted_rows[at])

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a row that overlap [start_s, stop_s); only these are fetched.

        Frame k stands for the time from k / frame_rate to (k + 1) / frame_rate, so neighbouring
        slices cut at frame times share no frame. `stop_s` past the end, or None, means the end.
        """
        position = self._position(index)
        seconds = float(self._places.seconds[position])
        end_s = seconds if stop_s is None else stop_s
        if not 0 <= start_s < seconds or not end_s > start_s:
            raise ValueError(
                f"expected 0 <= start_s < stop_s inside the clip of {seconds:g} s "
                f"(row {self._places.cell('row_id', position)!r}), got {start_s} to {stop_s}"
            )
        return self._row(position, (start_s, end_s))

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; see `FeatureSet.read_row`."""
        return self._row(index, span_s, copy=copy)

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Return the origin of a row: uri, hashes, decoder, rates, gain, shard."""
        position, process = self._position(index), self._here()
        with process.lock:
            shard = self._places.shard(position)
            path = rows_path(shard, self._catalog.record(process.layout, shard).attempt)
            if process.rows[0] != path:
                process.rows = (path, read_table(process.layout, path))
            table = process.rows[1]
        names = fact_names(table, self._catalog.streams)
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
        if self._process is not None:
            self._process.close()
            self._process = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_process", "_fmt")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=None, _fmt=format_of(state["format"]))

    def _here(self) -> ProcessHandles:
        """Return the handles of this process; after a fork, the parent's handles are not touched.

        There is no lock, because a lock that is held during a fork stays locked in the child. Two
        threads that come first together may open one handle too many, which is closed with the set.
        """
        if self._process is None or self._process.pid != os.getpid():
            layout = Layout.open(self._uri, self._storage_options)
            if self._local_cache is not None and not layout.is_local:
                layout = replace(layout, cache=LocalCache(*self._local_cache))
            shards = OpenShards(
                max_open=MAX_OPEN_SHARDS, max_bytes=self._cache_bytes, reads=self._names
            )
            place = self._catalog, self._places, self._fmt, self.format
            self._process = ProcessHandles(*place, layout, shards)
            weakref.finalize(self, self._process.close)
        return self._process

    def _url(self) -> str:
        """Return the URL for messages; unlike the given URI, it holds no credentials."""
        return self._here().layout.url()

    def _row(self, position: int, span_s: Span | None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it."""
        process, places = self._here(), self._places
        if process.ahead is not None:
            process.ahead.settle(position)
        row_id, frames = places.cell("row_id", position), places.frames(position, span_s)
        features = {}
        with process.lock:
            shard = places.shard(position)
            rel, promise = process.file(shard)
            for name, span in places.stored(position, row_id, frames).items():
                try:
                    reader = process.reader(shard)
                    features[name] = self._read(reader, name, span, position, copy=copy)
                except Exception:
                    where = f"row {row_id!r}, stream {name}"
                    file = f"{process.layout.url()}: the {self.format} file of shard {shard}"
                    is_whole = partial(is_as_committed, process.layout, rel, promise)
                    with explain_damage(where, file, is_whole):
                        raise
        extras = {k.removeprefix(EXTRA_PREFIX): places.cell(k, position) for k in self._extras}
        return Row(
            index=position,
            row_id=row_id,
            seconds=float(places.seconds[position]),
            extra=extras,
            features=features,
            first_frame={name: first for name, (first, _) in frames.items()},
        )

    def _read(
        self, reader: ShardReader, name: str, frames: FrameSpan, position: int, *, copy: bool
    ) -> Any:
        """Return frames of a stream of a row, or the events of these steps."""

        def read(first: int, last: int) -> Iterable[Piece]:
            whole = first == frames.first and last == frames.last
            span = frames if whole else replace(frames, first=first, last=last)
            # isinstance would look up every method of the protocol on each call.
            if hasattr(reader, "pieces"):
                return cast(GivesPieces, reader).pieces(name, span)
            return [(0, reader.read(name, span))]

        return self._places.layouts[name].read(
            read,
            n_stored=int(self._places.sizes[name][position]),
            n_frames=int(self._places.lengths[name][position]),
            span=(frames.first, frames.last),
            dtype=self._dtypes[name],
            copy=copy,
        )
