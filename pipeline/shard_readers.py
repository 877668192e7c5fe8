"""Random access into one published shard, Zarr or Parquet, through a cache bounded in bytes.

Both readers answer one question: frames [first, last) of one stream of one row. Zarr fetches the
inner chunks that hold them, Parquet the row group of the row and only that stream's column. Blocks
are kept decoded and read-only; what leaves is always a fresh array, so nobody can edit the cache.
Starts and lengths come from the caller's index; every row is looked up by its id as well, so that
an index of other files gives an error and never the features of another row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from pipeline.errors import CommitError
from pipeline.layout import Layout
from pipeline.sinks.long_rows import LongRows
from pipeline.sinks.parquet import frames_of
from pipeline.snapshot import CLOSE_AGAIN
from pipeline.trust import Promise, check_column, check_parquet
from pipeline.zarr_store import LayoutStore

Block = tuple[np.ndarray, ...]
# Chunks of about 1 MB in one request: bounds what a row of hours holds beside its own result.
MAX_RUN = 64


@dataclass
class IoCounts:
    """What this process has read since the dataset was opened here.

    Args:
        shards_opened: Shard files or stores opened.
        blocks_read: Zarr inner chunks or Parquet row-group columns fetched and decoded.
        bytes_read: Their decoded bytes.
    """

    shards_opened: int = 0
    blocks_read: int = 0
    bytes_read: int = 0


class BlockCache:
    """Decoded blocks, least recently used thrown away first.

    Args:
        max_bytes: Bound on what is kept. The newest block is always kept, even when larger.
        counts: Where reads are counted.
    """

    def __init__(self, max_bytes: int, counts: IoCounts) -> None:
        self.max_bytes = max_bytes
        self.counts = counts
        self.nbytes = 0
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()

    def get(self, key: Hashable) -> Block | None:
        """A kept block, now the most recently used, or None."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: Hashable, block: Block) -> Block:
        """Keep a block that was just read; its arrays become read-only."""
        for array in block:
            array.flags.writeable = False
        size = _nbytes(block)
        self.counts.blocks_read += 1
        self.counts.bytes_read += size
        self._blocks[key] = block
        self.nbytes += size
        while self.nbytes > self.max_bytes and len(self._blocks) > 1:
            self.nbytes -= _nbytes(self._blocks.popitem(last=False)[1])
        return block

    def clear(self) -> None:
        """Drop every block."""
        self._blocks.clear()
        self.nbytes = 0


def _nbytes(block: Block) -> int:
    return sum(array.nbytes for array in block)


@dataclass(frozen=True, slots=True)
class Span:
    """Frames [first, last) of one stream of one row of a shard.

    Args:
        row_id: Name of the row.
        row: Position of the row in its shard.
        start: Where the row's frames start in the shard's stream.
        first: First frame wanted, counted inside the row.
        last: One past the last.
    """

    row_id: str
    row: int
    start: int
    first: int
    last: int


class ShardReader(Protocol):
    """One open shard."""

    def read(self, stream: str, span: Span) -> np.ndarray:
        """A fresh (last - first, width) array in the stored dtype."""

    def close(self) -> None:
        """Let go of file handles."""


class ZarrShard:
    """A shard's Zarr store; reads only the inner chunks a span touches."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self._rel, self._cache = rel, cache
        # Format 2 knows filters that run code; of format 3 the store lets only our codecs through.
        self._group = zarr.open_group(
            LayoutStore(layout, rel, promise), mode="r", zarr_format=3, use_consolidated=True
        )
        self._values: dict[str, Any] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, stream: str, span: Span) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        first, last = span.start + span.first, span.start + span.last
        self._check_row(stream, span)
        values = self._array(stream)
        if last > values.shape[0]:
            raise _outside(self._rel, stream, last, values.shape[0])
        step = values.chunks[0]
        frames = np.empty((last - first, values.shape[1]), values.dtype)
        for chunk, block in self._blocks(stream, values, range(first // step, -(-last // step))):
            low, high = max(first, chunk * step), min(last, (chunk + 1) * step)
            frames[low - first : high - first] = block[low - chunk * step : high - chunk * step]
        return frames

    def close(self) -> None:
        """Nothing to do: stores hold no handle between reads."""

    def _check_row(self, stream: str, span: Span) -> None:
        """Refuse a row that the store has elsewhere or not at all."""
        if stream not in self._rows:
            group = self._group[stream]
            self._rows[stream] = group["row_id"][:], group["row_start"][:]
        ids, starts = self._rows[stream]
        if span.row >= len(ids) or ids[span.row] != span.row_id:
            raise _other_row(self._rel, span, ids[span.row] if span.row < len(ids) else None)
        if starts[span.row] != span.start:
            raise _outside(self._rel, f"{stream}: a start at", span.start, int(starts[span.row]))

    def _array(self, stream: str) -> Any:
        if stream not in self._values:
            self._values[stream] = self._group[f"{stream}/values"]
        return self._values[stream]

    def _blocks(self, stream: str, values: Any, chunks: range) -> Iterator[tuple[int, np.ndarray]]:
        """Decoded chunks with their numbers, in any order; runs of missing ones in one request."""
        step, missing = values.chunks[0], []
        for chunk in chunks:
            block = self._cache.get((self._rel, stream, chunk))
            if block is None:
                missing.append(chunk)
            else:
                yield chunk, block[0]
        for run in _runs(missing):
            joined = values[run[0] * step : (run[-1] + 1) * step]
            for i, chunk in enumerate(run):
                # A copy: a view would keep the whole run alive behind the cache's back.
                piece = joined[i * step : (i + 1) * step].copy()
                yield chunk, self._cache.put((self._rel, stream, chunk), (piece,))[0]


class ParquetShard:
    """A shard's Parquet file; reads one stream's column of the row group of a row."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self._rel, self._promise, self._cache = rel, promise, cache
        self._handle = _open_exact(layout, rel)
        # Not pre-buffered: Arrow's threads would read from, and hold, a Python file.
        self._file = pq.ParquetFile(self._handle, pre_buffer=False, page_checksum_verification=True)
        meta = self._file.metadata
        sizes = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        self._ids: dict[int, list[str]] = {}
        self._first_row = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._long_rows = LongRows.from_metadata(self._file.schema_arrow.metadata)
        check_parquet(rel, self._file, self._long_rows, promise)

    def read(self, stream: str, span: Span) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        first_row = self._long_rows.first(span.row)
        if first_row >= self._first_row[-1]:
            raise _outside(self._rel, "rows", first_row + 1, int(self._first_row[-1]))
        if span.row not in self._long_rows.frames:
            return self._read(stream, span, first_row, span.first, span.last).copy()
        spans = self._long_rows.spans(span.row, stream, span.first, span.last)
        nothing = self._read(stream, span, first_row, 0, 0)
        frames = np.concatenate([nothing, *(self._read(stream, span, *piece) for piece in spans)])
        if len(frames) != span.last - span.first:
            raise _outside(self._rel, stream, span.last, span.first + len(frames))
        return frames

    def _read(self, stream: str, span: Span, file_row: int, first: int, last: int) -> np.ndarray:
        """Frames [first, last) of one row of the file, out of the cache."""
        group = int(np.searchsorted(self._first_row, file_row, side="right")) - 1
        key = (self._rel, stream, group)
        values, offsets = self._cache.get(key) or self._cache.put(key, self._load(stream, group))
        row = file_row - int(self._first_row[group])
        if self._row_ids(group)[row] != span.row_id:
            raise _other_row(self._rel, span, self._row_ids(group)[row])
        start, end = offsets[row : row + 2].tolist()
        if start + last > end:
            raise _outside(self._rel, stream, last, end - start)
        return values[start + first : start + last]

    def _row_ids(self, group: int) -> list[str]:
        # The blocks may be in the cache since an earlier opening of the file.
        if group not in self._ids:
            table = self._file.read_row_group(group, columns=["row_id"], use_threads=False)
            self._ids[group] = table.column("row_id").to_pylist()
        return self._ids[group]

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)
        self._handle.close()

    def _load(self, stream: str, group: int) -> Block:
        """One column of one row group as ((frames, width), row offsets); its ids are kept."""
        check_column(self._rel, self._file, group, stream, self._promise)
        table = self._file.read_row_group(group, columns=["row_id", stream], use_threads=False)
        rows = table.column(stream).combine_chunks()
        if isinstance(rows, pa.ChunkedArray):  # some releases leave a column of one chunk as it is
            rows = rows.chunk(0)
        offsets = rows.offsets.to_numpy().astype(np.int64)
        self._ids[group] = table.column("row_id").to_pylist()
        return frames_of(rows), offsets - offsets[0]


READERS: dict[str, Callable[[Layout, str, Promise, BlockCache], ShardReader]] = {
    "zarr": ZarrShard,
    "parquet": ParquetShard,
}


class OpenShards:
    """The shards one process has open, least recently used closed first.

    Args:
        max_open: File handles at most.
        max_bytes: Bound of the block cache they share.
    """

    def __init__(self, *, max_open: int, max_bytes: int) -> None:
        self.counts = IoCounts()
        self.cache = BlockCache(max_bytes, self.counts)
        self._max_open = max_open
        self._open: OrderedDict[str, ShardReader] = OrderedDict()

    def get(self, layout: Layout, rel: str, fmt: str, promise: Promise) -> ShardReader:
        """The reader of one data file, opened if it is not."""
        if rel not in self._open:
            self._open[rel] = READERS[fmt](layout, rel, promise, self.cache)
            self.counts.shards_opened += 1
        self._open.move_to_end(rel)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)[1].close()
        return self._open[rel]

    def close(self) -> None:
        """Close them all and forget what they held."""
        while self._open:
            self._open.popitem()[1].close()
        self.cache.clear()


def _open_exact(layout: Layout, rel: str) -> Any:
    """A file that fetches the ranges asked for and no more.

    fsspec's default read-ahead would fetch megabytes around each of pyarrow's exact ranges.
    """
    if layout.is_local:
        return pa.OSFile(layout.inside(rel), "rb")
    return layout.fs.open(layout.path(rel), "rb", cache_type="none")


def _runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Group increasing integers into runs without gaps, none longer than a request should be."""
    run: list[int] = []
    for number in numbers:
        if run and (number != run[-1] + 1 or len(run) == MAX_RUN):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _other_row(rel: str, span: Span, found: object) -> CommitError:
    there = "nothing" if found is None else repr(str(found))
    return CommitError(
        f"{rel}: the index has row {span.row_id!r} at {span.row}, the file holds {there} there; "
        f"the index does not belong to this file: {CLOSE_AGAIN}"
    )


def _outside(rel: str, what: str, wanted: int, there: int) -> CommitError:
    return CommitError(
        f"{rel}: the index expects {wanted} of {what}, the file holds {there}; "
        "the file is damaged or does not belong to this index: run `earmill verify`"
    )
