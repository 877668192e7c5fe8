"""Random access to one Parquet file: row groups, decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import (
    BlockCache,
    DecodedBlock,
    FrameSpan,
    other_row,
    outside,
)
from earmill.pipeline.formats.parquet.footer import read_footer
from earmill.pipeline.formats.parquet.long_rows import LongRows
from earmill.pipeline.formats.parquet.trust import check_column, check_parquet, leaf_columns
from earmill.pipeline.formats.trust import Promise
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile


class ParquetShard:
    """A shard's Parquet file; reads one stream's column of the row group of a row."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self.rel, self._promise, self._cache = rel, promise, cache
        self._reading = Lock()
        if rel not in promise.files:
            raise CommitError(f"{layout.url(rel)} is missing from the commit; run `earmill verify`")
        footer = read_footer(StoredFile(layout, rel, promise.files[rel].bytes))
        self._handle = _open_exact(layout, rel)
        # Not pre-buffered: Arrow's threads would read from, and hold, a Python file.
        self._file = pq.ParquetFile(
            self._handle, metadata=footer, pre_buffer=False, page_checksum_verification=True
        )
        meta = self._file.metadata
        sizes = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        self._ids: dict[int, list[str]] = {}
        self._first_row = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._long_rows = LongRows.from_metadata(self._file.schema_arrow.metadata)
        check_parquet(rel, self._file, self._long_rows, promise)
        self._columns = leaf_columns(self._file, promise.columns)

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        first_row = self._long_rows.first(span.row)
        if first_row >= self._first_row[-1]:
            raise outside(self.rel, "rows", first_row + 1, int(self._first_row[-1]))
        if span.row not in self._long_rows.frames:
            return self._read(stream, span, first_row, span.first, span.last).copy()
        spans = self._long_rows.spans(span.row, stream, span.first, span.last)
        nothing = self._read(stream, span, first_row, 0, 0)
        frames = np.concatenate([nothing, *(self._read(stream, span, *piece) for piece in spans)])
        if len(frames) != span.last - span.first:
            raise outside(self.rel, stream, span.last, span.first + len(frames))
        return frames

    def _read(
        self, stream: str, span: FrameSpan, file_row: int, first: int, last: int
    ) -> np.ndarray:
        """Frames [first, last) of one row of the file, out of the cache."""
        group = int(np.searchsorted(self._first_row, file_row, side="right")) - 1
        key = (self.rel, stream, group)
        values, offsets = self._cache.loaded(key, partial(self._load, stream, group))
        row = file_row - int(self._first_row[group])
        if self._row_ids(group)[row] != span.row_id:
            raise other_row(self.rel, span, self._row_ids(group)[row])
        start, end = offsets[row : row + 2].tolist()
        if start + last > end:
            raise outside(self.rel, stream, last, end - start)
        return values[start + first : start + last]

    def prepare(self, streams: Iterable[str]) -> None:
        """The footer is there."""

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """The row groups that hold a row; see `ReadsAhead`."""
        first = self._long_rows.first(span.row)
        parts = np.arange(first, first + self._long_rows.parts(span.row))
        return np.unique(np.searchsorted(self._first_row, parts, side="right") - 1).tolist()

    def requests(self, stream: str, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Each row group by itself; see `ReadsAhead`."""
        return ([group] for group in blocks)

    def load(self, stream: str, blocks: Sequence[int]) -> None:
        """See `ReadsAhead`."""
        for group in blocks:
            self._cache.put((self.rel, stream, group), self._load(stream, group))

    def _row_ids(self, group: int) -> list[str]:
        # The blocks may be in the cache since an earlier opening of the file.
        if group not in self._ids:
            with self._reading:
                table = self._file.read_row_group(group, columns=["row_id"], use_threads=False)
            self._ids[group] = table.column("row_id").to_pylist()
        return self._ids[group]

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._file.close(force=True)
            self._handle.close()

    def _load(self, stream: str, group: int) -> DecodedBlock:
        """One column of one row group as ((frames, width), row offsets); its ids are kept."""
        column = self._columns[stream]
        check_column(self.rel, self._file, group, stream, column, self._promise)
        with self._reading:  # Arrow's reader of a file is for one thread
            table = self._file.read_row_group(group, columns=["row_id", stream], use_threads=False)
        chunks = table.column(stream).chunks
        cells = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        self._ids[group] = table.column("row_id").to_pylist()
        return column[0].frames(cells, *self._promise.columns[stream])


def _open_exact(layout: Layout, rel: str) -> Any:
    """A file that fetches the ranges asked for and no more.

    fsspec's default read-ahead would fetch megabytes around each of pyarrow's exact ranges.
    """
    if layout.is_local:
        return pa.OSFile(layout.inside(rel), "rb")
    return layout.fs.open(layout.path(rel), "rb", cache_type="none")
