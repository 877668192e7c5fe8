"""Random access to one Parquet file: row groups, decoded once.

Bytes are fetched by ranges, several columns and row groups in one range where they lie close
together. Arrow checks the checksums of pages and decodes them. Any number of threads fetch and
decode at the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.byte_streams import SeekableFile
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import (
    Block,
    BlockCache,
    DecodedBlock,
    FrameSpan,
    Piece,
    other_row,
    outside,
)
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.frames import join_frames
from earmill.pipeline.formats.parquet.cells import ID_COLUMN, LongRows
from earmill.pipeline.formats.parquet.footer import (
    check_column,
    check_parquet,
    column_encodings,
    read_footer,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import Bytes, StoredFile

# First byte of a range in a file, and the byte after the last.
Span = tuple[int, int]
# First byte of a range, and its content.
Held = tuple[int, Bytes]


def joined(spans: Iterable[Span], gap_bytes: int) -> Iterator[Span]:
    """Sort spans and join spans that are at most `gap_bytes` apart."""
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
    """Read ranges of a file."""
    return [(low, file.read(low, high - low)) for low, high in spans]


class FetchedRanges(SeekableFile):
    """A file of which some ranges were fetched; Arrow takes parts of them without a copy.

    Args:
        nbytes: Size of the file.
        held: The fetched ranges.
    """

    def __init__(self, nbytes: int, held: Sequence[Held] = ()) -> None:
        super().__init__(nbytes)
        self.held = held

    def part(self, start: int, nbytes: int) -> Bytes:
        """Return bytes [start, start + nbytes) of the file.

        Raises:
            ValueError: They were not fetched.
        """
        for begin, content in self.held:
            if begin <= start and 0 <= nbytes <= begin + len(content) - start:
                return content[start - begin : start - begin + nbytes]
        raise ValueError(f"bytes {start} to {start + nbytes} of the file were not fetched")

    def read_buffer(self, nbytes: int) -> pa.Buffer:
        """Return the next bytes; Arrow calls this."""
        found = self.part(self._at, nbytes)
        self._at += nbytes
        return pa.py_buffer(found)

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes."""
        return self.read_buffer(nbytes).to_pybytes()


# Bytes of a request to a remote store. Local row groups are as fast one by one.
REMOTE_REQUEST_BYTES = 8 * 2**20
# Larger gaps between wanted columns, such as a row group's scalars, are not fetched.
GAP_BYTES, REMOTE_GAP_BYTES = 2**13, 2**17


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
        # Readers that no thread uses. A new one costs a seventh of decoding a row group.
        self._idle: deque[tuple[FetchedRanges, pq.ParquetFile]] = deque([self._open()])
        _, file = self._idle[0]
        groups = range(self._footer.num_row_groups)
        sizes = [self._footer.row_group(group).num_rows for group in groups]
        self._ids: dict[int, list[str]] = {}
        self._spans: dict[tuple[str, int], Span] = {}
        self._first_row = [0, *accumulate(sizes)]
        self._long_rows = LongRows.from_metadata(file.schema_arrow.metadata)
        check_parquet(rel, file, self._long_rows, promise)
        self._columns = column_encodings(file, promise.columns)
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        self._numbers = {name: number for name, (_, number) in self._columns.items()}
        self._numbers[ID_COLUMN] = paths.index(ID_COLUMN)

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """Return a fresh array; see `ShardReader`."""
        width, dtype = self._promise.columns[stream]
        shape = span.last - span.first, width
        return join_frames(self.pieces(stream, span), shape, np.dtype(dtype))

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Yield cells, or parts of cells; see `GivesPieces`."""
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
        """Return frames [first, last) of a row of the file, from the cache."""
        group = self._group_of(file_row)
        key = (self.rel, stream, group)
        frames, starts = self._cache.loaded(key, partial(self._load_one, stream, group))
        row = file_row - self._first_row[group]
        if self._row_ids(group)[row] != span.row_id:
            raise other_row(self.rel, span, self._row_ids(group)[row])
        begin, end = starts[row : row + 2].tolist()
        if begin + last > end:
            raise outside(self.rel, stream, last, end - begin)
        return frames[begin + first : begin + last]

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """Return the row groups of a row; see `ReadsAhead`."""
        first = self._long_rows.first(span.row)
        last = first + self._long_rows.parts(span.row) - 1
        return range(self._group_of(first), self._group_of(last) + 1)

    def _group_of(self, file_row: int) -> int:
        return bisect_right(self._first_row, file_row) - 1

    def prepare(self, streams: Iterable[str], pool: Executor) -> None:
        """Do nothing: the footer has all places; see `ReadsAhead`."""

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[list[Block]]:
        """Group columns of row groups in file order, bounded in bytes; see `ReadsAhead`."""
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
        """Do nothing: no handle is open between reads."""

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
        """Yield columns of row groups as (frames, places of cells); row ids are kept."""
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
        """Yield row groups with their columns; each is decoded before the next is fetched."""
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
    ) -> list[tuple[str, DecodedBlock]]:
        """Decode columns of a row group; row ids are kept where they are one of the columns."""
        with self._cache.decoding:
            ranges, file = self._reader()
            ranges.held = held
            table = file.read_row_group(group, columns=columns, use_threads=False)
            ranges.held = ()
            self._idle.append((ranges, file))
        if ID_COLUMN in columns:
            self._ids[group] = table.column(ID_COLUMN).to_pylist()
        return [(name, self._block(table, name)) for name in columns if name != ID_COLUMN]

    def _block(self, table: pa.Table, stream: str) -> DecodedBlock:
        """Return all frames of a stream in a row group, and where each row's frames start."""
        chunks = table.column(stream).chunks
        cells = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        form, _ = self._columns[stream]
        return form.frames(cells, *self._promise.columns[stream])

    def _reader(self) -> tuple[FetchedRanges, pq.ParquetFile]:
        """Return a reader that no other thread uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def _open(self) -> tuple[FetchedRanges, pq.ParquetFile]:
        """Open the file for one thread at a time, on ranges that are fetched later."""
        ranges = FetchedRanges(self._stored.nbytes)
        file = pq.ParquetFile(
            pa.PythonFile(ranges, "r"),
            metadata=self._footer,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        return ranges, file

    def _span_of(self, column: str, group: int) -> Span:
        if (column, group) not in self._spans:
            found = self._footer.row_group(group).column(self._numbers[column])
            starts = (found.dictionary_page_offset, found.data_page_offset)
            start = min(start for start in starts if start is not None)
            self._spans[column, group] = start, start + found.total_compressed_size
        return self._spans[column, group]
