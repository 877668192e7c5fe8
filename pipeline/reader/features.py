"""One feature set: rows by number, by id, and slices in seconds, from Zarr or Parquet.

Nothing but the frames that were asked for is fetched; decoded blocks are kept per process within a
bound in bytes. A set can be pickled into workers and survives a fork: handles are opened again
wherever it is used.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import (
    FrameSpan,
    GivesPieces,
    IoCounts,
    Piece,
)
from earmill.pipeline.formats.format import is_as_committed, named_damage
from earmill.pipeline.formats.moments import StoredMoments, StreamStatistics
from earmill.pipeline.formats.registry import format_of
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.loader.rows import Row
from earmill.pipeline.loader.statistics import framed
from earmill.pipeline.reader.catalog import Catalog, read_quarantine
from earmill.pipeline.reader.feature_set import FeatureSet
from earmill.pipeline.reader.index_rows import fact_names, is_extra
from earmill.pipeline.reader.open_shards import OpenShards
from earmill.pipeline.reader.process import Process, needed, prepare
from earmill.pipeline.reader.read_ahead import LOCAL, REMOTE, ReadAhead
from earmill.pipeline.reader.row_places import RowPlaces
from earmill.pipeline.reader.shard_paths import ShardPaths
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_cache import LocalCache

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.dataset.description import DatasetFile

MAX_OPEN_SHARDS = 128
# Folder of a local cache, and its bytes at most.
CachePlace = tuple[Path, int]
# Rows that iterating in order names ahead; `ReadAhead` bounds them in bytes.
READ_AHEAD_ROWS = 512
# Of each stream, where rows are read in order: two that a row lies in, and as many behind it.
SCANNED_BLOCKS = 4


class Features(FeatureSet):
    """An opened feature set; get one from `open_features`. A sequence of `Row`.

    Safe to use from several threads (one reads at a time), to pickle, and to use after a fork.
    The pickle holds `storage_options`, credentials included; the text form does not.

    Attributes:
        format: The one that is read.
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
        self._places = RowPlaces(catalog, streams, format_of(format))
        self._extras = [name for name in catalog.table.column_names if is_extra(name)]
        self._process: Process | None = None

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""
        return {name: self._catalog.streams[name] for name in self._names}

    @property
    def table(self) -> pa.Table:
        """One line a row, in the order of `ds[i]`: ids, seconds, shard, frames, extra columns."""
        return self._catalog.table

    @property
    def quarantine(self) -> pa.Table:
        """The rows that could not be processed, as the commits name them: `row_id`, `uri`, `stage`,
        `error_class`, `message`, `attempts`, `shard`. Read when asked for."""
        return read_quarantine(self._here().layout, self._catalog)

    @property
    def dataset(self) -> DatasetFile:
        """The content of dataset.json: spec, versions, streams."""
        return self._catalog.dataset

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream; events are whole numbers whatever it says."""
        return dict(self._dtypes)

    @property
    def dtype(self) -> np.dtype:
        """The type of frames, the widest where streams differ, as `dtype="stored"` allows."""
        return np.result_type(*self._dtypes.values())

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""
        return int(self._catalog.row_bytes.sum())

    @property
    def moments(self) -> Mapping[str, StoredMoments]:
        """The statistics as they are stored, of the streams that have them."""
        return self._catalog.moments

    @property
    def statistics(self) -> dict[str, StreamStatistics]:
        """Mean, variance and range of every stream of frames, column by column over all good rows;
        before the dataset is closed, over those committed by now.

        Raises:
            CommitError: The set was written before they were stored: see `compute_statistics`.
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
        """Changes when rows are added or the spec changes; a resumed position depends on it."""
        return self._catalog.fingerprint

    @property
    def io(self) -> IoCounts:
        """What this process has read so far."""
        return self._here().shards.counts

    @property
    def is_local(self) -> bool:
        """Whether it lies in files of this machine, or in what it has mounted."""
        return self._here().layout.is_local

    def block_rows(self) -> np.ndarray:
        """Rows per row group, in order: what is cheap to read together."""
        return self._catalog.block_rows

    def __len__(self) -> int:
        return len(self._places.rows)

    def __repr__(self) -> str:
        return f"Features({self._url()!r}, rows={len(self)}, streams={list(self._names)})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Row by number; negative numbers count from the end."""
        position = self._position(index)
        return self._row(position, self._places.all_frames(position))

    def __iter__(self) -> Iterator[Row]:
        due = 0
        with self._scan():
            for position in range(len(self)):
                if position == due:
                    rows = range(position, min(len(self), position + READ_AHEAD_ROWS))
                    due += self._ahead().want(rows, in_order=True)
                yield self[position]

    def _scan(self) -> AbstractContextManager[None]:
        """Of a set that the cache does not hold no block is there when its turn comes again."""
        cache = self._here().shards.cache
        if self._places.all_bytes <= cache.max_bytes:
            return nullcontext()
        return cache.scan(SCANNED_BLOCKS * len(self._names))

    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[tuple[float, float] | None] | None = None
    ) -> None:
        """Say which rows are read next, the first of them now: threads fetch and decode ahead.

        Nothing depends on it but the time that reading takes. Call it again as reading goes on,
        with rows that were named before: what is there or under way is not fetched again, and what
        is no longer named is given up if it has not begun. It goes as far as half of `cache_bytes`.

        Args:
            rows: By number.
            spans_s: Of each row the stretch that is read, (start, stop) in s, or None for all of
                it; for a stretch nothing is read ahead of streams of events and those in int8.
        """
        self._ahead().want([self._position(row) for row in rows], spans_s)

    def _ahead(self) -> ReadAhead:
        """What reads ahead in this process."""
        process = self._here()
        if process.ahead is None:
            place = process, self._catalog, self._places, self.format
            process.ahead = ReadAhead(
                partial(needed, *place),
                partial(prepare, *place),
                self._places.shard,
                self._places.nbytes,
                process.shards.cache,
                LOCAL if process.layout.is_local else REMOTE,
            )
        return process.ahead

    def by_id(self, row_id: str) -> Row:
        """Row by its id.

        Raises:
            KeyError: No good row has it. TypeError: Not text.
        """
        return self[self.index_of(row_id)]

    def index_of(self, row_id: str) -> int:
        """Position of a row id; raises as `by_id`."""
        if not isinstance(row_id, str):
            raise TypeError(f"row ids are text, got {row_id!r}; rows by number are ds[{row_id!r}]")
        order, ids = self._catalog.id_order, self.table.column("row_id")
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if ids[int(order[middle])].as_py() < row_id:
                low = middle + 1
            else:
                high = middle
        if low == len(order) or ids[int(order[low])].as_py() != row_id:
            raise KeyError(
                f"no row {row_id!r} among the {len(self)} good rows of {self._url()}; ids are in "
                "ds.table['row_id'], rows that failed in ds.quarantine"
            )
        return int(order[low])

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """The frames of a row that overlap [start_s, stop_s), fetching only what holds them.

        Frame k stands for the time from k / frame_rate to (k + 1) / frame_rate, so neighbouring
        slices cut at frame times share no frame. `stop_s` past the end, or None, means the end.
        """
        position = self._position(index)
        seconds = self._places.seconds(position)
        end_s = seconds if stop_s is None else stop_s
        if not 0 <= start_s < seconds or not end_s > start_s:
            raise ValueError(
                f"expected 0 <= start_s < stop_s inside the clip of {seconds:g} s "
                f"(row {self._places.scalar('row_id', position)!r}), got {start_s} to {stop_s}"
            )
        return self._row(position, self._places.frames(position, (start_s, end_s)))

    def provenance(self, index: SupportsIndex) -> dict[str, Any]:
        """Where a row came from: uri, hashes, decoder, rates, gain, shard."""
        position = self._position(index)
        process = self._here()
        with process.lock:
            shard, paths = self._shard_of(process, position)
            if process.rows[0] != paths.rows:
                process.rows = (paths.rows, read_table(process.layout, paths.rows))
            table = process.rows[1]
        names = fact_names(table, self._catalog.streams)
        row, row_id = int(self._places.rows[position]), self._places.scalar("row_id", position)
        found = table.select(["row_id", *names]).slice(row, 1).to_pylist()
        if not found or found[0].pop("row_id") != row_id:
            raise CommitError(
                f"{paths.rows}: row {row_id!r} is not at its place; the index does "
                "not belong to this table: run `earmill verify`"
            )
        return {"shard": shard, "row": row, **found[0]}

    def close(self) -> None:
        """Close what this process has open; reading again opens it anew."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def _here(self) -> Process:
        """This process's handles; after a fork the parent's are left alone.

        Without a lock, as one held during a fork would never open again in the child: two threads
        that come first together may open one set too many, which goes with the object.
        """
        if self._process is None or self._process.pid != os.getpid():
            layout = Layout.open(self._uri, self._storage_options)
            if self._local_cache is not None and not layout.is_local:
                layout = replace(layout, cache=LocalCache(*self._local_cache))
            bounds = {"max_open": MAX_OPEN_SHARDS, "max_bytes": self._cache_bytes}
            shards = OpenShards(**bounds, reads=self._names)
            self._process = Process(layout, shards)
            weakref.finalize(self, self._process.close)
        return self._process

    def _url(self) -> str:
        """For messages: without credentials, unlike the URI that was given."""
        return self._here().layout.url()

    def _position(self, index: SupportsIndex) -> int:
        if isinstance(index, str):
            raise TypeError(f"rows are numbered from 0, got {index!r}; use ds.by_id for row ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a feature set with {len(self)} rows")
        return number % len(self)

    def _row(self, position: int, frames: Mapping[str, tuple[int, int]]) -> Row:
        process, places = self._here(), self._places
        if process.ahead is not None:
            process.ahead.settle(position)
        row_id = places.scalar("row_id", position)
        with process.lock:
            shard, paths = self._shard_of(process, position)
            features = {}
            for name, span in places.spans(position, row_id, frames).items():
                try:
                    features[name] = self._read(process, paths, name, span, position)
                except Exception:
                    where = f"row {row_id!r}, stream {name}"
                    file = f"{process.layout.url()}: the {self.format} file of shard {shard}"
                    held = process.layout, paths.data[self.format], paths.promises[self.format]
                    with named_damage(where, file, partial(is_as_committed, *held)):
                        raise
        return Row(
            index=position,
            row_id=row_id,
            seconds=places.seconds(position),
            extra={
                name.removeprefix(EXTRA_PREFIX): places.scalar(name, position)
                for name in self._extras
            },
            features=features,
            first_frame={name: first for name, (first, _) in frames.items()},
        )

    def _read(
        self, process: Process, paths: ShardPaths, name: str, frames: FrameSpan, position: int
    ) -> Any:
        """Frames of a stream of a row, or the events of these steps."""
        reader, places = process.reader(paths, self.format), self._places

        def read(first: int, last: int) -> Iterable[Piece]:
            whole = first == frames.first and last == frames.last
            span = frames if whole else replace(frames, first=first, last=last)
            # Not isinstance: a protocol looks for its methods anew each time.
            if hasattr(reader, "pieces"):
                return cast(GivesPieces, reader).pieces(name, span)
            return [(0, reader.read(name, span))]

        return places.layouts[name].read(
            read,
            n_stored=int(places.sizes[name][position]),
            n_frames=int(places.lengths[name][position]),
            span=(frames.first, frames.last),
            dtype=self._dtypes[name],
        )

    def _shard_of(self, process: Process, position: int) -> tuple[str, ShardPaths]:
        shard = self._places.shard(position)
        return shard, self._catalog.shard_paths(process.layout, shard)
