"""Plans of many rows, stored in parts: to read a shard, a process reads only the part with it.

    plan/<plan-id>.parquet           one line a shard: part, first row there, rows, seconds
    plan/<plan-id>/<number>.parquet  the rows of whole shards, as a small plan has them

While a source is listed, parts are written to a folder of this process, so that no process ever
holds more than some thousand rows. The index names each part with the sha256 of its file, and a
part with another hash is refused.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.planning.shards import Shard, encoded, items_of, rows_table
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import part_path
from earmill.pipeline.storage.scratch import own_folder

# Rows of a part. A plan of fewer rows has no parts.
PART_ROWS = 8192
TABLES_KEPT = 4
SHARDS_KEPT = 8

INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("part", pa.int32()),
        ("first", pa.int32()),
        ("rows", pa.int32()),
        ("seconds", pa.float64()),
    ]
)


@dataclass
class PartFolder:
    """The place of a plan's parts: a folder of this process until the plan is stored.

    Args:
        store: Layout with the parts.
        plan_id: Plan id in the names of the parts.
    """

    store: Layout
    plan_id: str


@dataclass(frozen=True)
class Part:
    """One file of rows.

    Args:
        number: Number of the part, from 0.
        sha256: Checksum of the file.
    """

    number: int
    sha256: str

    def read(self, home: PartFolder) -> bytes:
        """Read the file; CommitError if it is missing or has another checksum."""
        path = part_path(home.plan_id, self.number)
        try:
            data = home.store.read_bytes(path)
        except FileNotFoundError as error:
            raise CommitError(f"{path}: missing, a part of the plan; restore it") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CommitError(f"{path}: content changed since the plan was made; restore it")
        return data


@dataclass(frozen=True)
class RowRange:
    """The place of a shard's rows.

    Args:
        part: File with the rows.
        first: Number of the first row in the file.
        rows: Number of rows.
        seconds: Expected seconds of audio.
    """

    part: Part
    first: int
    rows: int
    seconds: float


class StoredShard(Shard):
    """A shard whose rows are in a part. A worker gets it without rows, and reads them.

    Args:
        shard_id: See `Shard`.
        place: Place of its rows.
        home: Place of the parts.
    """

    def __init__(self, shard_id: str, place: RowRange, home: PartFolder) -> None:
        vars(self).update(shard_id=shard_id, place=place, home=home)

    place: RowRange
    home: PartFolder

    @property
    def items(self) -> tuple[Item, ...]:
        """Rows in order; the rows of the last `SHARDS_KEPT` shards are cached."""
        return _cache.items(self)

    @property
    def rows(self) -> int:
        return self.place.rows

    @property
    def seconds(self) -> float:
        return self.place.seconds

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredShard):
            return NotImplemented
        return (self.shard_id, self.place) == (other.shard_id, other.place)

    def __hash__(self) -> int:
        return hash((self.shard_id, self.place))

    def __repr__(self) -> str:
        return f"StoredShard({self.shard_id!r}, {self.place!r})"


class _Cache:
    """The parts and shards that this process has read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()
        self._items: OrderedDict[tuple[str, int], tuple[Item, ...]] = OrderedDict()

    def items(self, shard: StoredShard) -> tuple[Item, ...]:
        key = shard.place.part.sha256, shard.place.first
        with self._lock:
            if key not in self._items:
                table = self._table(shard).slice(shard.place.first, shard.rows)
                self._items[key] = tuple(items_of(table))
            _keep(self._items, key, SHARDS_KEPT)
            return self._items[key]

    def _table(self, shard: StoredShard) -> pa.Table:
        part = shard.place.part
        key = part.sha256
        if key not in self._tables:
            self._tables[key] = table_of(part.read(shard.home))
        _keep(self._tables, key, TABLES_KEPT)
        return self._tables[key]


def _keep(cache: OrderedDict[Any, Any], key: Any, most: int) -> None:
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)


_cache = _Cache()


class PartWriter:
    """Writer of shards: it holds them in memory up to `PART_ROWS` rows, then writes parts.

    Args:
        typed: Columns of the source that are stored in their type.
        metadata: Metadata of each part.
    """

    def __init__(self, typed: Mapping[str, pa.DataType], metadata: Mapping[str, str]) -> None:
        self._typed, self._metadata = typed, metadata
        self._held: list[Shard] = []
        self._held_rows = self._parts = 0
        self._stored: list[StoredShard] = []
        self._home: PartFolder | None = None

    def add(self, shard: Shard) -> None:
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
        data = encoded(rows_table(self._held, self._typed), self._metadata)
        part = Part(self._parts, hashlib.sha256(data).hexdigest())
        self._home.store.write_bytes(part_path(self._home.plan_id, part.number), data)
        first = 0
        for shard in self._held:
            place = RowRange(part, first, shard.rows, shard.seconds)
            self._stored.append(StoredShard(shard.shard_id, place, self._home))
            first += shard.rows
        self._held, self._held_rows, self._parts = [], 0, self._parts + 1


def store_parts(shards: Sequence[StoredShard], store: Layout, plan_id: str) -> None:
    """Copy the parts of a new plan to the output; its shards are read there from now on."""
    home = shards[0].home
    if home.store is store:
        return
    for part in parts_of(shards):
        path = part_path(plan_id, part.number)
        data = part.read(home)
        if not _holds(store, path, data):
            store.write_bytes(path, data)
    home.store, home.plan_id = store, plan_id


def _holds(store: Layout, path: str, data: bytes) -> bool:
    """Return True if an interrupted attempt has stored this part."""
    with suppress(FileNotFoundError):
        return store.exists(path) and store.read_bytes(path) == data
    return False


def parts_of(shards: Sequence[StoredShard]) -> list[Part]:
    """Return the parts of a plan, in order."""
    return list(dict.fromkeys(shard.place.part for shard in shards))


def index_table(shards: Sequence[StoredShard]) -> pa.Table:
    """Return the index of a plan in parts."""
    return pa.table(
        {
            "shard": [shard.shard_id for shard in shards],
            "part": [shard.place.part.number for shard in shards],
            "first": [shard.place.first for shard in shards],
            "rows": [shard.rows for shard in shards],
            "seconds": [shard.seconds for shard in shards],
        },
        schema=INDEX_SCHEMA,
    )


def stored_shards(
    index: pa.Table, sha256s: Sequence[str], store: Layout, plan_id: str
) -> tuple[StoredShard, ...]:
    """Return the shards of an index, without their rows."""
    home = PartFolder(store, plan_id)
    parts = [Part(number, sha256) for number, sha256 in enumerate(sha256s)]
    columns = (index.column(name).to_pylist() for name in ("shard", "rows", "seconds", "first"))
    numbers = index.column("part").to_pylist()
    return tuple(
        StoredShard(shard, RowRange(parts[number], first, rows, seconds), home)
        for (shard, rows, seconds, first), number in zip(
            zip(*columns, strict=True), numbers, strict=True
        )
    )


def part_tables(
    shards: Sequence[StoredShard], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the parts in order, or some of their columns."""
    for part in parts_of(shards):
        yield table_of(part.read(shards[0].home), columns)
