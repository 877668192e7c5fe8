"""Rows of a committed shard as they were published: what a copy into another shard is made of.

Values are those on disk, bit for bit, in the stored type; a row whose features would fill memory
comes in files, as it did when it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import CommitRecord, bad_rows
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.row_coverage import plan_row_of
from earmill.pipeline.formats.block_cache import BlockCache, FrameSpan, IoCounts
from earmill.pipeline.formats.format import (
    Format,
    Promise,
    chosen,
    explain_damage,
    format_of,
    is_as_committed,
)
from earmill.pipeline.formats.row_table import (
    BASE_TYPES,
    EXTRA_PREFIX,
    QUARANTINE_SCHEMA,
)
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.stream_layout import StreamLayout, layout_of
from earmill.pipeline.formats.values import Spilled, Values
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

CACHE_BYTES = 64 * 2**20
# A row whose streams are larger is held in files.
SPILL_BYTES = 128 * 2**20
# Frames of such a row that are read at a time.
PIECE_BYTES = 32 * 2**20


# Reads frames of a stream.
Read = Callable[[StreamLayout, FrameSpan], Any]


def promise_of(
    record: CommitRecord,
    streams: Mapping[str, Mapping[str, Any] | StreamInfo],
    dtype: str,
    fmt: Format,
) -> Promise:
    """Return the contents that a commit states for its shard's files in one format."""
    layouts = {name: fmt.layout_of(info) for name, info in streams.items()}
    return Promise(
        rows=record.rows_ok,
        frames={name: record.frames[name] for name in streams},
        columns={k: (v.stored_width, v.stored_dtype(dtype)) for k, v in layouts.items()},
        files={file.path: file for file in record.files},
    )


def stored_rows(
    layout: Layout, dataset: DatasetFile, record: CommitRecord, plan_rows: Collection[str]
) -> Iterator[FeatureRow]:
    """The good rows of a shard that came of these rows of the plan, in the order of the shard.

    Raises:
        CommitError: A file is missing or damaged.
        ExtensionError: None of the shard's formats is installed here.
    """
    streams = {info["name"]: layout_of(info) for info in dataset.streams}
    name = chosen(record.formats, None, {})
    fmt, rel = format_of(name), str(record.path(name))
    infos = {info["name"]: info for info in dataset.streams}
    promise = promise_of(record, infos, record.dtype, fmt)
    where = f"shard {record.shard}"
    with explain_damage(where, str(record.path("rows"))):
        table = read_table(layout, str(record.path("rows"))).to_pylist()
    with explain_damage(where, rel, lambda: is_as_committed(layout, rel, promise)):
        cache = BlockCache(CACHE_BYTES, IoCounts())
        with closing(fmt.open(layout, rel, promise, cache)) as reader:

            def read(stream: StreamLayout, span: FrameSpan) -> Any:
                found = reader.read(stream.name, span)
                return found if fmt.has_scales else stream.from_values(found)

            for number, row in enumerate(table):
                if row["plan_row_id"] in plan_rows:
                    yield _row(read, number, row, streams, layout)


def stored_bad_rows(
    layout: Layout, record: CommitRecord, plan_rows: Collection[str]
) -> dict[str, list[QuarantineRow]]:
    """The quarantined rows of a shard, by the row of the plan they came of, of these rows."""
    planned = frozenset(plan_rows)
    found: dict[str, list[QuarantineRow]] = {}
    for row in bad_rows(layout, record).to_pylist():
        row_id = plan_row_of(row["row_id"], planned)
        if row_id in planned:
            bad = QuarantineRow(**{name: row[name] for name in QUARANTINE_SCHEMA.names})
            found.setdefault(row_id, []).append(bad)
    return found


def _row(
    read: Read,
    number: int,
    row: Mapping[str, Any],
    streams: Mapping[str, StreamLayout],
    layout: Layout,
) -> FeatureRow:
    places = {column for each in streams.values() for column in each.place_columns}
    named = {*BASE_TYPES, *places}
    return FeatureRow(
        **{name: row[name] for name in BASE_TYPES},
        facts={k: v for k, v in row.items() if k not in named and not k.startswith(EXTRA_PREFIX)},
        extra={
            k.removeprefix(EXTRA_PREFIX): v for k, v in row.items() if k.startswith(EXTRA_PREFIX)
        },
        streams={name: _values(read, number, row, each, layout) for name, each in streams.items()},
        steps={
            name: int(row[each.length_column]) for name, each in streams.items() if each.row_counts
        },
    )


def _values(
    read: Read,
    number: int,
    row: Mapping[str, Any],
    stream: StreamLayout,
    layout: Layout,
) -> Values:
    start, length = (int(row[name]) for name in stream.place_columns[:2])

    def frames(first: int, last: int) -> Any:
        return read(stream, FrameSpan(row["row_id"], number, start, first, last))

    first = frames(0, min(1, length))
    row_bytes = max(1, stream.stored_width * first.dtype.itemsize)
    if first.ndim != 2:
        raise CommitError(f"row {row['row_id']!r}, stream {stream.name}: expected frames")
    if length * row_bytes <= SPILL_BYTES:
        return frames(0, length)
    whole = Spilled(first.dtype, stream.stored_width, layout.root if layout.is_local else None)
    step = max(1, PIECE_BYTES // row_bytes)
    for at in range(0, length, step):
        whole.append(frames(at, min(length, at + step)))
    return whole
