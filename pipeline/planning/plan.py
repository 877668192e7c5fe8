"""The plan: every row assigned to a shard, made once, stored, never changed.

Rows keep the source's order and are cut into shards by expected audio seconds, so that shards cost
about the same time; an over-long row is a shard of its own. Rows that are fetched in one piece (row
groups of Parquet) stay together, unless they are several shards' worth. The plan id is a hash of
the rows, their shards and the spec, so equal inputs give an equal id, and a changed source another
one. A plan of few rows is one table, held in memory and checked against its id when it is read; one
of many is in parts (`planning.parts`), each checked against its own hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from earmill.pipeline.common.arrow_types import SeenTypes
from earmill.pipeline.common.errors import CommitError, SourceError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.planning.column_types import typed_of, unknown, with_known
from earmill.pipeline.planning.equal_rows import Equal, computes_equal_once, copying, equal_rows
from earmill.pipeline.planning.notes import copied_text, missing_text, notes, skipped_text
from earmill.pipeline.planning.parts import (
    PartWriter,
    Store,
    StoredShard,
    store_parts,
)
from earmill.pipeline.planning.plan_file import (
    PARTED_VERSION,
    decode_plan,
    encode_plan,
    only_plan,
)
from earmill.pipeline.planning.plan_rows import (
    PlanId,
    extra_json,
    typed_columns,
)
from earmill.pipeline.planning.row_checks import (
    RowIds,
    check_channel_ids,
    check_text,
    check_unique,
    names_of,
)
from earmill.pipeline.planning.shards import (
    UNKNOWN_SECONDS,
    Shard,
    cut,
    item_seconds,
)
from earmill.pipeline.sources.base import Item, Source, as_text
from earmill.pipeline.sources.kept import Kept
from earmill.pipeline.storage.paths import plan_path

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import JobSpec

__all__ = [
    "SHARD_DIGITS",
    "UNKNOWN_SECONDS",
    "Plan",
    "Shard",
    "StoredShard",
    "check_items",
    "cut",
    "item_seconds",
    "make_plan",
    "plan_of",
    "same_columns",
    "skipped_text",
]

SHARD_DIGITS = 5
# How often a listing says how far it is.
PROGRESS_S = 5.0


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
        estimated: Rows whose duration is estimated from their bytes.
        split: Shards that begin within a piece which each of its shards fetches whole.
        in_order: Long recordings that stay whole in a job with spans.
        copied: Shards at the end whose rows are copies of rows before: equal files.
        missing: Rows of a table whose local file was not there when it was listed.
        first_missing: The first of these files.
    """

    plan_id: str
    spec_sha256: str
    shards: tuple[Shard, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    extra_types: Mapping[str, Any] = field(default_factory=dict)
    extra_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    estimated: int = 0
    split: int = 0
    in_order: int = 0
    copied: int = 0
    missing: int = 0
    first_missing: str = ""

    @property
    def computed(self) -> tuple[Shard, ...]:
        """The shards whose rows are not copies."""
        return self.shards[: len(self.shards) - self.copied]

    @property
    def copies(self) -> tuple[Shard, ...]:
        """The shards whose rows are copies."""
        return self.shards[len(self.shards) - self.copied :]

    @property
    def notes(self) -> list[str]:
        """What a user should know before work starts, one line each."""
        return [
            *notes(self.skipped, self.dropped, self.estimated, self.split, self.in_order),
            *copied_text(sum(shard.rows for shard in self.copies)),
            *missing_text(self.missing, self.rows, self.first_missing),
        ]

    @cached_property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def items(self) -> Iterator[Item]:
        """Every row, in order."""
        return (item for shard in self.shards for item in shard.items)

    @property
    def parts(self) -> tuple[StoredShard, ...]:
        """The shards of a plan in parts; empty where the plan has its rows."""
        parted = bool(self.shards) and isinstance(self.shards[0], StoredShard)
        return cast(tuple[StoredShard, ...], self.shards) if parted else ()

    def write(self, store: Store) -> str:
        """Store the plan unless it is there already; returns its path."""
        path = plan_path(self.plan_id)
        if self.parts:
            store_parts(self.parts, store, self.plan_id)
        if not store.exists(path):
            store.write_bytes(path, encode_plan(vars(self), self.parts))
        return path

    @classmethod
    def read(cls, store: Store, plan_id: str | None = None) -> Plan:
        """Read a stored plan; the only one if no id is given. CommitError if it was altered."""
        path = plan_path(plan_id) if plan_id is not None else only_plan(store)
        named = path.removeprefix("plan/").removesuffix(".parquet")
        try:
            plan = cls(**decode_plan(store.read_bytes(path), store, named))
        except CommitError as error:
            raise CommitError(f"{path}: {error}") from error
        except (OSError, KeyError, ValueError) as error:
            raise CommitError(
                f"{path}: the plan cannot be read: {one_line(error)}; restore it from a copy, or "
                "take another output.uri"
            ) from error
        found = plan.plan_id if plan.parts else PlanId.of(plan.shards, plan.spec_sha256)
        if not plan.plan_id == named == found:
            raise CommitError(f"{path}: expected plan {named}, got rows of plan {found}")
        return plan


def make_plan(
    source: Source,
    spec: JobSpec,
    progress: Callable[[int], None] = lambda rows: None,
    kept: Kept | None = None,
) -> Plan:
    """List a source and cut it into shards; SourceError if rows cannot be told apart.

    Args:
        progress: Called now and then with the rows that were listed so far.
        kept: Where sources whose listing takes long find what one that was cut off has found out.
    """
    keep = getattr(source, "keep", None)
    if keep is not None and kept is not None:
        keep(kept)
    listing = _Listing(source, spec, progress)
    listing.add_all(listing.items())
    plan = listing.plan()
    if not computes_equal_once(spec):
        return plan
    equal = equal_rows(source, plan.items)
    return _with_copies(source, spec, plan, equal) if equal else plan


def _with_copies(source: Source, spec: JobSpec, plan: Plan, equal: Equal) -> Plan:
    """The same rows, those that are equal to others in shards of their own, at the end."""
    listing = _Listing(source, spec, lambda rows: None)
    places = dict.fromkeys((row_id for row_id, _ in equal.values()), "")
    others = (item for item in plan.items() if item.row_id not in equal)
    listing.add_all(listing.look(others), places)
    before = listing.shards
    listing.add_all(listing.look(copying(plan.items(), equal, places)))
    return replace(listing.plan(), copied=listing.shards - before)


def check_items(items: Sequence[Item], spec: JobSpec) -> None:
    """SourceError if these rows cannot be told apart, or there are none."""
    if not items:
        raise SourceError("the source has no rows")
    check_unique(list(check_text(items)))
    if spec.audio.channels == "each":
        check_channel_ids(items)


def plan_of(shards: Sequence[Shard], spec_sha256: str, **about: Any) -> Plan:
    """A plan of given shards, some of which may be stored; `about` as the fields of `Plan`."""
    plan_id, estimated = PlanId(spec_sha256), 0
    typed = typed_columns(about.get("extra_types", {}))
    writer = PartWriter(typed, {"version": PARTED_VERSION})
    for shard in shards:
        here = Shard(shard.shard_id, shard.items)
        plan_id.add(here)
        estimated += sum(item.estimated for item in here.items)
        writer.add(here)
    packed = tuple(writer.end())
    return Plan(str(plan_id), spec_sha256, packed, **about, estimated=estimated)


def same_columns(one: Item, other: Item) -> bool:
    """Whether two rows carry the same columns of the source through."""
    return extra_json(one.extra) == extra_json(other.extra)


class _Listing:
    """A plan in the making: shards go to their parts, and what is known of all rows is small."""

    def __init__(self, source: Source, spec: JobSpec, progress: Callable[[int], None]) -> None:
        self._source, self._progress = source, progress
        self._output, self.shards = spec.output, 0
        self._each = spec.audio.channels == "each"
        self._sha256 = spec.sha256()
        self._id, self._ids = PlanId(self._sha256), RowIds(channels=self._each)
        self._types = SeenTypes()
        self._rows = self._estimated = self._split = 0
        self._block: int | None = None
        self._typed: dict[str, pa.DataType] = {}
        self._writer: PartWriter | None = None
        self._tells_at = time.monotonic() + PROGRESS_S

    def items(self) -> Iterator[Item]:
        """The rows of the source, as they are looked at."""
        return self.look(check_text(self._source.items()))

    def look(self, items: Iterable[Item]) -> Iterator[Item]:
        """These rows, as they are looked at."""
        for item in items:
            for name in names_of(item):
                self._ids.add(name)
            self._rows += 1
            self._estimated += item.estimated
            if time.monotonic() >= self._tells_at:
                self._tells_at = time.monotonic() + PROGRESS_S
                self._progress(self._rows)
            yield item

    def add_all(self, items: Iterable[Item], places: dict[str, str] | None = None) -> None:
        """Add them in shards; those that `places` has by name get their shard there."""
        places = places or {}
        for group in cut(items, self._output.shard_seconds, self._output.shard_rows):
            shard = Shard(f"{self.shards:0{SHARD_DIGITS}d}", tuple(group))
            self.add(shard)
            self.shards += 1
            places.update((i.row_id, shard.shard_id) for i in group if i.row_id in places)

    def add(self, shard: Shard) -> None:
        columns = self._source.columns()
        if self._writer is None:
            self._typed = typed_of(columns)
            self._writer = PartWriter(self._typed, {"version": PARTED_VERSION})
        block = shard.items[0].block
        self._split += block is not None and block == self._block
        self._block = shard.items[-1].block
        for item in shard.items:
            self._types.add(unknown(item, columns))
        self._id.add(shard)
        self._writer.add(shard)

    def plan(self) -> Plan:
        if self._writer is None:
            raise SourceError("the source has no rows")
        columns = self._source.columns()
        shards = self._writer.end()
        if isinstance(shards[0], StoredShard) and typed_of(columns) != self._typed:
            raise SourceError("the source named the types of its columns after its first rows")
        plan = Plan(
            str(self._id),
            self._sha256,
            tuple(shards),
            skipped=dict(self._source.skipped()),
            extra_types=with_known(self._types, columns),
            extra_labels={name: list(names) for name, names in columns.labels.items()},
            dropped=dict(columns.dropped),
            estimated=self._estimated,
            split=self._split,
            in_order=getattr(self._source, "in_order", 0),
            missing=getattr(self._source, "missing", 0),
            first_missing=as_text(getattr(self._source, "first_missing", "")),
        )
        if self._ids.may_clash:
            items = list(plan.items())
            check_unique(items)
            if self._each:
                check_channel_ids(items)
        return plan
