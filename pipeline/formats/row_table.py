"""The scalar columns of a shard: identity, durations, provenance facts, carried-through columns.
The index is made of these tables, without opening features. Known facts always have a column of a
fixed type, so that shards agree. The source's own columns get the prefix `extra_`: no later fact
collides with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.arrow_types import arrow_type, column, extra_types
from earmill.pipeline.common.errors import CommitError, SpecError
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.stream_layout import layout_of

EXTRA_PREFIX = "extra_"
ZSTD_LEVEL, FEW_ROWS = 3, 8
# Readers skip pages by the index, and find damaged pages by the checksum.
PAGES = {"write_page_index": True, "write_page_checksum": True}

BASE_TYPES: dict[str, pa.DataType] = {
    "row_id": pa.string(),
    "plan_row_id": pa.string(),
    "channel": pa.int32(),
    "seconds": pa.float64(),
}
# Known provenance facts. Rates are float: a header may say 22050.5 Hz.
FACT_TYPES: dict[str, pa.DataType] = {
    "uri": pa.string(),
    "start_s": pa.float64(),
    "end_s": pa.float64(),
    "etag": pa.string(),
    "size": pa.int64(),
    "mtime": pa.float64(),
    "container": pa.string(),
    "codec": pa.string(),
    "rate_hz": pa.float64(),
    "channels": pa.int64(),
    "frames": pa.int64(),
    "nbytes": pa.int64(),
    "bytes_sha256": pa.string(),
    "pcm_sha256": pa.string(),
    "decoder": pa.string(),
    "decoder_version": pa.string(),
    "header_size": pa.string(),
    "unterminated": pa.bool_(),
    "span_short_s": pa.float64(),
    "resampler": pa.string(),
    "resampled_from_hz": pa.float64(),
    "gain_db": pa.float64(),
}
# Further facts in jobs with variants, all text: these columns are in the index, too.
VARIANT_COLUMNS = ("variant", "variant_of")
# Provenance columns of jobs with variants, null for clean rows, and of jobs of pairs.
VARIANT_FACTS = (*VARIANT_COLUMNS, "variant_settings")
REFERENCE_FACTS = ("reference_uri", "reference_pcm_sha256")


def check_stream_names(streams: Iterable[StreamInfo], facts: Iterable[str] = ()) -> None:
    """Refuse streams that would be columns of a name that rows have already. `facts` are columns of
    this job's rows, see `facts_of_job`."""
    infos, known = list(streams), {*BASE_TYPES, *FACT_TYPES, *facts}
    places = {name: info.name for info in infos for name in columns_of(info)}
    for info in infos:
        whose = "every row"
        if info.name in places:
            whose = f"stream {places[info.name]!r}"
        # A stream `extra` has columns such as `extra_start`, which would be the source's.
        elif info.name not in known and not f"{info.name}_".startswith(EXTRA_PREFIX):
            continue
        raise SpecError(
            f"extract: expected streams whose names are free, got {info.model}'s {info.name!r}, "
            f"which is a column of {whose}; rename it in the model, or leave it out of `streams`"
        )


def columns_of(info: StreamInfo | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of a table of rows that belong to a stream."""
    layout = layout_of(info)
    return (*layout.place_columns, *layout.value_columns)


def fact_names(
    columns: Iterable[str], streams: Iterable[StreamInfo | Mapping[str, Any]]
) -> list[str]:
    """Return the names of the provenance columns of a table of rows."""
    others = {*BASE_TYPES, *(name for info in streams for name in columns_of(info))}
    return [name for name in columns if name not in others and not name.startswith(EXTRA_PREFIX)]


QUARANTINE_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("uri", pa.string()),
        ("stage", pa.string()),
        ("error_class", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int64()),
    ]
)


def row_table(
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo],
    types: Mapping[str, Any] | None = None,
) -> pa.Table:
    """Return identity, start and counts per stream, facts and extras of every row. If `types` of
    the carried-through columns are None, they follow from these rows."""
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(row, name) for row in rows], kind)
        for name, kind in BASE_TYPES.items()
    }
    for info in streams:
        sizes = np.array([len(row.streams[info.name]) for row in rows], dtype=np.int64)
        layout = layout_of(info)
        counts = (np.cumsum(sizes) - sizes, sizes, *layout.counts_of(rows))
        for name, values in zip(layout.place_columns, counts, strict=True):
            columns[name] = pa.array(values)
        if layout.value_columns:
            values = np.concatenate(
                [np.empty((0, info.width), np.float32)]
                + [np.asarray(row.streams[info.name]) for row in rows]
            )
            for name, cells in zip(layout.value_columns, values.T, strict=True):
                columns[name] = pa.array(np.ascontiguousarray(cells))
    others = extra_types(
        {k: v for k, v in row.facts.items() if k not in FACT_TYPES} for row in rows
    )
    kinds = {**FACT_TYPES, **{name: arrow_type(kind) for name, kind in others.items()}}
    facts = {
        name: column(name, [row.facts.get(name) for row in rows], kind)
        for name, kind in kinds.items()
    }
    for name, cells in {**facts, **_extras(rows, types)}.items():
        if name in columns:
            raise CommitError(
                f"two columns are called {name!r}: rename the fact or the feature stream"
            )
        columns[name] = cells
    return pa.table(columns)


def _extras(rows: Sequence[FeatureRow], types: Mapping[str, Any] | None) -> dict[str, pa.Array]:
    if types is None:
        types = extra_types(row.extra for row in rows)
    unknown = {name for row in rows for name in row.extra} - set(types)
    if unknown:
        raise CommitError(
            f"expected the carried-through columns {sorted(types)}, got also {sorted(unknown)}; "
            "the source changed since the plan was made: plan again into a new output"
        )
    return {
        EXTRA_PREFIX + name: column(
            name, [row.extra.get(name) for row in rows], arrow_type(types[name])
        )
        for name in sorted(types)
    }


def quarantine_table(bad: Sequence[QuarantineRow]) -> pa.Table:
    return pa.Table.from_pylist([*map(vars, bad)], QUARANTINE_SCHEMA)


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a small table as Parquet; equal tables give equal bytes."""
    content = pa.BufferOutputStream()
    pq.write_table(table, content, **scalar_options(table), **PAGES)
    path.write_bytes(content.getvalue())
    return path


def scalar_options(table: pa.Table) -> dict[str, Any]:
    """Return Parquet's options: zstd, and dictionaries for text; neither makes few rows smaller."""
    if len(table) < FEW_ROWS:
        return {"compression": {}, "compression_level": {}, "use_dictionary": False}
    names = table.column_names
    return {
        "compression": dict.fromkeys(names, "zstd"),
        "compression_level": dict.fromkeys(names, ZSTD_LEVEL),
        "use_dictionary": [field.name for field in table.schema if field.type == pa.string()],
    }
