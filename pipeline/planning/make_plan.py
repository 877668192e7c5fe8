"""Make a plan from a source's listing: check row ids, find column types, cut shards."""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from earmill.pipeline.common.arrow_types import Columns, SeenTypes, extra_types, type_json
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.text import few, nearest
from earmill.pipeline.formats.row_table import REFERENCE_FACTS, VARIANT_FACTS
from earmill.pipeline.planning.equal_rows import Equal, computes_equal_once, copying, equal_rows
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard, ShardWriter, StoredShard, cut, typed_columns
from earmill.pipeline.sources.base import Item, Source, as_text
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import reference_column
from earmill.pipeline.spec.spans import SPAN_ID

SHARD_DIGITS = 5
PROGRESS_S = 5.0  # Seconds between two reports of a listing's progress.
NAMED_DUPLICATES = 3
# Id of a channel's row, where policy `each` makes rows of channels.
CHANNEL_ROW = re.compile(r"(.+)#ch[0-9]+", re.DOTALL)


def make_plan(
    source: Source,
    spec: JobSpec,
    progress: Callable[[int], None] = lambda rows: None,
) -> Plan:
    """List a source and cut it into shards. Every `PROGRESS_S` seconds `progress` is called with
    the number of rows so far."""
    listing = _Listing(source, spec, progress)
    listing.add_all(source.items(), {})
    plan = listing.plan()
    if not computes_equal_once(spec):
        return plan
    equal = equal_rows(source, plan.items)
    return _with_copies(source, spec, plan, equal) if equal else plan


def _with_copies(source: Source, spec: JobSpec, plan: Plan, equal: Equal) -> Plan:
    """Plan the rows again. Rows that are equal to other rows are in shards at the end."""
    listing = _Listing(source, spec, lambda rows: None)
    places = dict.fromkeys((row_id for row_id, _ in equal.values()), "")
    others = (item for item in plan.items() if item.row_id not in equal)
    listing.add_all(others, places)
    before = listing.shards
    listing.add_all(copying(plan.items(), equal, places), {})
    return replace(listing.plan(), copied=listing.shards - before)


class _Listing:
    """A plan while it is made: shards go to parts, and only small facts about rows are kept."""

    def __init__(self, source: Source, spec: JobSpec, progress: Callable[[int], None]) -> None:
        self._source, self._spec, self._progress = source, spec, progress
        self.shards = 0
        self._types = SeenTypes()
        self._rows = self._split = 0
        self._block: int | None = None
        self._writer: ShardWriter | None = None
        self._tells_at = time.monotonic() + PROGRESS_S
        # Hashes of row ids, eight bytes each, and of the ids of rows that have channels as rows.
        self._seen, self._parents = array("q"), array("q")

    def _look(self, items: Iterable[Item]) -> Iterator[Item]:
        each = self._spec.audio.channels == "each"
        for item in items:
            for name in names_of(item):
                self._seen.append(hash(name))
                if each and (found := CHANNEL_ROW.fullmatch(name)) is not None:
                    self._parents.append(hash(found[1]))
            self._rows += 1
            if time.monotonic() >= self._tells_at:
                self._tells_at = time.monotonic() + PROGRESS_S
                self._progress(self._rows)
            yield item

    def add_all(self, items: Iterable[Item], places: dict[str, str]) -> None:
        """Add rows in shards. For rows that are keys of `places`, note the shard there."""
        output = self._spec.output
        for group in cut(self._look(items), output.shard_seconds, output.shard_rows):
            shard = Shard(f"{self.shards:0{SHARD_DIGITS}d}", tuple(group))
            self.shards += 1
            columns = self._source.columns()
            if self._writer is None:
                typed = typed_columns(types_json(columns))
                self._writer = ShardWriter(self._spec.sha256(), typed)
            self._writer.add(shard)
            block = shard.items[0].block
            self._split += block is not None and block == self._block
            self._block = shard.items[-1].block
            for item in shard.items:
                self._types.add(unknown(item, columns))
            places.update((i.row_id, shard.shard_id) for i in group if i.row_id in places)

    def plan(self) -> Plan:
        if self._writer is None:
            raise SourceError("the source has no rows")
        columns = self._source.columns()
        shards = self._writer.end()
        typed = typed_columns(types_json(columns))
        if isinstance(shards[0], StoredShard) and typed != self._writer.typed:
            raise SourceError(
                "expected column types from the source before its first row, got other types later"
            )
        types = with_known(self._types.found(), columns)
        check_listeners(self._spec, types)
        plan = Plan(
            str(self._writer.plan_id),
            self._spec.sha256(),
            tuple(shards),
            skipped=dict(self._source.skipped()),
            extra_types=types,
            extra_labels={name: list(names) for name, names in columns.labels.items()},
            dropped=dict(columns.dropped),
            estimated=self._writer.estimated,
            split=self._split,
            in_order=getattr(self._source, "in_order", 0),
            missing=getattr(self._source, "missing", 0),
            first_missing=as_text(getattr(self._source, "first_missing", "")),
        )
        # Two ids may be equal if they have one hash, or a channel's row may be another row.
        seen = np.sort(np.frombuffer(self._seen, np.int64))
        parents = np.frombuffer(self._parents, np.int64)
        if (seen[1:] == seen[:-1]).any() or np.isin(parents, seen).any():
            check_items(list(plan.items()), self._spec)
        return plan


def names_of(item: Item) -> Iterator[str]:
    """Yield the names that a row takes: its id and, for a first span, its recording's id.
    SourceError if the row's name is not text, as file names are bytes."""
    try:
        item.row_id.encode(), item.uri.encode()
    except UnicodeEncodeError:
        raise SourceError(f"{item.row_id!a}: the name is not UTF-8; rename the file") from None
    yield item.row_id
    if item.part_of is not None:
        found = SPAN_ID.fullmatch(item.row_id)
        if found is not None and found[2] == "1":
            yield found[1]


def check_items(items: Sequence[Item], spec: JobSpec) -> None:
    if not items:
        raise SourceError("the source has no rows")
    counts = Counter(name for item in items for name in names_of(item))
    twice = [row_id for row_id, count in counts.items() if count > 1]
    if twice:
        named = few([*map(repr, twice)], NAMED_DUPLICATES, ", ")
        raise SourceError(f"row ids must be unique, but these occur more than once: {named}")
    for row_id in counts if spec.audio.channels == "each" else ():
        found = CHANNEL_ROW.fullmatch(row_id)
        if found is not None and found[1] in counts:
            raise SourceError(
                f"audio.channels: each gives a channel of row {found[1]!r} the id {row_id!r}, "
                "which another row of the source has; rename one of them"
            )


def facts_of_job(spec: JobSpec) -> list[str]:
    """Return the provenance columns of rows that not every job has."""
    variants = VARIANT_FACTS if spec.audio.variants is not None else ()
    return [*variants, *(REFERENCE_FACTS if reference_column(spec.source) is not None else ())]


def check_listeners(spec: JobSpec, columns: Collection[str]) -> None:
    """Raise SourceError if the source has no column that the job names for audiograms."""
    for column in spec.listener_columns:
        if column not in columns:
            raise SourceError(
                f"listener.column: no row of the source has a column {column!r}"
                f"{nearest(column, [*columns])} (found: {', '.join(columns) or 'none'})"
            )


def known_types(items: Iterable[Item], columns: Columns) -> dict[str, Any]:
    return with_known(extra_types(unknown(item, columns) for item in items), columns)


def unknown(item: Item, columns: Columns) -> dict[str, Any]:
    return {name: value for name, value in item.extra.items() if name not in columns.types}


def with_known(found: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    return dict(sorted({**found, **types_json(columns)}.items()))


def types_json(columns: Columns) -> dict[str, Any]:
    return {name: type_json(kind) for name, kind in columns.types.items()}
