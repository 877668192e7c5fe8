"""The index of a closed dataset: one line a row, good and bad, in the order of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from earmill.pipeline.dataset.row_coverage import plan_row_of
from earmill.pipeline.dataset.verify import ShardTables
from earmill.pipeline.formats.row_table import EXTRA_PREFIX
from earmill.pipeline.formats.stream_layout import layout_of

STATUS_OK = "ok"
STATUS_BAD = "quarantined"


@dataclass(frozen=True)
class IndexPart:
    """The rows of one shard for the index.

    Args:
        tables: Its good rows, and its bad ones if there are any.
        order: Of all of them in the plan: numbers in the tables, one after the other.
    """

    tables: list[pa.Table]
    order: np.ndarray


def build_index(parts: Sequence[IndexPart]) -> pa.Table:
    """All rows, in the order of the parts and of each."""
    tables = [table for part in parts for table in part.tables]
    whole = pa.concat_tables(_same_extras(tables), promote_options="default").combine_chunks()
    starts = np.cumsum([0, *(len(part.order) for part in parts)])
    order = np.concatenate([part.order + at for part, at in zip(parts, starts, strict=False)])
    if not np.array_equal(order, np.arange(len(order))):
        whole = whole.take(order)
    return whole.replace_schema_metadata(None)


def index_part(
    shard: ShardTables, plan_rows: Sequence[str], streams: Sequence[Mapping[str, Any]]
) -> IndexPart:
    """Return a table with one row per good or quarantined row of a shard.

    Columns: row_id, plan_row_id, channel, shard, row (position in the shard's files), seconds, uri,
    `<stream>_start` and `<stream>_n_frames` (for events also `<stream>_n_steps`), status, stage,
    error_class, message, attempts, and the carried-through `extra_` columns. Cells that a
    quarantined row does not have are null.

    Args:
        plan_rows: Planned for the shard, in order. streams: As dataset.json has them.
    """
    tables = [_good(shard, streams)]
    if shard.bad is not None:
        tables.append(_bad(shard, shard.bad, plan_rows))
    return IndexPart(tables, _plan_order(tables, plan_rows))


def _good(shard: ShardTables, streams: Sequence[Mapping[str, Any]]) -> pa.Table:
    rows = shard.rows
    columns = {name: rows.column(name) for name in ("row_id", "plan_row_id", "channel")}
    columns["shard"] = pa.array([shard.record.shard] * rows.num_rows, pa.string())
    columns["row"] = pa.array(np.arange(rows.num_rows))
    columns |= {name: rows.column(name) for name in ("seconds", "uri")}
    for stream in streams:
        for name in layout_of(stream).place_columns:
            columns[name] = rows.column(name)
    columns["status"] = pa.array([STATUS_OK] * rows.num_rows, pa.string())
    nothing = pa.nulls(rows.num_rows, pa.string())
    columns |= {"stage": nothing, "error_class": nothing, "message": nothing}
    columns["attempts"] = pa.nulls(rows.num_rows, pa.int64())
    columns |= {n: rows.column(n) for n in rows.column_names if n.startswith(EXTRA_PREFIX)}
    return pa.table(columns)


def _bad(shard: ShardTables, bad: pa.Table, plan_rows: Sequence[str]) -> pa.Table:
    planned = frozenset(plan_rows)
    row_ids = bad.column("row_id").to_pylist()
    columns = {
        "row_id": bad.column("row_id"),
        "plan_row_id": pa.array([plan_row_of(row_id, planned) for row_id in row_ids], pa.string()),
        "shard": pa.array([shard.record.shard] * bad.num_rows, pa.string()),
        "uri": bad.column("uri"),
        "status": pa.array([STATUS_BAD] * bad.num_rows, pa.string()),
    }
    columns |= {name: bad.column(name) for name in ("stage", "error_class", "message", "attempts")}
    return pa.table(columns)


def _same_extras(parts: Sequence[pa.Table]) -> list[pa.Table]:
    """Give every carried-through column one type: the numeric ones double, else text."""
    kinds: dict[str, set[pa.DataType]] = {}
    for part in parts:
        for column in part.schema:
            if column.name.startswith(EXTRA_PREFIX) and part.num_rows:
                kinds.setdefault(column.name, set()).add(column.type)
    numbers = {pa.int64(), pa.float64()}
    common = {
        name: next(iter(seen))
        if len(seen) == 1
        else (pa.float64() if seen <= numbers else pa.string())
        for name, seen in kinds.items()
    }
    return [_cast(part, common) for part in parts]


def _cast(part: pa.Table, common: Mapping[str, pa.DataType]) -> pa.Table:
    for position, column in enumerate(part.schema):
        if column.name.startswith(EXTRA_PREFIX):
            kind = common.get(column.name, column.type)
            values = part.column(position).cast(kind) if part.num_rows else pa.nulls(0, kind)
            part = part.set_column(position, pa.field(column.name, kind), values)
    return part


def _plan_order(tables: Sequence[pa.Table], plan_rows: Sequence[str]) -> np.ndarray:
    """Row numbers that sort by plan position, then by channel and name."""
    position = {row_id: number for number, row_id in enumerate(plan_rows)}
    keys = []
    for table in tables:
        names = table.column("row_id").to_pylist()
        planned = table.column("plan_row_id").to_pylist()
        channels: list[int | None] = [None] * len(names)  # of a bad row, which has none
        if "channel" in table.column_names:
            channels = table.column("channel").to_pylist()
        keys += [
            (position[row], -1 if channel is None else channel, name)
            for row, channel, name in zip(planned, channels, names, strict=True)
        ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
