"""A shard as one Parquet file: a row a clip, scalars beside one column a stream.

The encoding of a cell is described in `earmill.pipeline.formats.parquet.cells`. No reader of
Parquet applies a scale, so the values of scaled streams are stored in float32. Small row groups
suit random access, large ones scans. A row that is too large for a row group is divided. Sizes are
counted before scaled streams are widened, so that a row group is the block by which the reader
shuffles (`reader.catalog`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.digest import ShardDigest, StreamHasher
from earmill.pipeline.formats.parquet.cells import (
    CELL_ENCODINGS,
    ID_COLUMN,
    CellEncoding,
    LongRows,
    cell_encoding,
    cut,
    part_count,
)
from earmill.pipeline.formats.parquet.footer import seal
from earmill.pipeline.formats.row_table import PAGES, scalar_options, scalars_of
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import in_values, layout_of

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.format import Encoding

MB = 2**20
# profile: (close the row group at, never beyond unless one row is larger), uncompressed bytes.
ROW_GROUP_BYTES = {"random": (2 * MB, 4 * MB), "scan": (64 * MB, 128 * MB)}
WRITE_BYTES = MB // 4
STREAMS_KEY = b"earmill.streams"
ATTRS_KEY = b"earmill.attrs"


def write_parquet(
    path: Path, rows: Sequence[FeatureRow], streams: Sequence[StreamInfo], encoding: Encoding
) -> None:
    """Write the rows as a new file.

    Raises:
        CommitError: A column cannot be stored.
    """
    scalars = scalars_of(rows, streams, encoding)
    long_rows, dtype = _long_rows(rows), encoding.dtype
    cells = CELL_ENCODINGS[encoding.parquet_form]
    schema = _schema(scalars.schema, streams, encoding.attrs or {}, dtype, long_rows, cells)
    # Unbuffered, every page would be two calls of the system.
    with (
        pa.output_stream(path, buffer_size=WRITE_BYTES) as file,
        pq.ParquetWriter(
            file,
            schema,
            # Features never repeat, so a dictionary or min/max of them costs and finds nothing.
            **_options(scalars, streams, cells),
            write_statistics=scalars.schema.names,
            **PAGES,
        ) as writer,
    ):
        for start, stop in row_groups(_group_bytes(rows, long_rows), encoding.row_group_profile):
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
    seal(path)


def _long_rows(rows: Sequence[FeatureRow]) -> LongRows:
    """Find the rows that must be divided."""
    frames = {}
    for number, row in enumerate(rows):
        parts = part_count(_row_bytes(row))
        if parts > 1:
            frames[number] = {
                name: [last - first for first, last in cut(len(values), parts)]
                for name, values in row.streams.items()
            }
    return LongRows(frames)


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
    attrs: Mapping[str, Any],
    dtype: str,
    long_rows: LongRows,
    form: CellEncoding,
) -> pa.Schema:
    fields = [*scalars]
    for info in streams:
        if info.name in scalars.names:
            raise CommitError(f"stream {info.name!r} has the name of a scalar column: rename it")
        layout = layout_of(info).in_values()
        fields.append(
            form.field(
                info.name, layout.stored_width, layout.stored_dtype(dtype), layout.number_attrs()
            )
        )
    metadata = {
        STREAMS_KEY: json.dumps([in_values(info).to_dict() for info in streams]).encode(),
        ATTRS_KEY: json.dumps(dict(attrs), sort_keys=True).encode(),
        **long_rows.metadata(),
    }
    return pa.schema(fields, metadata=metadata)


def _group_bytes(rows: Sequence[FeatureRow], long_rows: LongRows) -> list[float]:
    """Return the bytes of each row in a row group; a divided row shares no row group."""
    return [
        math.inf if number in long_rows.frames else _row_bytes(row)
        for number, row in enumerate(rows)
    ]


def _row_bytes(row: FeatureRow) -> int:
    return sum(values.nbytes for values in row.streams.values())


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
    names = [info.name for info in streams]
    sizes: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in names}
    layouts = {info.name: layout_of(info) for info in streams}
    # Behind start and number of frames.
    further = {name: layout.place_columns[2:] for name, layout in layouts.items()}
    beside = [ID_COLUMN, *(column for each in further.values() for column in each)]
    scalars = []
    # By its name, Arrow would first look for a filesystem.
    with (
        pa.OSFile(str(path)) as opened,
        pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True) as file,
    ):
        schema = file.schema_arrow
        fields = {name: schema.field(name) for name in names}
        forms = {name: cell_encoding(field.type) for name, field in fields.items()}
        stored = {name: forms[name].stored(field) for name, field in fields.items()}
        hashers = {
            name: StreamHasher(width, layouts[name].from_values(np.empty(0, dtype)).dtype.name)
            for name, (width, dtype) in stored.items()
        }
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*names, *beside], use_threads=False)
            scalars.append(table.select(beside))
            for name in names:
                for chunk in table.column(name).chunks:
                    frames, offsets = forms[name].frames(chunk, *stored[name])
                    sizes[name].append(np.diff(offsets))
                    hashers[name].update(layouts[name].from_values(frames))
    held = pa.concat_tables(scalars or [schema.empty_table().select(beside)])
    long_rows = LongRows.from_metadata(schema.metadata)
    starts, row_ids = _undivided(long_rows, held.column(ID_COLUMN).to_pylist())
    digests = {}
    for name in names:
        frames = np.add.reduceat(np.concatenate([*sizes[name], [0]]), starts)
        counts = [held.column(column).to_numpy()[starts] for column in further[name]]
        digests[name] = hashers[name].digest(frames[: len(row_ids)], *counts)
    return ShardDigest(row_ids, digests)


def _undivided(long_rows: LongRows, ids: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return where each row of the shard starts in the file, and the row ids. The parts of a row
    must share an id."""
    n_rows = len(ids) - sum(long_rows.parts(row) - 1 for row in long_rows.frames)
    starts = np.array([long_rows.first(row) for row in range(n_rows)], np.int64)
    for row in long_rows.frames:
        parts = {*ids[starts[row] : starts[row] + long_rows.parts(row)]}
        if len(parts) != 1:
            return starts, tuple(ids)
    return starts, tuple(ids[start] for start in starts)
