"""Parquet files of a streamed dataset: planned from footers, fetched by row groups.

    column chunks of row group 0 | of row group 1 | ... | footer | its length | PAR1

All reads are range requests. Planning reads the footer of each file, the columns beside the audio,
and the beginning of a clip in the first file and in each large file. The duration of a row is
estimated from the bytes of its row group. A worker compares the tag or time of the file with the
plan, and fetches the audio of a row group once; shards are cut between row groups.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import BytesIO
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.table import cast_array_to_feature
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import joined_ranges
from earmill.pipeline.common.errors import RowError, SourceError, UnreadableError
from earmill.pipeline.sources import base, fetch
from earmill.pipeline.sources.audio_cells import NOTHING, RATE_NAMES, AudioCell, check_audio_type
from earmill.pipeline.sources.base import Item
from earmill.pipeline.sources.durations import ByteRate
from earmill.pipeline.sources.fetch import Blob, Range, SparseFile
from earmill.pipeline.sources.hf_location import ParquetSet, RowPlace
from earmill.pipeline.storage.documents import chunk_range

MAGIC = b"PAR1"
END_BYTES = 8
MOST_FOOTER_BYTES = 256 << 20
MOST_GROUPS = 1 << 32  # More row groups than a file has.
BUFFER_BYTES = 1 << 20
LISTING_THREADS = 16
TABLES_KEPT = 256
ROWS_AT_ONCE = 16
HEAD_BYTES = 4096  # First bytes of a column chunk in which the first clip is searched.
LARGE_BYTES = 1 << 20

Row = Mapping[str, Any]


class Group(NamedTuple):
    """A row group: its number in the file, number of its first row, number of rows."""

    number: int
    first_row: int
    rows: int


@dataclass(frozen=True, eq=False)
class ParquetTable:
    """A Parquet file whose footer (`metadata`) was read, and its etag and mtime at that time."""

    fs: Any
    path: str
    size: int
    stat: dict[str, Any]
    metadata: pq.FileMetaData

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @cached_property
    def schema(self) -> pa.Schema:
        return self.metadata.schema.to_arrow_schema()

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        rows = [self.metadata.row_group(n).num_rows for n in range(self.metadata.num_row_groups)]
        places = enumerate(zip(accumulate(rows, initial=0), rows, strict=False))
        return tuple(Group(number, first, count) for number, (first, count) in places if count)

    def group_of(self, row: int) -> Group:
        """Return the row group that holds a row; IndexError if the file ends before it."""
        for group in self.groups:
            if group.first_row <= row < group.first_row + group.rows:
                return group
        raise IndexError(f"{self.path}: ends before row {row}")

    def leaves(self, column: str) -> dict[str, int]:
        """Return the leaves of a column: path below it (empty for the column) to number."""
        paths = [self.metadata.schema.column(n).path for n in range(self.metadata.num_columns)]
        return {
            path[len(column) + 1 :]: number
            for number, path in enumerate(paths)
            if path == column or path.startswith(f"{column}.")
        }

    def chunk(self, group: Group, leaf: str) -> pq.ColumnChunkMetaData:
        """Return a column chunk by the path of its leaf."""
        (number,) = self.leaves(leaf).values()
        return self.metadata.row_group(group.number).column(number)

    def ranges(self, group: Group, columns: Sequence[str]) -> list[Range]:
        """Return the ranges of columns (or of leaves, by path) of a row group."""
        found = joined_ranges(
            chunk_range(self.metadata.row_group(group.number).column(number))
            for column in columns
            for number in self.leaves(column).values()
        )
        return [*map(Range._make, found)]

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        """Read some columns of a row group at once."""
        ranges = self.ranges(group, columns)
        content = b"".join(fetch.read_range(self.fs, self.path, one) for one in ranges)
        return pa.Table.from_batches(
            self.batches(group, columns, BytesIO(content), ranges, group.rows)
        )

    def batches(
        self,
        group: Group,
        columns: Sequence[str],
        stream: BinaryIO,
        ranges: Sequence[Range] | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Yield some columns of a row group, a few rows at a time. The stream holds the bytes of
        `ranges`, concatenated, or the whole file."""
        source: Any = stream if ranges is None else SparseFile(stream, ranges, self.size)
        file = pq.ParquetFile(
            source, metadata=self.metadata, pre_buffer=False, buffer_size=BUFFER_BYTES
        )
        yield from file.iter_batches(batch_rows, [group.number], list(columns), use_threads=False)

    def has(self, etag: str | None, mtime: float | None) -> bool:
        """Return True unless the tag or the time of the file differs."""
        pairs = [(etag, self.stat["etag"]), (mtime, self.stat["mtime"])]
        known = [planned == now for planned, now in pairs if None not in (planned, now)]
        return not known or known[0]


def read_footer(fs: Any, path: str) -> ParquetTable:
    """Read the footer of a Parquet file by two ranges: its length, then the footer."""
    stat = base.stat_fields(fs.info(path))
    size = stat.pop("size")
    if size is None:
        raise SourceError(f"{path}: its size is not known, so its footer cannot be found")
    end = fetch.read_range(fs, path, Range(max(0, size - END_BYTES), size))
    if size < END_BYTES + len(MAGIC) or not end.endswith(MAGIC):
        raise SourceError(f"{path}: expected a Parquet file, got one that does not end in PAR1")
    nbytes = struct.unpack("<I", end[:4])[0] + END_BYTES
    if nbytes > min(size, MOST_FOOTER_BYTES):
        raise SourceError(f"{path}: damaged, its footer claims to have {nbytes:,} bytes")
    footer = fetch.read_range(fs, path, Range(size - nbytes, size - END_BYTES)) + end
    try:  # Arrow reads the last 64 KB of a file, so it gets a file that is only the footer
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path}: its footer cannot be read: {error}") from error
    return ParquetTable(fs, path, size, stat, metadata)


@dataclass(frozen=True)
class ListedRow:
    """A row as it is listed. Only a row that is known from a footer has the last three fields."""

    place: RowPlace
    cells: Row  # Its small columns.
    audio: AudioCell = NOTHING  # A view of its audio cell; with a footer, only its path.
    in_cell: bool = False  # The audio is or may be in the cell, whatever its path.
    estimated_s: float | None = None  # By the bytes of its row group, if they are there.
    block: int | None = None  # Number of its row group among all files.
    stat: Mapping[str, Any] = field(default_factory=dict)  # etag and mtime of its file.

    @property
    def is_outside(self) -> bool:
        """Return True if the audio is at the path."""
        return not self.in_cell and self.audio.data is None and self.audio.samples is None


class _Asked(NamedTuple):
    """A requested row and its row group."""

    item: Item
    table: ParquetTable
    group: Group
    row: int

    def is_behind(self, last: _Asked) -> bool:
        return self.table is last.table and self.group == last.group and self.row >= last.row


Refused = tuple[Item, RowError]


class ParquetRows:
    """The rows of one split of Parquet files."""

    def __init__(
        self, files: ParquetSet, audio_column: str, array_rate_hz: int | None = None
    ) -> None:
        self._files, self._audio, self._array_rate_hz = files, audio_column, array_rate_hz

        @lru_cache(TABLES_KEPT)
        def table(shard: int) -> ParquetTable:
            if not 0 <= shard < len(files.uris):
                raise IndexError(f"the dataset has {len(files.uris)} files, no file {shard}")
            uri = files.uris[shard]
            return read_footer(*base.object_of(uri, files.options(uri)))

        self._table = table
        self.features: Any = files.features
        if self.features is None:
            schema = base.retry_listing(lambda: self._table(0)).schema
            self.features = datasets.Features.from_arrow_schema(schema)

    def rows(self, columns: Sequence[str], *, paths: bool) -> Iterator[ListedRow]:
        """Yield every row in order with these columns, and with the paths of audio cells."""
        first = base.retry_listing(lambda: self._rate(self._table(0), ByteRate()))

        def listed(shard: int) -> list[ListedRow]:
            return base.retry_listing(lambda: list(self._rows_of(shard, columns, paths, first)))

        for rows in fetch.ahead(listed, range(len(self._files.uris)), LISTING_THREADS):
            yield from rows

    def _rows_of(
        self, shard: int, columns: Sequence[str], paths: bool, first: ByteRate
    ) -> Iterator[ListedRow]:
        table = self._table(shard)
        foreign = [name for name in table.schema.names if name not in self.features]
        if foreign or not table.leaves(self._audio):  # `datasets` refuses such files as well
            raise SourceError(
                f"{table.path}: expected the columns of the other files "
                f"({', '.join(self.features)}), got {', '.join(table.schema.names)}"
            )
        check_audio_type(self._audio, table.schema.field(self._audio).type, self._array_rate_hz)
        rate = self._rate(table, first) if shard and table.size >= LARGE_BYTES else first
        audio = self._audio_leaves(table) if paths else {}
        small = [audio[role] for role in ("path", "rate") if role in audio]
        leaves = [*(name for name in columns if table.leaves(name)), *small]
        for group in table.groups:
            read = table.read(group, leaves) if leaves else None
            cells = self._cells(read, columns, group.rows)
            names = self._audio_field(read, audio.get("path"), group.rows)
            nbytes, in_file = self._audio_bytes(table, group)
            seconds: list[float | None]
            if "array" in audio:
                in_file = None
                samples = table.chunk(group, audio["array"]).num_values / group.rows
                rates = [
                    hz if isinstance(hz, int | float) else self._array_rate_hz
                    for hz in self._audio_field(read, audio.get("rate"), group.rows)
                ]
                seconds = [samples / hz if hz else 0.0 for hz in rates]
            elif in_file is False:
                seconds = [None] * group.rows
            else:
                seconds = [rate.seconds(name, nbytes) for name in names]
            block = shard * MOST_GROUPS + group.number
            facts = zip(cells, names, seconds, strict=True)
            for row, (values, name, expected_s) in enumerate(facts, group.first_row):
                place, clip = RowPlace(shard, row), AudioCell(path=name)
                is_inside = in_file is not False
                yield ListedRow(place, values, clip, is_inside, expected_s, block, table.stat)

    def _cells(self, read: pa.Table | None, columns: Sequence[str], rows: int) -> list[Row]:
        held = {name: [None] * rows for name in columns}
        for name in columns:
            if read is not None and name in read.column_names:
                column = read.column(name).combine_chunks()
                held[name] = cast_array_to_feature(column, self.features[name]).to_pylist()
        return [{name: cells[row] for name, cells in held.items()} for row in range(rows)]

    def _audio_field(self, read: pa.Table | None, leaf: str | None, rows: int) -> list[Any]:
        """Return the values of a leaf of the audio column, which may be the column."""
        if read is None or leaf is None:
            return [None] * rows
        cells = read.column(self._audio).to_pylist()
        if leaf == self._audio:
            return list(cells)
        name = leaf.removeprefix(f"{self._audio}.")
        return [None if cell is None else cell.get(name) for cell in cells]

    def _audio_leaves(self, table: ParquetTable) -> dict[str, str]:
        """Return the leaves of the audio by role: bytes, path, array and rate (of an array)."""
        names = list(table.leaves(self._audio))
        kind = table.schema.field(self._audio).type
        if not pa.types.is_struct(kind):
            if "" not in names:
                lists = [name for name in names if name.startswith("list.")]
                return {"array": f"{self._audio}.{lists[0]}"} if lists else {}
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            return {"path" if is_text else "bytes": self._audio}
        found: dict[str, str] = {name: name for name in ("bytes", "path") if name in names}
        if arrays := [name for name in names if name.startswith("array.")]:
            found["array"] = arrays[0]
            if rates := [name for name in RATE_NAMES if name in names]:
                found["rate"] = rates[0]
        return {role: f"{self._audio}.{name}" for role, name in found.items()}

    def _audio_bytes(self, table: ParquetTable, group: Group) -> tuple[float, bool | None]:
        """Return the mean bytes of a clip, and True (False) if all rows (no row) have bytes."""
        leaf = self._audio_leaves(table).get("bytes")
        if leaf is None:
            return 0.0, False
        chunk = table.chunk(group, leaf)
        counts = chunk.statistics
        if counts is None or not counts.has_null_count:
            return chunk.total_uncompressed_size / group.rows, None
        held = group.rows - counts.null_count
        mean = chunk.total_uncompressed_size / max(1, held)
        return mean, {0: False, group.rows: True}.get(held)

    def _rate(self, table: ParquetTable, otherwise: ByteRate) -> ByteRate:
        """Return the bytes of a second by the header of the first clip, read by a small range."""
        leaf = self._audio_leaves(table).get("bytes")
        if leaf is None or not table.groups:
            return otherwise
        (whole,) = table.ranges(table.groups[0], [leaf])
        few = Range(whole.start, min(whole.end, whole.start + HEAD_BYTES))
        head = fetch.read_range(table.fs, table.path, few)
        return ByteRate.in_column(head, whole.nbytes) or otherwise

    def fetch(
        self, items: Sequence[Item], columns: Sequence[str]
    ) -> Iterator[tuple[Item, Row | RowError]]:
        """Yield the audio cell and some columns of each item, in order."""
        columns = [self._audio, *columns]
        # Neighbours that one pass over a row group reads; refused rows stand alone.
        runs: list[list[_Asked | Refused]] = []
        for ask in map(self._asked, items):
            last = runs[-1][-1] if runs else None
            if isinstance(ask, _Asked) and isinstance(last, _Asked) and ask.is_behind(last):
                runs[-1].append(ask)
            else:
                runs.append([ask])
        heads = {str(n): run[0] for n, run in enumerate(runs) if isinstance(run[0], _Asked)}

        def load(one: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
            return self._load(heads[one.row_id], columns, touch)

        loads = []
        for number, ask in heads.items():
            ranges = ask.table.ranges(ask.group, columns)
            size = None if ask.table.is_local else sum(one.nbytes for one in ranges)
            loads.append(Item(number, f"{ask.item.uri}|{number}", size=size))
        with closing(fetch.fetch_all(loads, lambda uri: {}, load)) as fetched:  # type: ignore[type-var]
            for run in runs:
                if not isinstance(run[0], _Asked):
                    yield run[0]
                    continue
                _, stream = next(fetched)
                asked = cast(list[_Asked], run)
                if isinstance(stream, RowError):
                    yield from ((ask.item, stream) for ask in asked)
                    continue
                with stream:
                    yield from self._decoded(asked, columns, stream)

    def _asked(self, item: Item) -> _Asked | Refused:
        try:
            place = RowPlace.of(item)
            shard = -1 if place.shard is None else place.shard
            table = base.retry_read(lambda: self._table(shard), base.is_away)
            if not table.has(item.etag, item.mtime):
                raise UnreadableError(f"{item.uri}: {table.path} changed since it was planned")
            return _Asked(item, table, table.group_of(place.row), place.row)
        except Exception as error:  # file readers raise any class
            return item, base.damaged_row(item.uri, error)

    def _load(self, ask: _Asked, columns: Sequence[str], touch: Callable[[], None]) -> Blob:
        """Return the bytes of a row group, or a local file itself."""
        table = ask.table
        now = base.stat_now(table.fs, table.path)
        if not table.has(now["etag"], now["mtime"]) or now["size"] not in (None, table.size):
            self._table.cache_clear()
            raise UnreadableError(f"{ask.item.uri}: {table.path} changed since it was planned")
        if table.is_local:
            return Blob(path=table.path)
        ranges = table.ranges(ask.group, columns)
        return fetch.load_ranges(table.fs, table.path, ranges, touch)

    def _decoded(
        self, run: Sequence[_Asked], columns: Sequence[str], stream: BinaryIO
    ) -> Iterator[tuple[Item, Row | RowError]]:
        """Yield the rows of one row group; after damage, all later rows are bad."""
        table, group = run[0].table, run[0].group
        ranges = None if table.is_local else table.ranges(group, columns)
        waiting, first = deque(run), group.first_row
        failure: Exception = EOFError("the row group ends before")
        try:
            for batch in table.batches(group, columns, stream, ranges, ROWS_AT_ONCE):
                while waiting and waiting[0].row < first + batch.num_rows:
                    ask = waiting.popleft()
                    yield ask.item, self._cell(ask.item, batch, ask.row - first)
                if not waiting:
                    return
                first += batch.num_rows
        except (OSError, ValueError, pa.ArrowException) as error:
            fetch.check_arrived(stream, table.path)
            failure = error
        for ask in waiting:
            yield ask.item, base.unreadable(ask.item.uri, failure)

    def _cell(self, item: Item, batch: pa.RecordBatch, row: int) -> Row | RowError:
        """Return the audio as an Arrow scalar, and the other cells as Python values."""
        others = [name for name in batch.schema.names if name != self._audio]
        try:
            cells = {
                name: cast_array_to_feature(batch.column(name).slice(row, 1), self.features[name])
                for name in others
            }
        except (TypeError, ValueError, LookupError, pa.ArrowException) as error:
            return base.unreadable(item.uri, error)
        found = {name: cell[0].as_py() for name, cell in cells.items()}
        return {self._audio: batch.column(self._audio)[row], **found}
