"""Random access to one Parquet file: row groups, decoded once.

Bytes are fetched by ranges, several columns and row groups at once where they lie close together.
Cells of bytes are decoded here, straight into the block that is kept, and anything else by Arrow:
any number of threads fetch and decode at the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from earmill.pipeline.common.byte_streams import SeekableFile
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import (
    Block,
    BlockCache,
    DecodedBlock,
    FrameSpan,
    Piece,
    other_row,
    outside,
)
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.frames import put_together
from earmill.pipeline.formats.parquet.cells import ID_COLUMN, BinaryForm, LongRows
from earmill.pipeline.formats.parquet.footer import (
    check_column,
    check_parquet,
    leaf_columns,
    read_footer,
)
from earmill.pipeline.formats.parquet.pages import (
    ALIGNED_BYTES,
    UNCOMPRESSED,
    Cells,
    Page,
    checked_pages,
    plain_cells,
    texts,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import Bytes, StoredFile

# First byte of something in a file, and the byte behind.
Span = tuple[int, int]
# First byte of a range, and what it holds.
Held = tuple[int, Bytes]


def joined(spans: Iterable[Span], gap_bytes: int) -> Iterator[Span]:
    """Spans in the order of the file; those that lie closer than `gap_bytes` as one."""
    begin = end = -1
    for low, high in sorted(spans):
        if end >= 0 and low - end > gap_bytes:
            yield begin, end
            end = -1
        begin = low if end < 0 else begin
        end = max(end, high)
    if end >= 0:
        yield begin, end


def fetched(file: StoredFile, spans: Iterable[Span]) -> list[Held]:
    """These ranges of a file."""
    return [(low, file.read(low, high - low)) for low, high in spans]


class HeldRanges(SeekableFile):
    """A file of which some ranges are held; Arrow takes their parts without a copy.

    Args:
        nbytes: Of the file.
        held: What is there of it.
    """

    def __init__(self, nbytes: int, held: Iterable[Held] = ()) -> None:
        super().__init__(nbytes)
        self.hold(held)

    def hold(self, held: Iterable[Held]) -> None:
        """These from now on, in place of those of before."""
        self._held = [*held]

    def part(self, start: int, nbytes: int) -> Bytes:
        """Bytes [start, start + nbytes) of the file.

        Raises:
            ValueError: They are not held.
        """
        for begin, content in self._held:
            if begin <= start and 0 <= nbytes <= begin + len(content) - start:
                return content[start - begin : start - begin + nbytes]
        raise ValueError(f"bytes {start} to {start + nbytes} of the file were not fetched")

    def read_buffer(self, nbytes: int) -> pa.Buffer:
        """What Arrow calls; see `read`."""
        found = self.part(self._at, nbytes)
        self._at += nbytes
        return pa.py_buffer(found)

    def read(self, nbytes: int = -1) -> bytes:
        """The next bytes."""
        return self.read_buffer(nbytes).to_pybytes()


# Of one request to a remote store; locally each row group by itself is as fast.
REMOTE_REQUEST_BYTES = 8 * 2**20
# What lies between columns that are wanted is fetched with them up to here: a row group's scalars.
GAP_BYTES, REMOTE_GAP_BYTES = 2**13, 2**17


@dataclass(frozen=True)
class _Frame:
    """Numbers of one frame of a stream: how many, and of which kind."""

    width: int
    dtype: np.dtype[Any]

    @cached_property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize

    def frames(self, content: Bytes) -> NDArray[Any]:
        """Bytes as (frames, width)."""
        return content.view(self.dtype).reshape(-1, self.width)


@dataclass(frozen=True)
class _Reader:
    """A reader of Arrow's, for one thread at a time, and what it reads."""

    ranges: HeldRanges
    file: pq.ParquetFile


class ParquetShard:
    """A shard's Parquet file; reads streams' columns of the row groups of rows. Safe in several
    threads."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self.rel, self._promise, self._cache = rel, promise, cache
        if rel not in promise.files:
            raise CommitError(f"{layout.url(rel)} is missing from the commit; run `earmill verify`")
        named = promise.files[rel]
        self._stored = StoredFile(layout, rel, named.bytes, named.sha256)
        self._request_bytes = 1 if layout.is_local else REMOTE_REQUEST_BYTES
        self._gap_bytes = GAP_BYTES if layout.is_local else REMOTE_GAP_BYTES
        self._footer = read_footer(self._stored)
        # To make one takes a tenth of decoding a row group: they are kept.
        self._idle = deque([self._reader(checked=True)])
        file = self._idle[0].file
        groups = range(self._footer.num_row_groups)
        sizes = [self._footer.row_group(group).num_rows for group in groups]
        self._ids: dict[int, list[str]] = {}
        self._spans: dict[tuple[str, int], Span] = {}
        self._first_row = [0, *accumulate(sizes)]
        self._long_rows = LongRows.from_metadata(file.schema_arrow.metadata)
        check_parquet(rel, file, self._long_rows, promise)
        self._columns = leaf_columns(file, promise.columns)
        self._frame = {ID_COLUMN: _Frame(1, np.dtype(np.uint8))} | {
            name: _Frame(width, np.dtype(dtype).newbyteorder("<"))
            for name, (width, dtype) in promise.columns.items()
        }
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        self._numbers = {name: number for name, (_, number) in self._columns.items()}
        self._numbers[ID_COLUMN] = paths.index(ID_COLUMN)

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        width, dtype = self._promise.columns[stream]
        shape = span.last - span.first, width
        return put_together(self.pieces(stream, span), shape, np.dtype(dtype))

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Cells, or parts of them; see `GivesPieces`."""
        first_row = self._long_rows.first(span.row)
        if first_row >= self._first_row[-1]:
            raise outside(self.rel, "rows", first_row + 1, self._first_row[-1])
        if span.row not in self._long_rows.frames:
            yield 0, self._read(stream, span, first_row, span.first, span.last)
            return
        self._read(stream, span, first_row, 0, 0)
        done = 0
        for piece in self._long_rows.spans(span.row, stream, span.first, span.last):
            yield done, self._read(stream, span, *piece)
            done += piece[2] - piece[1]
        if done != span.last - span.first:
            raise outside(self.rel, stream, span.last, span.first + done)

    def _read(
        self, stream: str, span: FrameSpan, file_row: int, first: int, last: int
    ) -> np.ndarray:
        """Frames [first, last) of one row of the file, out of the cache."""
        group = self._group_of(file_row)
        key = (self.rel, stream, group)
        content, bounds = self._cache.loaded(key, partial(self._load_one, stream, group))
        row = file_row - self._first_row[group]
        if self._row_ids(group)[row] != span.row_id:
            raise other_row(self.rel, span, self._row_ids(group)[row])
        begin, end = bounds[row].tolist()
        frame = self._frame[stream]
        if begin + last * frame.nbytes > end:
            raise outside(self.rel, stream, last, (end - begin) // frame.nbytes)
        return frame.frames(content[begin + first * frame.nbytes : begin + last * frame.nbytes])

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """The row groups that hold a row; see `ReadsAhead`."""
        first = self._long_rows.first(span.row)
        last = first + self._long_rows.parts(span.row) - 1
        return range(self._group_of(first), self._group_of(last) + 1)

    def _group_of(self, file_row: int) -> int:
        return bisect_right(self._first_row, file_row) - 1

    def prepare(self, streams: Iterable[str], pool: Executor) -> None:
        """Nothing to do, as all is in the footer; see `ReadsAhead`."""

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[list[Block]]:
        """Columns of row groups in the order of the file, of bounded size; see `ReadsAhead`."""
        run: list[Block] = []
        begin = end = 0
        for low, high, block in sorted((*self._span_of(*block), block) for block in blocks):
            far = low - end > self._gap_bytes or high - begin > self._request_bytes
            if run and far and run[-1][1] != block[1]:
                yield run
                run = []
            begin, end = begin if run else low, high
            run.append(block)
        if run:
            yield run

    def load(self, blocks: Sequence[Block]) -> None:
        """See `ReadsAhead`."""
        for stream, group, block in self._load(blocks):
            self._cache.put((self.rel, stream, group), block)

    def close(self) -> None:
        """Nothing to do: no handle is held between reads."""

    def _row_ids(self, group: int) -> list[str]:
        # The blocks may be in the cache since an earlier opening of the file.
        if group not in self._ids:
            held = fetched(self._stored, [self._span_of(ID_COLUMN, group)])
            self._decoded(held, group, [ID_COLUMN])
        return self._ids[group]

    def _load_one(self, stream: str, group: int) -> DecodedBlock:
        ((_, _, block),) = self._load([(stream, group)])
        return block

    def _load(self, blocks: Sequence[Block]) -> Iterator[tuple[str, int, DecodedBlock]]:
        """Columns of row groups as (bytes, bounds of cells); ids of the rows are kept."""
        for stream, group in blocks:
            column = self._columns[stream]
            check_column(self.rel, self._footer, group, stream, column, self._promise)
        columns: dict[int, list[str]] = {}
        for stream, group in sorted(blocks, key=itemgetter(1)):
            no_ids = group not in self._ids and group not in columns
            columns.setdefault(group, [ID_COLUMN] if no_ids else []).append(stream)
        for group, held in self._arriving(columns):
            for stream, cells in self._decoded(held, group, columns[group]):
                yield stream, group, cells

    def _arriving(
        self, columns: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[int, Sequence[Held]]]:
        """Row groups, each with columns of it to be decoded before the next one comes."""
        spans = {g: [self._span_of(name, g) for name in names] for g, names in columns.items()}
        wanted = [*joined(chain(*spans.values()), self._gap_bytes)]
        starts = [min(low for low, _ in each) for each in spans.values()]
        ends = [max(high for _, high in each) for each in spans.values()]
        in_turn = all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        if len(wanted) != 1 or not in_turn:
            held = fetched(self._stored, wanted)
            yield from ((group, held) for group in columns)
            return
        parts = self._stored.parts([*starts, ends[-1]])
        for group, start, part in zip(columns, starts, parts, strict=True):
            yield group, [(start, part)]

    def _decoded(
        self, held: Sequence[Held], group: int, columns: Sequence[str]
    ) -> list[tuple[str, Cells]]:
        """Streams of a row group; ids of its rows are kept where they are one of the columns."""
        ranges = HeldRanges(self._stored.nbytes, held)
        found: dict[str, Cells] = {}
        with self._cache.decoding:
            chunks = {name: self._chunk(ranges, group, name) for name in columns}
            # All are looked at before any is decoded.
            pages = {name: self._pages(chunk, group, name) for name, chunk in chunks.items()}
            for name, chunk in chunks.items():
                cells = self._plain(chunk, group, name, pages[name])
                if cells is not None:
                    found[name] = cells
            left = [name for name in columns if name not in found]
            if left:
                checked = all(pages[name] is not None for name in left)
                table = self._by_arrow(held, group, left, checked=checked)
        if ID_COLUMN in found:
            self._ids[group] = texts(*found.pop(ID_COLUMN))
        elif ID_COLUMN in left:
            self._ids[group] = table.column(ID_COLUMN).to_pylist()
        found |= {name: self._cells(table, name) for name in left if name != ID_COLUMN}
        return [*found.items()]

    def _chunk(self, held: HeldRanges, group: int, column: str) -> Bytes:
        low, high = self._span_of(column, group)
        return held.part(low, high - low)

    def _pages(self, chunk: Bytes, group: int, column: str) -> Sequence[Page] | None:
        """As `checked_pages`, with its place in what is raised."""
        try:
            return checked_pages(chunk)
        except CommitError as err:
            place = f"{self._stored.layout.url(self.rel)}, row group {group}, {column}"
            raise CommitError(f"{place}: {err}") from err

    def _plain(
        self, chunk: Bytes, group: int, name: str, pages: Sequence[Page] | None
    ) -> Cells | None:
        """What can be decoded here: bytes of a stream, of which `check_column` has seen how many
        there may be, and row ids as they lie."""
        if pages is None:
            return None
        column, frame = self._footer.row_group(group).column(self._numbers[name]), self._frame[name]
        codec = column.compression
        if name == ID_COLUMN:
            is_known, most = codec == UNCOMPRESSED, len(chunk)
        else:
            is_known = isinstance(self._columns[name][0], BinaryForm)
            most = column.total_uncompressed_size
        if not is_known or frame.dtype.itemsize > ALIGNED_BYTES:
            return None
        return plain_cells(chunk, pages, codec, most, frame.nbytes, self._cache.memory)

    def _cells(self, table: pa.Table, stream: str) -> Cells:
        """A stream of a table that Arrow has read."""
        chunks = table.column(stream).chunks
        cells = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        form, _ = self._columns[stream]
        frames, offsets = form.frames(cells, *self._promise.columns[stream])
        bounds = np.stack([offsets[:-1], offsets[1:]], 1) * self._frame[stream].nbytes
        return frames.reshape(-1).view(np.uint8), bounds

    def _by_arrow(
        self, held: Sequence[Held], group: int, columns: Sequence[str], *, checked: bool
    ) -> pa.Table:
        """What is not decoded here.

        Args:
            checked: The checksums of its pages have been.
        """
        reader = self._free_reader() if checked else self._reader(checked=False)
        reader.ranges.hold(held)
        table = reader.file.read_row_group(group, columns=columns, use_threads=False)
        reader.ranges.hold([])
        if checked:
            self._idle.append(reader)
        return table

    def _free_reader(self) -> _Reader:
        try:
            return self._idle.pop()
        except IndexError:
            return self._reader(checked=True)

    def _reader(self, *, checked: bool) -> _Reader:
        """One more.

        Args:
            checked: The checksums of the pages that it will read have been.
        """
        ranges = HeldRanges(self._stored.nbytes)
        file = pq.ParquetFile(
            pa.PythonFile(ranges, "r"),
            metadata=self._footer,
            pre_buffer=False,
            page_checksum_verification=not checked,
        )
        return _Reader(ranges, file)

    def _span_of(self, column: str, group: int) -> Span:
        if (column, group) not in self._spans:
            found = self._footer.row_group(group).column(self._numbers[column])
            starts = (found.dictionary_page_offset, found.data_page_offset)
            start = min(start for start in starts if start is not None)
            self._spans[column, group] = start, start + found.total_compressed_size
        return self._spans[column, group]
