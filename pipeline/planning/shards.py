"""Shards of a plan: their rows in memory, as a table, and in files; and the id of a plan.

The table has one line for each row, in the plan's order. A plan of many rows is stored in parts,
which the index names with their sha256:

    plan/<plan-id>.parquet           a line for each shard: part, first row there, rows, seconds
    plan/<plan-id>/<number>.parquet  the rows of whole shards, in the form of a small plan

While a source is listed, parts are written to a folder of this process, so that no process ever
holds more than some thousand rows.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, groupby
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet

from earmill.pipeline.common.arrow_types import arrow_type, column, plain_json
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.gathering import within
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import EqualRow, Item, Reference, Variant
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import part_path
from earmill.pipeline.storage.scratch import own_folder

UNKNOWN_SECONDS = 10.0  # Seconds of a row whose duration is not known before it is read.
# Rows that are fetched in one piece stay together up to this many times a shard's length.
BLOCK_SHARDS = 8
PART_ROWS = 8192  # Rows of a part. A plan of fewer rows has no parts.
# Last used parts and shards that a process keeps in memory.
TABLES_KEPT, SHARDS_KEPT = 4, 8


@dataclass(frozen=True)
class Shard:
    """Rows that are processed and committed together."""

    shard_id: str  # Five digits or more, in plan order.
    items: tuple[Item, ...]  # `StoredShard` reads the rows when they are needed.

    @cached_property
    def rows(self) -> int:
        return len(self.items)

    @cached_property
    def seconds(self) -> float:
        return sum(item_seconds(item) for item in self.items)


def item_seconds(item: Item) -> float:
    return UNKNOWN_SECONDS if item.seconds is None else max(0.0, item.seconds)


def cut(items: Iterable[Item], shard_seconds: float, shard_rows: int) -> Iterator[list[Item]]:
    """Yield groups of neighbours of at most `shard_seconds` and `shard_rows`, or of one row. Rows
    of one block share a group, which may be up to `BLOCK_SHARDS` times as long. A row and its
    variants share a group, whatever their number."""

    def joined(units: Iterable[Sequence[Item]]) -> list[Item]:
        return [*chain.from_iterable(units)]

    def sizes(unit: Sequence[Item]) -> tuple[float, int]:
        return sum(map(item_seconds, unit)), len(unit)

    units = _units(items, shard_seconds * BLOCK_SHARDS, shard_rows)
    of_rows = (joined(found) for _, found in groupby(units, lambda unit: unit[0].clean_id))
    return map(joined, within(of_rows, sizes, (shard_seconds, shard_rows)))


def _units(items: Iterable[Item], most_s: float, most_rows: int) -> Iterator[Sequence[Item]]:
    """Yield rows by blocks, and single rows that have no block or a block that is too large."""
    for block, rows in groupby(items, lambda item: item.block):
        most = range(0 if block is None else most_rows + 1)
        held = [item for _, item in zip(most, rows, strict=False)]
        if 0 < len(held) <= most_rows and sum(map(item_seconds, held)) <= most_s:
            yield held
        else:
            yield from ((item,) for item in chain(held, rows))


Value = TypeVar("Value")

TYPED_PREFIX = "typed:"
ESTIMATED = "estimated"  # Column of plans in which some durations are estimated.
IN_JSON = ("string", "int64", "double", "bool")  # Types whose values do not change in JSON.

# `json.dumps` with these options would build an encoder for every row.
_ROW_JSON = json.JSONEncoder(separators=(",", ":"))
_EXTRA_JSON = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=plain_json
)

# Version 2 of a plan's file has some columns in their own types. Version 3 is an index of parts.
PLAN_VERSION, TYPED_VERSION, PARTED_VERSION = "1", "2", "3"

# Columns that are fields of `Item`.
OF_ITEM = {
    "row_id": pa.string(),
    "uri": pa.string(),
    "start_s": pa.float64(),
    "end_s": pa.float64(),
    "etag": pa.string(),
    "size": pa.int64(),
    "mtime": pa.float64(),
    "seconds": pa.float64(),
}
SCHEMA = pa.schema(
    {
        "shard": pa.string(),
        "shard_position": pa.int32(),
        **OF_ITEM,
        "extra_json": pa.string(),
        "source_position": pa.int64(),
    }
)
# Fields of `Item` that are tuples or None. Each has columns in the plans where a row has one; the
# first column is never null in such a row.
FACTS: dict[str, tuple[Callable[[Iterable[Any]], Any], dict[str, pa.DataType]]] = {
    "part_of": (tuple, {"part_of_start_s": pa.float64(), "part_of_end_s": pa.float64()}),
    **{
        name: (
            kind._make,
            {f"{name}_{part}": OF_ITEM.get(part, pa.string()) for part in kind._fields},
        )
        for name, kind in (("equal_to", EqualRow), ("variant", Variant), ("reference", Reference))
    },
}


def rows_table(shards: Sequence[Shard], typed: Mapping[str, pa.DataType]) -> pa.Table:
    items = [item for shard in shards for item in shard.items]
    columns: dict[str, list[Any]] = {
        "shard": [shard.shard_id for shard in shards for _ in range(shard.rows)],
        "shard_position": [index for shard in shards for index in range(shard.rows)],
        "extra_json": [
            extra_json({name: value for name, value in item.extra.items() if name not in typed})
            for item in items
        ],
        "source_position": [item.position for item in items],
    }
    columns |= {name: [getattr(item, name) for item in items] for name in OF_ITEM}
    table = pa.table(columns, schema=SCHEMA)
    if any(item.estimated for item in items):
        marks = pa.array([item.estimated for item in items], pa.bool_())
        table = table.append_column(ESTIMATED, marks)
    for of_item, (_, kinds) in FACTS.items():
        facts = [getattr(item, of_item) for item in items]
        for at, (name, kind) in enumerate(kinds.items() if any(facts) else ()):
            cells = pa.array([None if fact is None else fact[at] for fact in facts], kind)
            table = table.append_column(name, cells)
    for name, kind in typed.items():
        cells = column(name, [item.extra.get(name) for item in items], kind)
        table = table.append_column(TYPED_PREFIX + name, cells)
    return table


def encoded(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return sink.getvalue()


def typed_columns(types: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Return the columns whose values JSON would change, with their Arrow types."""
    return {name: arrow_type(kind) for name, kind in types.items() if kind not in IN_JSON}


def items_of(table: pa.Table) -> list[Item]:
    return [_item(row) for row in table.to_pylist()]


def by_shard(table: pa.Table, values: Sequence[Value]) -> dict[str, list[Value]]:
    groups: dict[str, list[Value]] = {}
    for shard_id, value in zip(table.column("shard").to_pylist(), values, strict=True):
        groups.setdefault(shard_id, []).append(value)
    return groups


def _item(row: Mapping[str, Any]) -> Item:
    typed = {
        name.removeprefix(TYPED_PREFIX): value
        for name, value in row.items()
        if name.startswith(TYPED_PREFIX)
    }
    fields: dict[str, Any] = {name: row[name] for name in OF_ITEM}
    for name, (make, kinds) in FACTS.items():
        values = [row.get(kind) for kind in kinds]
        fields[name] = None if values[0] is None else make(values)
    return Item(
        **fields,
        extra=loads_json(row["extra_json"], max_chars=None) | typed,
        position=row["source_position"],
        estimated=bool(row.get(ESTIMATED)),
    )


class PlanId:
    CHARS = 16

    def __init__(self, spec_sha256: str) -> None:
        self._digest = hashlib.sha256(spec_sha256.encode())

    def add(self, shard: Shard) -> None:
        """Hash the rows of a shard; estimates are left out, because they decide the shard."""
        for item in shard.items:
            # Without a content tag the modification time is the only sign of a changed file.
            changed = item.mtime if item.etag is None else item.etag
            span = (item.start_s, item.end_s, *([item.part_of] if item.part_of else []))
            where = (item.row_id, item.uri, *span, item.size, changed, item.position)
            others = [one for one in (item.equal_to, item.variant, item.reference) if one]
            line = _ROW_JSON.encode((shard.shard_id, *where, *others, extra_json(item.extra)))
            self._digest.update(f"{line}\n".encode())

    def __str__(self) -> str:
        return self._digest.hexdigest()[: self.CHARS]

    @classmethod
    def of(cls, shards: Iterable[Shard], spec_sha256: str) -> str:
        plan_id = cls(spec_sha256)
        for shard in shards:
            plan_id.add(shard)
        return str(plan_id)


def extra_json(extra: Mapping[str, Any]) -> str:
    return _EXTRA_JSON.encode(dict(extra))


@dataclass
class PartFolder:
    """The place of a plan's parts: a folder of this process until the plan is stored."""

    store: Layout
    plan_id: str  # Plan id in the names of the parts.


@dataclass(frozen=True)
class Part:
    number: int
    sha256: str
    home: PartFolder = field(compare=False)

    def read(self) -> bytes:
        """Read the file; CommitError if it is missing or has another checksum."""
        path = part_path(self.home.plan_id, self.number)
        try:
            data = self.home.store.read_bytes(path)
        except FileNotFoundError as error:
            raise CommitError(f"{path}: missing, a part of the plan; restore it") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CommitError(f"{path}: content changed since the plan was made; restore it")
        return data


@lru_cache(TABLES_KEPT)
def _table(part: Part) -> pa.Table:
    return table_of(part.read())


@lru_cache(SHARDS_KEPT)
def _items(part: Part, first: int, rows: int) -> tuple[Item, ...]:
    return tuple(items_of(_table(part).slice(first, rows)))


class StoredShard(Shard):
    """A shard whose rows are in a part, from row `first` on. A worker gets it without rows, and
    reads them."""

    part: Part
    first: int

    def __init__(self, shard_id: str, part: Part, first: int, rows: int, seconds: float) -> None:
        vars(self).update(shard_id=shard_id, part=part, first=first, rows=rows, seconds=seconds)

    @property
    def items(self) -> tuple[Item, ...]:
        return _items(self.part, self.first, self.rows)


class ShardWriter:
    """Writer of a plan's shards: it holds up to `PART_ROWS` rows in memory, then writes parts."""

    def __init__(self, spec_sha256: str, typed: Mapping[str, pa.DataType]) -> None:
        self.plan_id, self.typed = PlanId(spec_sha256), typed
        self.estimated = 0  # rows whose duration is estimated from their bytes
        self._held: list[Shard] = []
        self._held_rows = self._parts = 0
        self._stored: list[StoredShard] = []
        self._home: PartFolder | None = None

    def add(self, shard: Shard) -> None:
        self.plan_id.add(shard)
        self.estimated += sum(item.estimated for item in shard.items)
        if self._held and self._held_rows + shard.rows > PART_ROWS:
            self._flush()
        self._held.append(shard)
        self._held_rows += shard.rows

    def end(self) -> Sequence[Shard]:
        """Return all shards, with their rows if one part would have held them."""
        if self._home is None:
            return self._held
        self._flush()
        return self._stored

    def _flush(self) -> None:
        if self._home is None:
            folder = tempfile.mkdtemp(prefix="plan-", dir=own_folder())
            self._home = PartFolder(Layout.open(folder), "new")
        data = encoded(rows_table(self._held, self.typed), {"version": PARTED_VERSION})
        part = Part(self._parts, hashlib.sha256(data).hexdigest(), self._home)
        self._home.store.write_bytes(part_path(self._home.plan_id, part.number), data)
        first = 0
        for shard in self._held:
            place = (part, first, shard.rows, shard.seconds)
            self._stored.append(StoredShard(shard.shard_id, *place))
            first += shard.rows
        self._held, self._held_rows, self._parts = [], 0, self._parts + 1


def store_parts(shards: Sequence[StoredShard], store: Layout, plan_id: str) -> None:
    """Copy the parts of a new plan to the output; its shards are read there from now on."""
    home = shards[0].part.home
    if home.store is store:
        return
    for part in parts_of(shards):
        path, data = part_path(plan_id, part.number), part.read()
        # An interrupted attempt may have stored this part.
        with suppress(FileNotFoundError):
            if store.exists(path) and store.read_bytes(path) == data:
                continue
        store.write_bytes(path, data)
    home.store, home.plan_id = store, plan_id


def parts_of(shards: Sequence[StoredShard]) -> list[Part]:
    return list(dict.fromkeys(shard.part for shard in shards))


INDEX_SCHEMA = pa.schema(
    {
        "shard": pa.string(),
        "part": pa.int32(),
        "first": pa.int32(),
        "rows": pa.int32(),
        "seconds": pa.float64(),
    }
)


def index_table(shards: Sequence[StoredShard]) -> pa.Table:
    rows = [(one.shard_id, one.part.number, one.first, one.rows, one.seconds) for one in shards]
    return pa.table([*zip(*rows, strict=True)], schema=INDEX_SCHEMA)


def stored_shards(
    index: pa.Table, sha256s: Sequence[str], store: Layout, plan_id: str
) -> tuple[StoredShard, ...]:
    home = PartFolder(store, plan_id)
    parts = [Part(number, sha256, home) for number, sha256 in enumerate(sha256s)]
    return tuple(
        StoredShard(shard_id, parts[part], *place)
        for shard_id, part, *place in zip(*index.to_pydict().values(), strict=True)
    )
