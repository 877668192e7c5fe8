"""The format `parquet`, and random access to one file: row groups, decoded once.

Bytes are fetched by ranges, several columns and row groups in one range where they lie close
together. Arrow checks the checksums of pages and decodes them. Any number of threads fetch and
decode at the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

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
    ShardReader,
    join_frames,
    other_row,
    outside,
)
from earmill.pipeline.formats.digest import ShardDigest
from earmill.pipeline.formats.format import Encoding, Format, Promise, refused
from earmill.pipeline.formats.parquet.write import (
    END_BYTES,
    ID_COLUMN,
    LENGTH_BYTES,
    MAGIC,
    MB,
    SEAL_MARK,
    CellEncoding,
    LongRows,
    cell_encoding,
    digest_parquet,
    seal_of,
    write_parquet,
)
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.storage.layout import Layout, StoredFile
from earmill.pipeline.storage.local_cache import Bytes

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo

# First byte of a range in a file, and the byte after the last.
Span = tuple[int, int]
# First byte of a range, and its content.
Held = tuple[int, Bytes]

SEAL_BYTES = len(SEAL_MARK) + 4
# First request; the footer of a shard of ten minutes and four streams has about 100 kB.
TAIL_BYTES = 2**18
# Bytes of a request to a remote store. Local row groups are as fast one by one.
REMOTE_REQUEST_BYTES = 8 * MB
# Larger gaps between wanted columns, such as a row group's scalars, are not fetched.
GAP_BYTES, REMOTE_GAP_BYTES = 2**13, 2**17


def read_footer(file: StoredFile) -> pq.FileMetaData:
    """Read and check the footer; a CommitError if the footer was damaged since it was written."""
    tail = file.read(max(0, file.nbytes - TAIL_BYTES), min(TAIL_BYTES, file.nbytes)).tobytes()
    size = int.from_bytes(tail[-END_BYTES:-LENGTH_BYTES], "little") + END_BYTES
    if not tail.endswith(MAGIC) or size > file.nbytes:
        raise CommitError(
            f"{file.layout.url(file.rel)}: the end is not that of a Parquet file, it is damaged: "
            "run `earmill verify`"
        )
    if size + SEAL_BYTES > len(tail) < file.nbytes:
        wanted = min(size + SEAL_BYTES, file.nbytes)
        tail = file.read(file.nbytes - wanted, wanted).tobytes()
    found, footer = tail[-size - SEAL_BYTES : -size], tail[-size:]
    if found.startswith(SEAL_MARK) and found != seal_of(footer):
        raise CommitError(
            f"{file.layout.url(file.rel)}: the CRC-32C of the footer is not that of its bytes: "
            "run `earmill verify`"
        )
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


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


class FetchedRanges(SeekableFile):
    """A file of `nbytes` bytes of which the ranges `held` were fetched; Arrow takes parts of them
    without a copy."""

    def __init__(self, nbytes: int, held: Sequence[Held] = ()) -> None:
        super().__init__(nbytes)
        self.held = held

    def part(self, start: int, nbytes: int) -> Bytes:
        """Return bytes [start, start + nbytes) of the file; a ValueError if they were not
        fetched."""
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
        return self.read_buffer(nbytes).to_pybytes()


class ParquetShard:
    """A shard's Parquet file; reads streams' columns of the row groups of rows. Safe in several
    threads. See `ShardReader`, `ReadsAhead` and `GivesPieces` for the methods without a text."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self.rel, self._promise, self._cache = rel, promise, cache
        self._stored = promise.file(layout, rel)
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
        rows = self._long_rows.first(promise.rows)
        if file.metadata.num_rows != rows:
            raise refused(rel, f"expected {rows} rows, its footer claims {file.metadata.num_rows}")
        paths = {file.schema.column(number).path: number for number in range(len(file.schema))}
        # Encoding of each stream, and numbers of columns in the footer.
        self._forms: dict[str, CellEncoding] = {}
        self._numbers = {ID_COLUMN: paths[ID_COLUMN]}
        for stream in promise.columns:
            self._forms[stream] = self._checked_form(file.schema_arrow, stream)
            leaf = self._forms[stream].leaf(stream)
            if leaf not in paths:
                raise CommitError(f"the file has no column {leaf}: run `earmill verify`")
            self._numbers[stream] = paths[leaf]

    def _checked_form(self, schema: pa.Schema, stream: str) -> CellEncoding:
        """Return the encoding of a stream; refuse a column that is not what was committed."""
        width, dtype = self._promise.columns[stream]
        got = schema.field(stream) if stream in schema.names else None
        form = cell_encoding(got.type if got is not None else None)
        wanted = form.field(stream, width, dtype, {})
        if got is None or got.type != wanted.type or form.stored(got) != (width, dtype):
            claim = "nothing" if got is None else f"{got.type} {got.metadata or ''}".strip()
            raise refused(
                self.rel,
                f"expected {wanted.type} for {stream}, {width} columns of {dtype}, its footer "
                f"claims {claim}",
            )
        return form

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        width, dtype = self._promise.columns[stream]
        shape = span.last - span.first, width
        return join_frames(self.pieces(stream, span), shape, np.dtype(dtype))

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Yield cells, or parts of cells."""
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

        def load() -> DecodedBlock:
            ((_, _, block),) = self._load([(stream, group)])
            return block

        frames, starts = self._cache.loaded((self.rel, stream, group), load)
        row = file_row - self._first_row[group]
        # The blocks may be in the cache since an earlier opening of the file.
        if group not in self._ids:
            self._decoded(self._fetched([self._span_of(ID_COLUMN, group)]), group, [ID_COLUMN])
        if self._ids[group][row] != span.row_id:
            raise other_row(self.rel, span, self._ids[group][row])
        begin, end = starts[row : row + 2].tolist()
        if begin + last > end:
            raise outside(self.rel, stream, last, end - begin)
        return frames[begin + first : begin + last]

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        first = self._long_rows.first(span.row)
        last = first + self._long_rows.parts(span.row) - 1
        return range(self._group_of(first), self._group_of(last) + 1)

    def _group_of(self, file_row: int) -> int:
        return bisect_right(self._first_row, file_row) - 1

    def prepare(self, streams: Iterable[str], pool: Executor) -> None:
        """Do nothing: the footer has all places."""

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[list[Block]]:
        """Group columns of row groups in file order, bounded in bytes."""
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
        for stream, group, block in self._load(blocks):
            self._cache.put((self.rel, stream, group), block)

    def close(self) -> None:
        """Do nothing: no handle is open between reads."""

    def _load(self, blocks: Sequence[Block]) -> Iterator[tuple[str, int, DecodedBlock]]:
        """Yield columns of row groups as (frames, places of cells); row ids are kept.

        The sizes that the footer claims are checked before anything is read.
        """
        columns: dict[int, list[str]] = {}
        for stream, group in sorted(blocks, key=itemgetter(1)):
            (width, dtype), frames = self._promise.columns[stream], self._promise.frames[stream]
            meta = self._footer.row_group(group)
            column = meta.column(self._numbers[stream])
            limit, nbytes = self._forms[stream].limits(meta.num_rows, frames, width, dtype)
            if column.num_values > limit or not 0 <= column.total_uncompressed_size <= nbytes + MB:
                raise refused(
                    self.rel,
                    f"row group {group} claims {column.num_values} values of {stream} in "
                    f"{column.total_uncompressed_size} bytes, the shard has {limit} at most",
                )
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
            held = self._fetched(wanted)
            yield from ((group, held) for group in columns)
            return
        parts = self._stored.parts([*starts, ends[-1]])
        for group, start, part in zip(columns, starts, parts, strict=True):
            yield group, [(start, part)]

    def _fetched(self, spans: Iterable[Span]) -> list[Held]:
        return [(low, self._stored.read(low, high - low)) for low, high in spans]

    def _decoded(
        self, held: Sequence[Held], group: int, columns: Sequence[str]
    ) -> list[tuple[str, DecodedBlock]]:
        """Decode columns of a row group: all frames of each stream in it, and where each row's
        frames start. Row ids are kept where they are one of the columns."""
        with self._cache.decoding:
            try:
                ranges, file = self._idle.pop()
            except IndexError:
                ranges, file = self._open()
            ranges.held = held
            table = file.read_row_group(group, columns=columns, use_threads=False)
            ranges.held = ()
            self._idle.append((ranges, file))
        blocks: list[tuple[str, DecodedBlock]] = []
        for name in columns:
            if name == ID_COLUMN:
                self._ids[group] = table.column(name).to_pylist()
                continue
            chunks = table.column(name).chunks
            cells = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
            blocks.append((name, self._forms[name].frames(cells, *self._promise.columns[name])))
        return blocks

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


class ParquetFormat(Format):
    """A shard as one Parquet file; see `earmill.pipeline.formats.parquet.write`."""

    suffix = ".parquet"
    # The name that Croissant readers know; they refuse application/vnd.apache.parquet.
    media_type = "application/x-parquet"
    summary = "one Parquet file a shard, one row a clip; for row access and SQL"
    integrity = "CRC-32 of every page; sizes in the footer against the commit"
    is_table = True
    has_scales = False

    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        write_parquet(path, rows, streams, encoding)

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        return digest_parquet(path, streams)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        return ParquetShard(layout, rel, promise, cache)

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        """With Hugging Face datasets, all shards."""
        return (
            "from datasets import load_dataset",
            'ds = load_dataset("path/to/this/folder")  # the files listed above, no others',
        )


PARQUET = ParquetFormat()
