"""The format `parquet`: a shard as one file, a row a clip, scalars beside one column a stream.

No reader of Parquet applies a scale, so the values of scaled streams are stored in float32. Small
row groups suit random access, large ones scans. Sizes are counted before scaled streams are
widened, so that a row group is the block by which the reader shuffles (`reader.catalog`).

A cell holds the frames of a row:

    binary   binary                               the numbers, row after row, little endian; the
                                                  field's metadata has columns and dtype, and the
                                                  factor if numbers are not values
    nested   list<fixed_size_list<T>[columns]>    T: halffloat, float, or int32 of events

Bytes decode at the speed of memory. Nested lists show numbers to SQL, but cost twenty times the
time. Neither is `arrow.fixed_shape_tensor`, which Hugging Face datasets refuse. Offsets of 32 bits
suffice: a row group has at most 256 MB. Layout versions 1 and 2 have the nested form alone.

Arrow needs the memory of a cell several times. `LongRows` therefore divides a row with more than
`LIMIT_BYTES` of features over several rows of the file, each a row group of its own:

    row_id   seconds  modulation_start  modulation_n_frames  modulation
    a.wav    12.5     0                 1250                 ...
    day.flac 86400    1250              135000               frames 0 to 134999
    day.flac 86400    136250            135000               frames 135000 to 269999
    ...

The parts' frames are also in the file's metadata under `PARTS_KEY`, which only such files have.

    file = PAR1 pages indexes  seal  footer length PAR1        seal: EMFC, CRC-32C of the rest

Pages have checksums; a footer has none, and one with a flipped bit can end the process inside of
Arrow. So writers put a seal between indexes and footer, where no reader looks. Files of layout
versions 1 and 2 have none.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.byte_streams import Range, SeekableFile, joined_ranges
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import (
    Block,
    BlockCache,
    BlockReader,
    DecodedBlock,
    FrameSpan,
    Piece,
    ShardReader,
    other_row,
    outside,
)
from earmill.pipeline.formats.digest import ShardDigest, StreamHasher
from earmill.pipeline.formats.format import BINARY, NESTED, Encoding, Format, Promise, refused
from earmill.pipeline.formats.row_table import PAGES, row_table, scalar_options
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import described, layout_of
from earmill.pipeline.formats.values import join
from earmill.pipeline.storage.documents import chunk_range, typed_json
from earmill.pipeline.storage.layout import Layout, StoredFile
from earmill.pipeline.storage.local_cache import Bytes

Held = tuple[int, Bytes]  # First byte of a range, and its content.

MB = 2**20
LIMIT_BYTES = 32 * MB  # About ten minutes of Dau1997.
PART_BYTES = 16 * MB
PARTS_KEY = b"earmill.parts"
ID_COLUMN = "row_id"  # Column of the row ids.
# Keys in the metadata of a binary column.
PREFIX = "earmill."
COLUMNS_KEY, DTYPE_KEY = b"earmill.columns", b"earmill.dtype"
OVERHEAD_BYTES = 4  # Levels of a number, or the length of a cell, cost up to 4 bytes.
SEAL_MARK = b"EMFC"
# The length of the footer and the mark behind it are the last bytes of a file.
MAGIC, LENGTH_BYTES = b"PAR1", 4
END_BYTES = LENGTH_BYTES + len(MAGIC)
# profile: (close the row group at, never beyond unless one row is larger), uncompressed bytes.
ROW_GROUP_BYTES = {"random": (2 * MB, 4 * MB), "scan": (64 * MB, 128 * MB)}
WRITE_BYTES = MB // 4
STREAMS_KEY = b"earmill.streams"
ATTRS_KEY = b"earmill.attrs"
SEAL_BYTES = len(SEAL_MARK) + 4
# First request; the footer of a shard of ten minutes and four streams has about 100 kB.
TAIL_BYTES = 2**18
# Bytes of a request to a remote store. Local row groups are as fast one by one.
REMOTE_REQUEST_BYTES = 8 * MB
# Larger gaps between wanted columns, such as a row group's scalars, are not fetched.
GAP_BYTES, REMOTE_GAP_BYTES = 2**13, 2**17


def seal_of(footer: bytes) -> bytes:
    """Return the seal of a footer; the footer includes its length and the mark at the end."""
    return SEAL_MARK + google_crc32c.value(footer).to_bytes(4, "little")


def part_count(row_bytes: int) -> int:
    """Return the number of parts of a row with `row_bytes` bytes of features."""
    return 1 if row_bytes <= LIMIT_BYTES else -(-row_bytes // PART_BYTES)


def cut(n_frames: int, parts: int) -> list[tuple[int, int]]:
    """Return frames [first, last) of each part; parts differ by one frame at most."""
    return list(pairwise(n_frames * k // parts for k in range(parts + 1)))


@dataclass(frozen=True)
class LongRows:
    """The divided rows of one file: row of the shard -> stream -> frames of each part."""

    frames: Mapping[int, Mapping[str, Sequence[int]]]

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> LongRows:
        """Read the divided rows from a file's schema metadata; a CommitError if it is damaged."""
        text = (metadata or {}).get(PARTS_KEY, b"{}")
        try:
            frames = typed_json(dict[int, dict[str, list[int]]], text)
        except ValueError as err:
            raise CommitError(
                f"{PARTS_KEY.decode()}: expected frames by row and stream: {err}"
            ) from err
        for row, streams in frames.items():
            counts = [*streams.values()]
            if row < 0 or len({len(each) for each in counts}) != 1 or min(map(min, counts)) < 0:
                raise CommitError(f"{PARTS_KEY.decode()}: row {row} has no consistent parts")
        return cls(dict(sorted(frames.items())))

    def metadata(self) -> dict[bytes, bytes]:
        return {PARTS_KEY: json.dumps(self.frames).encode()} if self.frames else {}

    def parts(self, row: int) -> int:
        return len(next(iter(self.frames[row].values()))) if row in self.frames else 1

    def first(self, row: int) -> int:
        return row + sum(self.parts(long) - 1 for long in self.frames if long < row)

    def spans(self, row: int, stream: str, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield parts of frames [first, last) of a divided row: row of the file, first, last."""
        counts = self.frames[row][stream]
        starts = accumulate(counts, initial=0)
        for part, (start, count) in enumerate(zip(starts, counts, strict=False)):
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                yield self.first(row) + part, low, high


def _flat(frames: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(frames, dtype=np.dtype(dtype).newbyteorder("<")).reshape(-1)


def _offsets(sizes: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(sizes)], dtype=np.int32)


class BinaryCells:
    """A cell is the bytes of its frames. lz4 packs repetitions, as in events, and costs nothing."""

    #: Codec of the column, and its level if it has levels.
    compression: str = "lz4"
    level: int | None = None

    def field(self, column: str, width: int, dtype: str, attrs: Mapping[str, str]) -> pa.Field:
        facts = {COLUMNS_KEY.decode(): str(width), DTYPE_KEY.decode(): dtype}
        return pa.field(column, pa.binary(), metadata={**facts, **attrs})

    def stored(self, field: pa.Field) -> tuple[int, str]:
        """Return columns and dtype of the frames as the file states them, or a CommitError."""
        try:
            found = field.metadata
            return int(found[COLUMNS_KEY]), np.dtype(found[DTYPE_KEY].decode()).name
        except (TypeError, KeyError, ValueError) as err:
            raise CommitError(
                f"expected a binary column {field.name} that says its columns and its dtype, got "
                f"{field.metadata}; run `earmill verify`"
            ) from err

    def leaf(self, column: str) -> str:
        return column

    def cells(self, frames: np.ndarray, lengths: Sequence[int], width: int, dtype: str) -> pa.Array:
        """Encode the frames of all cells, (frames, width), in cells of so many frames each."""
        flat = _flat(frames, dtype)
        frame_bytes = width * flat.itemsize
        offsets = _offsets([length * frame_bytes for length in lengths])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat.view(np.uint8))]
        return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)

    def frames(self, cells: Any, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode the frames of some cells, (frames, width), and the bounds of cells in them."""
        stored = np.dtype(dtype).newbyteorder("<")
        frame_bytes = width * stored.itemsize
        _, places, content = cells.buffers()
        if not len(cells):
            return np.empty((0, width), stored), np.zeros(1, np.int64)
        offsets = np.frombuffer(places, np.int32)[cells.offset : cells.offset + len(cells) + 1]
        offsets = offsets.astype(np.int64)
        if cells.null_count or (np.diff(offsets) % frame_bytes).any():
            raise CommitError(
                f"expected whole frames of {frame_bytes} bytes in every cell: the file is damaged "
                "or not what was committed; run `earmill verify`"
            )
        start, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        flat = np.frombuffer(content or b"", np.uint8, size, start)
        return flat.view(stored).reshape(-1, width), (offsets - start) // frame_bytes

    def limits(self, rows: int, frames: int, width: int, dtype: str) -> tuple[int, int]:
        """Return the limits of the footer's claims: values and bytes of these rows and frames."""
        return rows, frames * width * np.dtype(dtype).itemsize + rows * OVERHEAD_BYTES


class NestedCells:
    """A cell is a list of frames, each a list of numbers. Its methods are as in `BinaryCells`."""

    compression: str = "zstd"
    level: int | None = 3

    def field(self, column: str, width: int, dtype: str, attrs: Mapping[str, str]) -> pa.Field:
        kind = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), width))
        return pa.field(column, kind, metadata=attrs or None)

    def stored(self, field: pa.Field) -> tuple[int, str]:
        try:
            frame = field.type.value_type
            return frame.list_size, np.dtype(frame.value_type.to_pandas_dtype()).name
        except (AttributeError, NotImplementedError) as err:
            raise CommitError(
                f"expected lists of frames in {field.name}, got {field.type}; run `earmill verify`"
            ) from err

    def leaf(self, column: str) -> str:
        return f"{column}.list.element.list.element"

    def cells(self, frames: np.ndarray, lengths: Sequence[int], width: int, dtype: str) -> pa.Array:
        blocks = pa.FixedSizeListArray.from_arrays(pa.array(_flat(frames, dtype)), width)
        return pa.ListArray.from_arrays(pa.array(_offsets(lengths)), blocks)

    def frames(self, cells: Any, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        offsets = cells.offsets.to_numpy().astype(np.int64)
        values = cells.flatten().flatten().to_numpy().reshape(-1, width)
        return values, offsets - offsets[0]

    def limits(self, rows: int, frames: int, width: int, dtype: str) -> tuple[int, int]:
        values = frames * width + rows
        return values, values * (np.dtype(dtype).itemsize + OVERHEAD_BYTES)


CellEncoding = BinaryCells | NestedCells
CELL_ENCODINGS: dict[str, CellEncoding] = {BINARY: BinaryCells(), NESTED: NestedCells()}


def cell_encoding(kind: pa.DataType | None) -> CellEncoding:
    return CELL_ENCODINGS[BINARY if kind == pa.binary() else NESTED]


def _part_table(
    rows: Sequence[FeatureRow],
    scalars: pa.Table,
    streams: Sequence[StreamInfo],
    schema: pa.Schema,
    encoding: Encoding,
    part: int,
    parts: int,
) -> pa.Table:
    """Return some rows, or a part of the one divided row with its own start and frames."""
    columns = dict(zip(scalars.column_names, scalars.columns, strict=True))
    form = CELL_ENCODINGS[encoding.parquet_form]
    for info in streams:
        layout, frames = layout_of(info), []
        for row in rows:
            values = row.streams[info.name]
            first, last = cut(len(values), parts)[part]
            frames.append(values[first:last])
        if parts > 1:
            start, count = layout.place_columns[:2]
            columns[start] = pc.add(columns[start], first)
            columns[count] = pa.array([last - first])
        dtype = layout.in_values().stored_dtype(encoding.dtype)
        values = layout.to_values(join(frames))
        columns[info.name] = form.cells(values, [*map(len, frames)], layout.stored_width, dtype)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _schema(
    scalars: pa.Schema, streams: Sequence[StreamInfo], encoding: Encoding, long_rows: LongRows
) -> pa.Schema:
    fields, form = [*scalars], CELL_ENCODINGS[encoding.parquet_form]
    for info in streams:
        if info.name in scalars.names:
            raise CommitError(f"stream {info.name!r} has the name of a scalar column: rename it")
        layout = layout_of(info).in_values()
        dtype = layout.stored_dtype(encoding.dtype)
        attrs = {f"{PREFIX}{name}": text for name, text in layout.number_attrs().items()}
        fields.append(form.field(info.name, layout.stored_width, dtype, attrs))
    about = [described(info, has_scales=False).to_dict() for info in streams]
    metadata = {
        STREAMS_KEY: json.dumps(about).encode(),
        ATTRS_KEY: json.dumps(dict(encoding.attrs or {}), sort_keys=True).encode(),
        **long_rows.metadata(),
    }
    return pa.schema(fields, metadata=metadata)


def row_groups(row_bytes: Sequence[float], profile: str) -> Iterator[tuple[int, int]]:
    """Cut rows into (start, stop) groups: a group ends when it reaches the profile's lower size, or
    when the next row would take it beyond the upper one."""
    if profile not in ROW_GROUP_BYTES:
        raise ValueError(f"row_group_profile is one of {sorted(ROW_GROUP_BYTES)}, got {profile!r}")
    enough, limit = ROW_GROUP_BYTES[profile]
    start, held = 0, 0.0
    for position, size in enumerate(row_bytes):
        if position > start and (held >= enough or held + size > limit):
            yield start, position
            start, held = position, 0.0
        held += size
    if len(row_bytes) > start:
        yield start, len(row_bytes)


def _options(
    scalars: pa.Table, streams: Sequence[StreamInfo], form: CellEncoding
) -> dict[str, Any]:
    # Row ids are stored as they are: all differ, and a reader needs all ids of a row group.
    found = scalar_options(scalars.drop_columns([ID_COLUMN]))
    leaves = [form.leaf(info.name) for info in streams]
    found["compression"] |= dict.fromkeys(leaves, form.compression)
    if form.level is not None:
        found["compression_level"] |= dict.fromkeys(leaves, form.level)
    return found


def read_footer(file: StoredFile) -> pq.FileMetaData:
    """Read and check the footer; a CommitError if the footer was damaged since it was written."""
    tail = file.read(max(0, file.nbytes - TAIL_BYTES), min(TAIL_BYTES, file.nbytes)).tobytes()
    size = int.from_bytes(tail[-END_BYTES:-LENGTH_BYTES], "little") + END_BYTES
    if not tail.endswith(MAGIC) or size > file.nbytes:
        raise CommitError(
            f"{file.layout.url(file.rel)}: expected the end of a Parquet file, it is damaged: "
            "run `earmill verify`"
        )
    if size + SEAL_BYTES > len(tail) < file.nbytes:
        wanted = min(size + SEAL_BYTES, file.nbytes)
        tail = file.read(file.nbytes - wanted, wanted).tobytes()
    found, footer = tail[-size - SEAL_BYTES : -size], tail[-size:]
    if found.startswith(SEAL_MARK) and found != seal_of(footer):
        raise CommitError(
            f"{file.layout.url(file.rel)}: the CRC-32C of the footer does not fit its bytes: "
            "run `earmill verify`"
        )
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


class FetchedRanges(SeekableFile):
    """A file of which some ranges were fetched; Arrow takes parts of them without a copy."""

    def __init__(self, nbytes: int, held: Sequence[Held] = ()) -> None:
        super().__init__(nbytes)
        self.held = held

    def part(self, start: int, nbytes: int) -> Bytes:
        """Return bytes of the file; a ValueError if they were not fetched."""
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


class ParquetShard(BlockReader):
    """A shard's Parquet file for several threads. Its footer has the places of all blocks."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        super().__init__(rel, promise.columns)
        self._promise, self._cache = promise, cache
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
        self._ranges: dict[tuple[str, int], Range] = {}
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
        width, dtype = self.columns[stream]
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

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
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
        group = self._group_of(file_row)

        def load() -> DecodedBlock:
            ((_, _, block),) = self._load([(stream, group)])
            return block

        frames, starts = self._cache.loaded((self.rel, stream, group), load)
        row = file_row - self._first_row[group]
        # The blocks may be in the cache since an earlier opening of the file.
        if group not in self._ids:
            self._decoded(self._fetched({group: [ID_COLUMN]}), group, [ID_COLUMN])
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

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[list[Block]]:
        run: list[Block] = []
        begin = end = 0
        for low, high, block in sorted((*self._range_of(*block), block) for block in blocks):
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

    def _load(self, blocks: Sequence[Block]) -> Iterator[tuple[str, int, DecodedBlock]]:
        """Yield columns of row groups, after a check of the sizes that the footer claims."""
        columns: dict[int, list[str]] = {}
        for stream, group in sorted(blocks, key=itemgetter(1)):
            (width, dtype), frames = self.columns[stream], self._promise.frames[stream]
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
        held = self._fetched(columns)
        for group, names in columns.items():
            for stream, cells in self._decoded(held, group, names):
                yield stream, group, cells

    def _fetched(self, columns: Mapping[int, Sequence[str]]) -> list[Held]:
        """Fetch the wanted columns of row groups."""
        every = (self._range_of(name, g) for g, names in columns.items() for name in names)
        ranges = joined_ranges(every, self._gap_bytes)
        return [(start, self._stored.read(start, end - start)) for start, end in ranges]

    def _decoded(
        self, held: Sequence[Held], group: int, columns: Sequence[str]
    ) -> list[tuple[str, DecodedBlock]]:
        """Return each stream's frames in a row group and the starts of its rows; keep row ids."""
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
            blocks.append((name, self._forms[name].frames(cells, *self.columns[name])))
        return blocks

    def _open(self) -> tuple[FetchedRanges, pq.ParquetFile]:
        ranges = FetchedRanges(self._stored.nbytes)
        file = pq.ParquetFile(
            pa.PythonFile(ranges, "r"),
            metadata=self._footer,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        return ranges, file

    def _range_of(self, column: str, group: int) -> Range:
        if (column, group) not in self._ranges:
            found = self._footer.row_group(group).column(self._numbers[column])
            self._ranges[column, group] = chunk_range(found)
        return self._ranges[column, group]


class ParquetFormat(Format):
    """A shard as one Parquet file; see the module."""

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
        scalars = row_table(rows, streams, encoding.extra_types)
        row_bytes = [sum(values.nbytes for values in row.streams.values()) for row in rows]
        divided = {}
        for number, row in enumerate(rows):
            parts = part_count(row_bytes[number])
            if parts > 1:
                divided[number] = {
                    name: [last - first for first, last in cut(len(values), parts)]
                    for name, values in row.streams.items()
                }
        long_rows = LongRows(divided)
        schema = _schema(scalars.schema, streams, encoding, long_rows)
        # A divided row shares no row group.
        sizes = [math.inf if n in divided else nbytes for n, nbytes in enumerate(row_bytes)]
        # Unbuffered, every page would be two calls of the system.
        with (
            pa.output_stream(path, buffer_size=WRITE_BYTES) as file,
            pq.ParquetWriter(
                file,
                schema,
                # Features never repeat, so a dictionary or min/max of them costs and finds nothing.
                **_options(scalars, streams, CELL_ENCODINGS[encoding.parquet_form]),
                write_statistics=scalars.schema.names,
                **PAGES,
            ) as writer,
        ):
            for start, stop in row_groups(sizes, encoding.row_group_profile):
                group = scalars.slice(start, stop - start)
                parts = long_rows.parts(start)  # a divided row is alone in its group
                for part in range(parts):
                    table = _part_table(
                        rows[start:stop], group, streams, schema, encoding, part, parts
                    )
                    writer.write_table(table, row_group_size=stop - start)
        # The seal lies before the footer.
        with path.open("r+b") as file:
            file.seek(-END_BYTES, 2)
            start = -END_BYTES - int.from_bytes(file.read(LENGTH_BYTES), "little")
            file.seek(start, 2)
            footer = file.read()
            file.seek(start, 2)
            file.write(seal_of(footer) + footer)

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        layouts = {info.name: layout_of(info) for info in streams}
        sizes: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in layouts}
        # Counts after the start and the number of frames.
        further = {name: layout.place_columns[2:] for name, layout in layouts.items()}
        beside = [ID_COLUMN, *(column for each in further.values() for column in each)]
        scalars, forms, stored, hashers = [], {}, {}, {}
        # Given a path, Arrow would first look for a filesystem.
        with (
            pa.OSFile(str(path)) as opened,
            pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True) as file,
        ):
            schema = file.schema_arrow
            for name, layout in layouts.items():
                field = schema.field(name)
                forms[name] = cell_encoding(field.type)
                width, dtype = stored[name] = forms[name].stored(field)
                kind = layout.from_values(np.empty(0, dtype)).dtype.name
                hashers[name] = StreamHasher(width, kind)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[*layouts, *beside], use_threads=False)
                scalars.append(table.select(beside))
                for name, layout in layouts.items():
                    for chunk in table.column(name).chunks:
                        frames, offsets = forms[name].frames(chunk, *stored[name])
                        sizes[name].append(np.diff(offsets))
                        hashers[name].update(layout.from_values(frames))
        held = pa.concat_tables(scalars or [schema.empty_table().select(beside)])
        long_rows = LongRows.from_metadata(schema.metadata)
        ids = held.column(ID_COLUMN).to_pylist()
        n_rows = len(ids) - sum(long_rows.parts(row) - 1 for row in long_rows.frames)
        starts = np.array([long_rows.first(row) for row in range(n_rows)], np.int64)
        digests = {}
        for name, hasher in hashers.items():
            frames = np.add.reduceat(np.concatenate([*sizes[name], [0]]), starts)
            counts = [held.column(column).to_numpy()[starts] for column in further[name]]
            digests[name] = hasher.digest(frames, *counts)
        for row in long_rows.frames:
            if len({*ids[starts[row] : starts[row] + long_rows.parts(row)]}) != 1:
                # The parts of a row must share an id: with all ids the digest differs.
                return ShardDigest(tuple(ids), digests)
        return ShardDigest(tuple(ids[start] for start in starts), digests)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        return ParquetShard(layout, rel, promise, cache)

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        return (
            "from datasets import load_dataset",
            'ds = load_dataset("path/to/this/folder")  # the files listed above, no others',
            f"# A recording with more than {LIMIT_BYTES // MB} MB of features is "
            "several rows of one row_id:",
            "# sort its rows by <stream>_start and join their frames.",
        )


PARQUET = ParquetFormat()
