"""A shard as one Parquet file: a row a clip, scalars beside one column a stream.

No reader of Parquet applies a scale, so the values of scaled streams are stored in float32. Small
row groups suit random access, large ones scans. A row that is too large for a row group is divided.
Sizes are counted before scaled streams are widened, so that a row group is the block by which the
reader shuffles (`reader.catalog`).

A cell holds the frames of a row:

    binary   binary                               the numbers, row after row, little endian; the
                                                  field's metadata has columns and dtype, and the
                                                  factor if numbers are not values
    nested   list<fixed_size_list<T>[columns]>    T: halffloat, float, or int32 of events

Bytes decode at the speed of memory; `numpy.frombuffer(cell, "<f2").reshape(-1, columns)` makes
frames of them anywhere. Nested lists show numbers to SQL, but Parquet keeps a level for every
number, which costs twenty times the time. Neither is `arrow.fixed_shape_tensor`, which Hugging Face
datasets refuse. Offsets of 32 bits suffice: a row group has at most 128 MB, or 256 MB if streams
were scaled and are float32 here. The nested form counts frames, not numbers. A file's schema names
its form. Layout versions 1 and 2 have the nested form alone.

`LongRows` divides rows that are too large for one cell over rows of the file that follow each
other. Arrow needs the memory of a cell several times to write or read it. A row with more than
`LIMIT_BYTES` of features therefore lies in several rows of the file, each a row group of its own.
A worker then needs as much memory for three hours as for ten minutes:

    row_id   seconds  modulation_start  modulation_n_frames  modulation
    a.wav    12.5     0                 1250                 ...
    day.flac 86400    1250              135000               frames 0 to 134999
    day.flac 86400    136250            135000               frames 135000 to 269999
    ...

Row id and scalars repeat; each part has its own start and number of frames. The parts' frames are
also in the file's metadata under `PARTS_KEY`, which only such files have.

    file = PAR1 pages indexes  seal  footer length PAR1        seal: EMFC, CRC-32C of the rest

Pages have checksums; a footer has none, and one with a flipped bit can end the process inside of
Arrow. So writers put a seal between indexes and footer, where no reader looks: the footer is found
from the end of the file, the rest from its start. Files of layout versions 1 and 2 have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.digest import ShardDigest, StreamHasher
from earmill.pipeline.formats.format import BINARY, NESTED, Encoding
from earmill.pipeline.formats.row_table import PAGES, scalar_options, scalars_of
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import in_values, layout_of

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo

MB = 2**20
# About ten minutes of Dau1997.
LIMIT_BYTES = 32 * MB
PART_BYTES = 16 * MB
PARTS_KEY = b"earmill.parts"
# Column of the row ids.
ID_COLUMN = "row_id"
# Keys in the metadata of a binary column.
PREFIX = "earmill."
COLUMNS_KEY, DTYPE_KEY = b"earmill.columns", b"earmill.dtype"
# Levels of a number, or the length of a cell, cost up to 4 bytes.
OVERHEAD_BYTES = 4
SEAL_MARK = b"EMFC"
# The length of the footer and the mark behind it are the last bytes of a file.
MAGIC, LENGTH_BYTES = b"PAR1", 4
END_BYTES = LENGTH_BYTES + len(MAGIC)
# profile: (close the row group at, never beyond unless one row is larger), uncompressed bytes.
ROW_GROUP_BYTES = {"random": (2 * MB, 4 * MB), "scan": (64 * MB, 128 * MB)}
WRITE_BYTES = MB // 4
STREAMS_KEY = b"earmill.streams"
ATTRS_KEY = b"earmill.attrs"


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
            frames = {
                int(row): {str(name): [*map(int, counts)] for name, counts in streams.items()}
                for row, streams in json.loads(text).items()
            }
        except (ValueError, TypeError, AttributeError) as err:
            raise CommitError(
                f"{PARTS_KEY.decode()}: expected frames by row and stream: {err}"
            ) from err
        for row, streams in frames.items():
            counts = [*streams.values()]
            if row < 0 or len({len(each) for each in counts}) != 1 or min(map(min, counts)) < 0:
                raise CommitError(f"{PARTS_KEY.decode()}: row {row} has no consistent parts")
        return cls(dict(sorted(frames.items())))

    def metadata(self) -> dict[bytes, bytes]:
        """Return the metadata for a file's schema."""
        return {PARTS_KEY: json.dumps(self.frames).encode()} if self.frames else {}

    def parts(self, row: int) -> int:
        """Return how many rows of the file a row of the shard has."""
        return len(next(iter(self.frames[row].values()))) if row in self.frames else 1

    def first(self, row: int) -> int:
        """Return the row of the file where a row of the shard starts."""
        return row + sum(self.parts(long) - 1 for long in self.frames if long < row)

    def spans(self, row: int, stream: str, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield parts of frames [first, last) of a divided row: row of the file, first, last."""
        counts = self.frames[row][stream]
        starts = accumulate(counts, initial=0)
        for part, (start, count) in enumerate(zip(starts, counts, strict=False)):
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                yield self.first(row) + part, low, high


def _flat(frames: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return all numbers of some rows, one after another."""
    whole = frames[0] if len(frames) == 1 else np.concatenate(frames, axis=0)
    return np.ascontiguousarray(whole, dtype=np.dtype(dtype).newbyteorder("<")).reshape(-1)


def _offsets(sizes: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(sizes)], dtype=np.int32)


class BinaryCells:
    """A cell is the bytes of its frames. lz4 finds what repeats, as in events, and costs nothing
    where nothing does."""

    #: Codec of the column, and its level if it has levels.
    compression: str = "lz4"
    level: int | None = None

    def field(self, column: str, width: int, dtype: str, attrs: Mapping[str, str]) -> pa.Field:
        """Return name and type of a stream's column, given width and type of its stored rows, and
        metadata on how numbers become values."""
        facts = {COLUMNS_KEY.decode(): str(width), DTYPE_KEY.decode(): dtype}
        return pa.field(column, pa.binary(), metadata={**facts, **attrs})

    def stored(self, field: pa.Field) -> tuple[int, str]:
        """Return columns and dtype of the frames as the file states them; a CommitError if it does
        not."""
        try:
            found = field.metadata
            return int(found[COLUMNS_KEY]), np.dtype(found[DTYPE_KEY].decode()).name
        except (TypeError, KeyError, ValueError) as err:
            raise CommitError(
                f"expected a binary column {field.name} that says its columns and its dtype, got "
                f"{field.metadata}; run `earmill verify`"
            ) from err

    def leaf(self, column: str) -> str:
        """Return the path of the column's numbers in the footer."""
        return column

    def cells(self, frames: Sequence[np.ndarray], width: int, dtype: str) -> pa.Array:
        """Encode the frames of some rows as cells; the frames of a single row are not copied."""
        flat = _flat(frames, dtype)
        frame_bytes = width * flat.itemsize
        offsets = _offsets([len(values) * frame_bytes for values in frames])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat.view(np.uint8))]
        return pa.Array.from_buffers(pa.binary(), len(frames), buffers)

    def frames(self, cells: Any, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode all frames of some cells, (frames, width), and the bounds of cells in them, int64.
        A cell that holds no whole frames, or nothing, is a CommitError."""
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
    """A cell is a list of frames, each a list of numbers. Methods as of `BinaryCells`."""

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

    def cells(self, frames: Sequence[np.ndarray], width: int, dtype: str) -> pa.Array:
        blocks = pa.FixedSizeListArray.from_arrays(pa.array(_flat(frames, dtype)), width)
        offsets = _offsets([len(values) for values in frames])
        return pa.ListArray.from_arrays(pa.array(offsets), blocks)

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
    """Return the encoding of a column of a file, by its type."""
    return CELL_ENCODINGS[BINARY if kind == pa.binary() else NESTED]


def write_parquet(
    path: Path, rows: Sequence[FeatureRow], streams: Sequence[StreamInfo], encoding: Encoding
) -> None:
    """Write the rows as a new file; a CommitError if a column cannot be stored."""
    scalars = scalars_of(rows, streams, encoding)
    row_bytes = [sum(values.nbytes for values in row.streams.values()) for row in rows]
    divided = {}
    for number, row in enumerate(rows):
        parts = part_count(row_bytes[number])
        if parts > 1:
            divided[number] = {
                name: [last - first for first, last in cut(len(values), parts)]
                for name, values in row.streams.items()
            }
    long_rows, form = LongRows(divided), CELL_ENCODINGS[encoding.parquet_form]
    schema = _schema(scalars.schema, streams, encoding, long_rows, form)
    # A divided row shares no row group.
    sizes = [math.inf if n in divided else nbytes for n, nbytes in enumerate(row_bytes)]
    # Unbuffered, every page would be two calls of the system.
    with (
        pa.output_stream(path, buffer_size=WRITE_BYTES) as file,
        pq.ParquetWriter(
            file,
            schema,
            # Features never repeat, so a dictionary or min/max of them costs and finds nothing.
            **_options(scalars, streams, form),
            write_statistics=scalars.schema.names,
            **PAGES,
        ) as writer,
    ):
        for start, stop in row_groups(sizes, encoding.row_group_profile):
            group = scalars.slice(start, stop - start)
            parts = long_rows.parts(start)
            if parts > 1:  # alone in its group
                for part in range(parts):
                    writer.write_table(
                        _part_table(rows[start], group, streams, schema, part, parts, encoding)
                    )
                continue
            columns = [
                _cells([row.streams[info.name][:] for row in rows[start:stop]], info, encoding)
                for info in streams
            ]
            table = pa.table([*group.columns, *columns], schema=schema)
            writer.write_table(table, row_group_size=stop - start)
    # The seal lies before the footer.
    with path.open("r+b") as file:
        file.seek(-END_BYTES, 2)
        start = -END_BYTES - int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(start, 2)
        footer = file.read()
        file.seek(start, 2)
        file.write(seal_of(footer) + footer)


def _part_table(
    row: FeatureRow,
    scalars: pa.Table,
    streams: Sequence[StreamInfo],
    schema: pa.Schema,
    part: int,
    parts: int,
    encoding: Encoding,
) -> pa.Table:
    """Return one part of a divided row, with its own start and number of frames."""
    columns = dict(zip(scalars.column_names, scalars.columns, strict=True))
    for info in streams:
        values = row.streams[info.name]
        first, last = cut(len(values), parts)[part]
        start, count = layout_of(info).place_columns[:2]
        columns[start] = pc.add(columns[start], first)
        columns[count] = pa.array([last - first])
        columns[info.name] = _cells([values[first:last]], info, encoding)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _schema(
    scalars: pa.Schema,
    streams: Sequence[StreamInfo],
    encoding: Encoding,
    long_rows: LongRows,
    form: CellEncoding,
) -> pa.Schema:
    fields = [*scalars]
    for info in streams:
        if info.name in scalars.names:
            raise CommitError(f"stream {info.name!r} has the name of a scalar column: rename it")
        layout = layout_of(info).in_values()
        dtype = layout.stored_dtype(encoding.dtype)
        attrs = {f"{PREFIX}{name}": text for name, text in layout.number_attrs().items()}
        fields.append(form.field(info.name, layout.stored_width, dtype, attrs))
    metadata = {
        STREAMS_KEY: json.dumps([in_values(info).to_dict() for info in streams]).encode(),
        ATTRS_KEY: json.dumps(dict(encoding.attrs or {}), sort_keys=True).encode(),
        **long_rows.metadata(),
    }
    return pa.schema(fields, metadata=metadata)


def row_groups(row_bytes: Sequence[float], profile: str) -> Iterator[tuple[int, int]]:
    """Cut rows into (start, stop) groups of the profile's size; a row is never divided here.

    A group is closed once it reaches the lower size, or when the next row would take it beyond the
    upper one. A row above the upper size is hence alone in its group.
    """
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


def _cells(stored: Sequence[np.ndarray], info: StreamInfo, encoding: Encoding) -> pa.Array:
    """Encode the stored rows of a stream of some clips as cells."""
    layout = layout_of(info)
    values = [layout.to_values(rows) for rows in stored]
    dtype = layout.in_values().stored_dtype(encoding.dtype)
    return CELL_ENCODINGS[encoding.parquet_form].cells(values, layout.stored_width, dtype)


def _options(
    scalars: pa.Table, streams: Sequence[StreamInfo], form: CellEncoding
) -> dict[str, Any]:
    """Return codec, level and dictionary of every column, by its path in the footer."""
    # Ids as they are: no two are alike, a row group has few, and who reads one needs them all.
    found = scalar_options(scalars.drop_columns([ID_COLUMN]))
    leaves = [form.leaf(info.name) for info in streams]
    found["compression"] |= dict.fromkeys(leaves, form.compression)
    if form.level is not None:
        found["compression_level"] |= dict.fromkeys(leaves, form.level)
    return found


def digest_parquet(path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
    """Read a written file back, a row group at a time."""
    layouts = {info.name: layout_of(info) for info in streams}
    sizes: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in layouts}
    # Behind start and number of frames.
    further = {name: layout.place_columns[2:] for name, layout in layouts.items()}
    beside = [ID_COLUMN, *(column for each in further.values() for column in each)]
    scalars, forms, stored, hashers = [], {}, {}, {}
    # By its name, Arrow would first look for a filesystem.
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
