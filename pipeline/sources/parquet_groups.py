"""Parquet files by their footers: row groups, where their columns lie, and rows out of one of them.

    column chunks of row group 0 | of row group 1 | ... | footer | its length | PAR1

The footer says where each column chunk lies and how large it is. So rows can be counted, their
small columns read and their audio fetched a row group at a time, all by ranges.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources.base import stat_fields
from earmill.pipeline.sources.ranges import Range, SparseFile, merged, read_range

MAGIC = b"PAR1"
END_BYTES = 8
MOST_FOOTER_BYTES = 256 << 20
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Group:
    """One row group.

    Args:
        number: In its file. first_row: Its first row there. rows: How many it has.
    """

    number: int
    first_row: int
    rows: int


class ParquetTable:
    """One Parquet file of which the footer was read.

    Args:
        fs, path: Where it is. size: Its bytes. stat: etag and mtime when the footer was read.
        metadata: The footer.
    """

    def __init__(
        self, fs: Any, path: str, size: int, stat: dict[str, Any], metadata: pq.FileMetaData
    ) -> None:
        self.fs, self.path, self.size, self.stat = fs, path, size, stat
        self.metadata = metadata

    @cached_property
    def schema(self) -> pa.Schema:
        return self.metadata.schema.to_arrow_schema()

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        found, first = [], 0
        for number in range(self.metadata.num_row_groups):
            rows = self.metadata.row_group(number).num_rows
            found.append(Group(number, first, rows))
            first += rows
        return tuple(group for group in found if group.rows)

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)

    def group_of(self, row: int) -> Group:
        """The row group that holds a row; IndexError where the file ends before it."""
        for group in self.groups:
            if group.first_row <= row < group.first_row + group.rows:
                return group
        raise IndexError(f"{self.path}: ends before row {row}")

    def leaves(self, column: str) -> dict[str, int]:
        """The leaves of a column: path below it (empty for the column itself) to number."""
        found = {}
        for number in range(self.metadata.num_columns):
            path = self.metadata.schema.column(number).path
            if path == column or path.startswith(f"{column}."):
                found[path[len(column) + 1 :]] = number
        return found

    def chunk(self, group: Group, leaf: str) -> pq.ColumnChunkMetaData:
        """A column chunk, by the path of its leaf."""
        (number,) = self.leaves(leaf).values()
        return self.metadata.row_group(group.number).column(number)

    def ranges(self, group: Group, columns: Sequence[str]) -> list[Range]:
        """Where these columns (or single leaves, by their path) of a row group lie."""
        found = [
            chunk_range(self.metadata.row_group(group.number).column(number))
            for column in columns
            for number in self.leaves(column).values()
        ]
        return merged(found)

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        """Some columns of a row group, of which all bytes are read now."""
        ranges = self.ranges(group, columns)
        content = b"".join(read_range(self.fs, self.path, one) for one in ranges)
        batches = list(self.batches(group, columns, BytesIO(content), ranges, group.rows))
        return pa.Table.from_batches(batches)

    def batches(
        self,
        group: Group,
        columns: Sequence[str],
        stream: BinaryIO,
        ranges: Sequence[Range] | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of a row group, a few rows at a time.

        Args:
            stream: The bytes of `ranges` one behind the other; of the whole file where that is
                None.
        """
        source: Any = stream if ranges is None else SparseFile(stream, ranges, self.size)
        file = pq.ParquetFile(
            source, metadata=self.metadata, pre_buffer=False, buffer_size=BUFFER_BYTES
        )
        yield from file.iter_batches(
            batch_size=batch_rows,
            row_groups=[group.number],
            columns=list(columns),
            use_threads=False,
        )

    def has(self, etag: str | None, mtime: float | None) -> bool:
        """Whether the file is the one that had this tag or time; yes where nothing is known."""
        now = self.stat
        if etag is not None and now["etag"] is not None:
            return bool(etag == now["etag"])
        return mtime is None or now["mtime"] is None or bool(mtime == now["mtime"])


def read_footer(fs: Any, path: str) -> ParquetTable:
    """The footer of a Parquet file, by two ranges: its length, then itself and nothing more.

    Raises:
        SourceError: It is no Parquet file, or its footer is damaged.
    """
    stat = stat_fields(fs.info(path))
    size = stat.pop("size")
    if size is None:
        raise SourceError(f"{path}: its size is not known, so its footer cannot be found")
    end = read_range(fs, path, Range(max(0, size - END_BYTES), size))
    if size < END_BYTES + len(MAGIC) or not end.endswith(MAGIC):
        raise SourceError(f"{path}: expected a Parquet file, got one that does not end in PAR1")
    nbytes = struct.unpack("<I", end[:4])[0] + END_BYTES
    if nbytes > min(size, MOST_FOOTER_BYTES):
        raise SourceError(f"{path}: damaged, its footer claims to have {nbytes:,} bytes")
    footer = read_range(fs, path, Range(size - nbytes, size - END_BYTES)) + end
    try:  # Arrow reads footers 64 KB at a time, so it is shown a file of nothing else
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path}: its footer cannot be read: {error}") from error
    return ParquetTable(fs, path, size, stat, metadata)


def chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    """Where a column chunk lies, its dictionary included."""
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return Range(start, start + chunk.total_compressed_size)
