"""The plan: every row of a source assigned to a shard, made once, stored, never changed.

Rows keep the source's order and are cut into shards by estimated audio seconds, so that shards cost
about the same time; an over-long row is a shard of its own. The plan id is a hash of the rows,
their shards and the spec, so equal inputs give an equal id, and a changed source another one.
A stored plan is checked against its id when it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from pipeline.errors import CommitError, SourceError
from pipeline.layout import plan_path
from pipeline.sources.base import Item, Source

if TYPE_CHECKING:
    from pipeline.spec import JobSpec

# For rows of which nothing is known before they are read.
UNKNOWN_SECONDS = 10.0
PLAN_ID_CHARS = 16
SHARD_DIGITS = 5
NAMED_DUPLICATES = 3
PLAN_VERSION = b"1"

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


class Store(Protocol):
    """What the plan needs of a layout."""

    def exists(self, rel: str) -> bool: ...

    def read_bytes(self, rel: str) -> bytes: ...

    def write_bytes(self, rel: str, data: bytes) -> None: ...

    def list(self, rel: str) -> list[str]: ...


@dataclass(frozen=True)
class Shard:
    """Rows that are processed and committed together.

    Args:
        shard_id: Five digits or more, in plan order.
        items: Its rows, in order.
    """

    shard_id: str
    items: tuple[Item, ...]

    @property
    def seconds(self) -> float:
        """Estimated audio in the shard."""
        return sum(item_seconds(item) for item in self.items)


@dataclass(frozen=True)
class Plan:
    """All shards of a job.

    Args:
        plan_id: Hash of rows, shards and spec.
        spec_sha256: The spec the plan was made for.
        shards: In order.
    """

    plan_id: str
    spec_sha256: str
    shards: tuple[Shard, ...]

    @cached_property
    def rows(self) -> int:
        return sum(len(shard.items) for shard in self.shards)

    def items(self) -> Iterator[Item]:
        """Every row, in order."""
        return (item for shard in self.shards for item in shard.items)

    def write(self, store: Store) -> str:
        """Store the plan unless it is there already; returns its path."""
        path = plan_path(self.plan_id)
        if not store.exists(path):
            store.write_bytes(path, _encode(self))
        return path

    @classmethod
    def read(cls, store: Store, plan_id: str | None = None) -> Plan:
        """Read a stored plan; the only one if no id is given. CommitError if it was altered."""
        path = plan_path(plan_id) if plan_id is not None else _only_plan(store)
        try:
            plan = _decode(store.read_bytes(path))
        except (OSError, KeyError, ValueError) as error:
            text = " ".join(str(error).split())
            raise CommitError(f"{path}: the plan cannot be read: {text}") from error
        named = path.removeprefix("plan/").removesuffix(".parquet")
        found = _plan_id(plan.shards, plan.spec_sha256)
        if not plan.plan_id == named == found:
            raise CommitError(f"{path}: expected plan {named}, got rows of plan {found}")
        return plan


def make_plan(source: Source, spec: JobSpec) -> Plan:
    """List a source and cut it into shards; SourceError if rows cannot be told apart."""
    items = list(source.items())
    if not items:
        raise SourceError("the source has no rows")
    _check_text(items)
    _check_unique(items)
    groups = cut(items, spec.output.shard_seconds, spec.output.shard_rows)
    shards = tuple(
        Shard(f"{number:0{SHARD_DIGITS}d}", tuple(group)) for number, group in enumerate(groups)
    )
    sha256 = spec.sha256()
    return Plan(_plan_id(shards, sha256), sha256, shards)


def cut(items: Iterable[Item], shard_seconds: float, shard_rows: int) -> Iterator[list[Item]]:
    """Groups of neighbours of at most `shard_seconds` and `shard_rows`, but at least one row."""
    group: list[Item] = []
    total = 0.0
    for item in items:
        seconds = item_seconds(item)
        if group and (total + seconds > shard_seconds or len(group) == shard_rows):
            yield group
            group, total = [], 0.0
        group.append(item)
        total += seconds
    if group:
        yield group


def item_seconds(item: Item) -> float:
    """Estimated seconds of a row, with a fixed guess where nothing is known."""
    return UNKNOWN_SECONDS if item.seconds is None else max(0.0, item.seconds)


def _check_text(items: Iterable[Item]) -> None:
    """File names are bytes to the system; one that is no text cannot be a row id."""
    for item in items:
        try:
            item.row_id.encode(), item.uri.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{item.row_id!a}: the name is not UTF-8; rename the file") from None


def _check_unique(items: Sequence[Item]) -> None:
    counts = Counter(item.row_id for item in items)
    if len(counts) == len(items):
        return
    twice = [row_id for row_id, count in counts.items() if count > 1]
    named = ", ".join(repr(row_id) for row_id in twice[:NAMED_DUPLICATES])
    more = f" and {len(twice) - NAMED_DUPLICATES} more" if len(twice) > NAMED_DUPLICATES else ""
    raise SourceError(f"row ids must be unique, but these occur more than once: {named}{more}")


def _plan_id(shards: Iterable[Shard], spec_sha256: str) -> str:
    digest = hashlib.sha256(spec_sha256.encode())
    for shard in shards:
        for item in shard.items:
            digest.update(_identity(shard.shard_id, item).encode())
            digest.update(b"\n")
    return digest.hexdigest()[:PLAN_ID_CHARS]


def _identity(shard_id: str, item: Item) -> str:
    """What makes a row this row. Estimates are left out; they show in the shards they lead to."""
    # Without a content tag the modification time is the only sign of a changed file.
    changed = item.mtime if item.etag is None else item.etag
    span = (item.start_s, item.end_s)
    where = (item.row_id, item.uri, *span, item.size, changed, item.position)
    return json.dumps((shard_id, *where, _extra_json(item.extra)), separators=(",", ":"))


def _extra_json(extra: Mapping[str, Any]) -> str:
    return json.dumps(dict(extra), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _encode(plan: Plan) -> bytes:
    pairs = [(shard, index) for shard in plan.shards for index in range(len(shard.items))]
    items = list(plan.items())
    columns = {
        "shard": [shard.shard_id for shard, _ in pairs],
        "shard_position": [index for _, index in pairs],
        "extra_json": [_extra_json(item.extra) for item in items],
        "source_position": [item.position for item in items],
    }
    columns |= {
        name: [getattr(item, name) for item in items]
        for name in SCHEMA.names
        if name not in columns
    }
    identity = {"plan_id": plan.plan_id, "spec_sha256": plan.spec_sha256}
    table = pa.table(columns, schema=SCHEMA.with_metadata({**identity, "version": PLAN_VERSION}))
    sink = io.BytesIO()
    pa.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _decode(raw: bytes) -> Plan:
    table = pa.parquet.read_table(io.BytesIO(raw))
    metadata = table.schema.metadata or {}
    if metadata.get(b"version") != PLAN_VERSION:
        raise ValueError(f"expected plan version 1, got {metadata.get(b'version')!r}")
    groups: dict[str, list[Item]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["shard"], []).append(_item(row))
    shards = tuple(Shard(shard_id, tuple(items)) for shard_id, items in groups.items())
    return Plan(metadata[b"plan_id"].decode(), metadata[b"spec_sha256"].decode(), shards)


def _item(row: Mapping[str, Any]) -> Item:
    kept = ("row_id", "uri", "start_s", "end_s", "etag", "size", "mtime", "seconds")
    return Item(
        **{name: row[name] for name in kept},
        extra=json.loads(row["extra_json"]),
        position=row["source_position"],
    )


def _only_plan(store: Store) -> str:
    plans = [name for name in store.list("plan") if name.endswith(".parquet")]
    if len(plans) != 1:
        raise CommitError(f"expected one plan, found {len(plans)}: {', '.join(plans) or 'none'}")
    return plans[0]
