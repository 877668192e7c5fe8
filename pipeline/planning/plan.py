"""The plan: every row of a source assigned to a shard, made once, stored, never changed.

Rows keep the source's order and are cut into shards by expected audio seconds, so that shards cost
about the same time; an over-long row is a shard of its own. Rows that are fetched in one piece (row
groups of Parquet) stay together, unless they are several shards' worth. The plan id is a hash of
the rows, their shards and the spec, so equal inputs give an equal id, and a changed source another
one. A stored plan is checked against its id when it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet

from earmill.pipeline.common.arrow_types import (
    Columns,
    arrow_type,
    column,
    extra_types,
    plain_json,
    type_json,
)
from earmill.pipeline.common.errors import CommitError, SourceError
from earmill.pipeline.common.one_line import one_line
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import Item, Source
from earmill.pipeline.storage.arrow_tables import read_table, table_of
from earmill.pipeline.storage.paths import plan_path

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import JobSpec

Row = TypeVar("Row")

# For rows of which nothing is known before they are read.
UNKNOWN_SECONDS = 10.0
PLAN_ID_CHARS = 16
SHARD_DIGITS = 5
# How many shards' worth of rows that are fetched in one piece stay together.
BLOCK_SHARDS = 8
NAMED_DUPLICATES = 3
NAMED_KINDS = 6
CHANNEL_ROW = re.compile(r"(.+)#ch[0-9]+", re.DOTALL)
# Version 2 has columns of the source in their own types beside the JSON of the others.
PLAN_VERSION, TYPED_VERSION = "1", "2"
TYPED_PREFIX = "typed:"
# A column that plans have whose durations are not all known.
ESTIMATED = "estimated"
# Types whose values JSON keeps as they are.
IN_JSON = ("string", "int64", "double", "bool")
# What the plan says of the source beside its rows.
ABOUT = ("skipped", "extra_types", "extra_labels", "dropped")

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
        skipped: Files that the listing left out, by extension; not part of the id.
        extra_types: Carried-through column to its type, see `earmill.pipeline.common.arrow_types`.
        extra_labels: Column of class numbers to the names of the classes.
        dropped: Column that is not carried through to the reason.
    """

    plan_id: str
    spec_sha256: str
    shards: tuple[Shard, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    extra_types: Mapping[str, Any] = field(default_factory=dict)
    extra_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What a user should know before work starts, one line each."""
        kept = [f"{name} ({why})" for name, why in sorted(self.dropped.items())]
        columns = f"columns not carried through: {', '.join(kept)}" if kept else ""
        guessed = sum(item.estimated for item in self.items())
        durations = f"durations of {guessed:,} rows are estimated from their bytes"
        lines = (skipped_text(self.skipped), columns, durations if guessed else "")
        return [line for line in lines if line]

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
        except CommitError as error:
            raise CommitError(f"{path}: {error}") from error
        except (OSError, KeyError, ValueError) as error:
            raise CommitError(
                f"{path}: the plan cannot be read: {one_line(error)}; restore it from a copy, or "
                "take another output.uri"
            ) from error
        named = path.removeprefix("plan/").removesuffix(".parquet")
        found = _plan_id(plan.shards, plan.spec_sha256)
        if not plan.plan_id == named == found:
            raise CommitError(f"{path}: expected plan {named}, got rows of plan {found}")
        return plan


def read_row_ids(store: Store, plan_id: str) -> dict[str, list[str]]:
    """Row ids of a stored plan by shard, both in order: two columns, for who needs no more.

    Raises:
        CommitError: A plan of another version.
    """
    table = read_table(store, plan_path(plan_id), ["shard", "row_id"])
    _check_version(table)
    return dict(sorted(_by_shard(table, table.column("row_id").to_pylist()).items()))


def make_plan(source: Source, spec: JobSpec) -> Plan:
    """List a source and cut it into shards; SourceError if rows cannot be told apart."""
    items = list(source.items())
    check_items(items, spec)
    groups = cut(items, spec.output.shard_seconds, spec.output.shard_rows)
    shards = tuple(
        Shard(f"{number:0{SHARD_DIGITS}d}", tuple(group)) for number, group in enumerate(groups)
    )
    sha256 = spec.sha256()
    columns = source.columns()
    return Plan(
        _plan_id(shards, sha256),
        sha256,
        shards,
        skipped=dict(source.skipped()),
        extra_types=known_types(items, columns),
        extra_labels={name: list(names) for name, names in columns.labels.items()},
        dropped=dict(columns.dropped),
    )


def check_items(items: Sequence[Item], spec: JobSpec) -> None:
    """SourceError if these rows cannot be told apart, or there are none."""
    if not items:
        raise SourceError("the source has no rows")
    _check_text(items)
    _check_unique(items)
    if spec.audio.channels == "each":
        _check_channel_ids(items)


def plan_of(shards: Sequence[Shard], spec_sha256: str, **about: Any) -> Plan:
    """A plan of given shards; `about` as the fields of `Plan`."""
    return Plan(_plan_id(shards, spec_sha256), spec_sha256, tuple(shards), **about)


def known_types(items: Iterable[Item], columns: Columns) -> dict[str, Any]:
    """Carried-through column to its type: as the source knows it, else as these rows have it."""
    known = {name: type_json(kind) for name, kind in columns.types.items()}
    inferred = extra_types(
        {name: value for name, value in item.extra.items() if name not in known} for item in items
    )
    return dict(sorted({**inferred, **known}.items()))


def same_columns(one: Item, other: Item) -> bool:
    """Whether two rows carry the same columns of the source through."""
    return _extra_json(one.extra) == _extra_json(other.extra)


def skipped_text(skipped: Mapping[str, int]) -> str:
    """`12 files skipped: .txt 10, .jpg 2`; empty where none was."""
    total = sum(skipped.values())
    if total == 0:
        return ""
    # The most frequent first, also where a stored plan has them by name.
    ordered = sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0]))
    kinds = [f"{kind} {count:,}" for kind, count in ordered]
    more = f", {len(kinds) - NAMED_KINDS} more kinds" if len(kinds) > NAMED_KINDS else ""
    files = "file" if total == 1 else "files"
    return f"{total:,} {files} skipped: {', '.join(kinds[:NAMED_KINDS])}{more}"


def cut(items: Iterable[Item], shard_seconds: float, shard_rows: int) -> Iterator[list[Item]]:
    """Groups of neighbours of at most `shard_seconds` and `shard_rows`, but at least one row.

    Rows of one block share a group, also where it gets up to `BLOCK_SHARDS` times as long by that.
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
    """Rows by blocks; one by one where they are of none, or theirs is too large."""
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


def _check_channel_ids(items: Sequence[Item]) -> None:
    """Policy `each` names the channels of a row; none of them may be another row of the plan."""
    row_ids = {item.row_id for item in items}
    for row_id in row_ids:
        found = CHANNEL_ROW.fullmatch(row_id)
        if found is not None and found[1] in row_ids:
            raise SourceError(
                f"audio.channels: each calls a channel of row {found[1]!r} {row_id!r}, which is "
                "another row of the source; rename one of them"
            )


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
    return json.dumps(
        dict(extra), sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=plain_json
    )


def _encode(plan: Plan) -> bytes:
    pairs = [(shard, index) for shard in plan.shards for index in range(len(shard.items))]
    items = list(plan.items())
    typed = _typed(plan.extra_types)
    columns = {
        "shard": [shard.shard_id for shard, _ in pairs],
        "shard_position": [index for _, index in pairs],
        "extra_json": [_extra_json(_without(item.extra, typed)) for item in items],
        "source_position": [item.position for item in items],
    }
    columns |= {
        name: [getattr(item, name) for item in items]
        for name in SCHEMA.names
        if name not in columns
    }
    about = {name: getattr(plan, name) for name in ABOUT}
    metadata = {
        "plan_id": plan.plan_id,
        "spec_sha256": plan.spec_sha256,
        "about": json.dumps(about, sort_keys=True),
        "version": TYPED_VERSION if typed else PLAN_VERSION,
    }
    table = pa.table(columns, schema=SCHEMA)
    if any(item.estimated for item in items):
        marks = pa.array([item.estimated for item in items], pa.bool_())
        table = table.append_column(ESTIMATED, marks)
    for name, kind in typed.items():
        cells = column(name, [item.extra.get(name) for item in items], kind)
        table = table.append_column(TYPED_PREFIX + name, cells)
    sink = io.BytesIO()
    pa.parquet.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return sink.getvalue()


def _typed(types: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Columns whose values JSON would change: they are stored in their Arrow type."""
    return {name: arrow_type(kind) for name, kind in types.items() if kind not in IN_JSON}


def _without(extra: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in names}


def _decode(raw: bytes) -> Plan:
    table = table_of(raw)
    metadata = _check_version(table)
    groups = _by_shard(table, [_item(row) for row in table.to_pylist()])
    shards = tuple(Shard(shard_id, tuple(items)) for shard_id, items in groups.items())
    about = loads_json(metadata.get(b"about", b"{}"), max_chars=None)
    if "extra_types" not in about:  # written before plans had it
        about["extra_types"] = extra_types(
            item.extra for items in groups.values() for item in items
        )
    kept = {name: about[name] for name in ABOUT if name in about}
    return Plan(metadata[b"plan_id"].decode(), metadata[b"spec_sha256"].decode(), shards, **kept)


def _check_version(table: pa.Table) -> dict[bytes, bytes]:
    """What the table says of itself, if this release can read it."""
    metadata: dict[bytes, bytes] = table.schema.metadata or {}
    version = metadata.get(b"version", b"").decode()
    if version not in (PLAN_VERSION, TYPED_VERSION):
        raise CommitError(
            f"expected a plan of version 1 or 2, got {version!r}; use the release that wrote it"
        )
    return metadata


def _by_shard(table: pa.Table, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What belongs to each row of the table, grouped; shards and rows in their order."""
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
    return Item(
        **{name: row[name] for name in kept},
        extra=loads_json(row["extra_json"], max_chars=None) | typed,
        position=row["source_position"],
        estimated=bool(row.get(ESTIMATED)),
    )


def _only_plan(store: Store) -> str:
    plans = [name for name in store.list("plan") if name.endswith(".parquet")]
    if len(plans) != 1:
        raise CommitError(f"expected one plan, found {len(plans)}: {', '.join(plans) or 'none'}")
    return plans[0]
