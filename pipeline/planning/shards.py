"""Shards of a plan, their rows as a table, and the id of a plan.

The table has one line for each row, in the plan's order. Columns of the source are stored as JSON
if JSON keeps their values, else in their own type.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet

from earmill.pipeline.common.arrow_types import arrow_type, column, plain_json
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import EqualRow, Item

# Seconds of a row whose duration is not known before it is read.
UNKNOWN_SECONDS = 10.0
# Rows that are fetched in one piece stay together up to this many times a shard's length.
BLOCK_SHARDS = 8


@dataclass(frozen=True)
class Shard:
    """Rows that are processed and committed together.

    Args:
        shard_id: Five digits or more, in plan order.
        items: Rows in order. `planning.parts.StoredShard` reads them when they are needed.
    """

    shard_id: str
    items: tuple[Item, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.items)

    @property
    def seconds(self) -> float:
        """Expected seconds of audio."""
        return sum(item_seconds(item) for item in self.items)


def item_seconds(item: Item) -> float:
    """Return the expected seconds of a row; `UNKNOWN_SECONDS` if nothing is known."""
    return UNKNOWN_SECONDS if item.seconds is None else max(0.0, item.seconds)


def cut(items: Iterable[Item], shard_seconds: float, shard_rows: int) -> Iterator[list[Item]]:
    """Yield groups of neighbours of at most `shard_seconds` and `shard_rows`, or of one row.

    Rows of one block share a group, which may be up to `BLOCK_SHARDS` times as long.
    """
    group: list[Item] = []
    total = 0.0
    for unit in _units(items, shard_seconds * BLOCK_SHARDS, shard_rows):
        seconds = sum(map(item_seconds, unit))
        if group and (total + seconds > shard_seconds or len(group) + len(unit) > shard_rows):
            yield group
            group, total = [], 0.0
        group += unit
        total += seconds
    if group:
        yield group


def _units(items: Iterable[Item], most_s: float, most_rows: int) -> Iterator[Sequence[Item]]:
    """Yield rows by blocks, and single rows that have no block or a block that is too large."""
    held: list[Item] = []
    held_s = 0.0
    large: int | None = None
    for item in items:
        if held and item.block != held[-1].block:
            yield held
            held, held_s = [], 0.0
        if item.block is None or item.block == large:
            yield (item,)
            continue
        held.append(item)
        held_s += item_seconds(item)
        if held_s > most_s or len(held) > most_rows:
            yield from ((one,) for one in held)
            held, held_s, large = [], 0.0, item.block
    if held:
        yield held


Row = TypeVar("Row")

TYPED_PREFIX = "typed:"
# Column of plans in which some durations are estimated.
ESTIMATED = "estimated"
# Columns of plans with spans of long rows: start and end of the whole row.
PART_START, PART_END = "part_of_start_s", "part_of_end_s"
# Columns of plans with copies: the row that is copied, see `EqualRow`.
EQUAL = {name: f"equal_to_{name}" for name in EqualRow._fields}
# Types whose values do not change in JSON.
IN_JSON = ("string", "int64", "double", "bool")

# `json.dumps` with these options would build an encoder for every row.
_ROW_JSON = json.JSONEncoder(separators=(",", ":"))
_EXTRA_JSON = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=plain_json
)

SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("shard_position", pa.int32()),
        ("row_id", pa.string()),
        ("uri", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("etag", pa.string()),
        ("size", pa.int64()),
        ("mtime", pa.float64()),
        ("seconds", pa.float64()),
        ("extra_json", pa.string()),
        ("source_position", pa.int64()),
    ]
)


def rows_table(shards: Sequence[Shard], typed: Mapping[str, pa.DataType]) -> pa.Table:
    """Return the rows of some shards as a table.

    Args:
        shards: The shards.
        typed: Columns of the source that JSON would change, see `typed_columns`.
    """
    pairs = [(shard, index) for shard in shards for index in range(shard.rows)]
    items = [item for shard in shards for item in shard.items]
    columns: dict[str, list[Any]] = {
        "shard": [shard.shard_id for shard, _ in pairs],
        "shard_position": [index for _, index in pairs],
        "extra_json": [extra_json(_without(item.extra, typed)) for item in items],
        "source_position": [item.position for item in items],
    }
    columns |= {
        name: [getattr(item, name) for item in items]
        for name in SCHEMA.names
        if name not in columns
    }
    table = pa.table(columns, schema=SCHEMA)
    if any(item.estimated for item in items):
        marks = pa.array([item.estimated for item in items], pa.bool_())
        table = table.append_column(ESTIMATED, marks)
    if any(item.part_of for item in items):
        for name, at in ((PART_START, 0), (PART_END, 1)):
            ends = [item.part_of[at] if item.part_of else None for item in items]
            table = table.append_column(name, pa.array(ends, pa.float64()))
    if any(item.equal_to for item in items):
        for name, column_name in EQUAL.items():
            texts = [getattr(item.equal_to, name, None) for item in items]
            table = table.append_column(column_name, pa.array(texts, pa.string()))
    for name, kind in typed.items():
        cells = column(name, [item.extra.get(name) for item in items], kind)
        table = table.append_column(TYPED_PREFIX + name, cells)
    return table


def encoded(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """Encode a table of a plan as a Parquet file with metadata."""
    sink = io.BytesIO()
    pa.parquet.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return sink.getvalue()


def typed_columns(types: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Return the columns whose values JSON would change, with their Arrow types."""
    return {name: arrow_type(kind) for name, kind in types.items() if kind not in IN_JSON}


def items_of(table: pa.Table) -> list[Item]:
    """Return the rows of a table that `rows_table` made."""
    return [_item(row) for row in table.to_pylist()]


def by_shard(table: pa.Table, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group values that belong to the rows of a table by shard, in order."""
    groups: dict[str, list[Row]] = {}
    for shard_id, row in zip(table.column("shard").to_pylist(), rows, strict=True):
        groups.setdefault(shard_id, []).append(row)
    return groups


def _item(row: Mapping[str, Any]) -> Item:
    kept = ("row_id", "uri", "start_s", "end_s", "etag", "size", "mtime", "seconds")
    typed = {
        name.removeprefix(TYPED_PREFIX): value
        for name, value in row.items()
        if name.startswith(TYPED_PREFIX)
    }
    start_s = row.get(PART_START)
    equal = [row.get(column_name) for column_name in EQUAL.values()]
    return Item(
        **{name: row[name] for name in kept},
        equal_to=EqualRow(*map(str, equal)) if all(equal) else None,
        part_of=None if start_s is None else (start_s, row[PART_END]),
        extra=loads_json(row["extra_json"], max_chars=None) | typed,
        position=row["source_position"],
        estimated=bool(row.get(ESTIMATED)),
    )


def _without(extra: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in names}


class PlanId:
    """The id of a plan, computed shard by shard.

    Args:
        spec_sha256: Hash of the plan's spec.
    """

    CHARS = 16

    def __init__(self, spec_sha256: str) -> None:
        self._digest = hashlib.sha256(spec_sha256.encode())

    def add(self, shard: Shard) -> None:
        for item in shard.items:
            self._digest.update(_identity(shard.shard_id, item).encode())
            self._digest.update(b"\n")

    def __str__(self) -> str:
        return self._digest.hexdigest()[: self.CHARS]

    @classmethod
    def of(cls, shards: Iterable[Shard], spec_sha256: str) -> str:
        plan_id = cls(spec_sha256)
        for shard in shards:
            plan_id.add(shard)
        return str(plan_id)


def _identity(shard_id: str, item: Item) -> str:
    """Return the text of a row that is hashed. Estimates are left out; they decide the shard."""
    # Without a content tag the modification time is the only sign of a changed file.
    changed = item.mtime if item.etag is None else item.etag
    span = (item.start_s, item.end_s, *([item.part_of] if item.part_of else []))
    where = (item.row_id, item.uri, *span, item.size, changed, item.position)
    equal = [item.equal_to] if item.equal_to else []
    return _ROW_JSON.encode((shard_id, *where, *equal, extra_json(item.extra)))


def extra_json(extra: Mapping[str, Any]) -> str:
    """Return the columns of the source as a plan stores and compares them."""
    return _EXTRA_JSON.encode(dict(extra))
