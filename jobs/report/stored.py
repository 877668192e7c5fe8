"""A dataset opened for its report: its current rows and the facts of its commit records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.dataset.commit_record import (
    READ_THREADS,
    CommitRecord,
    commits_as,
    read_commit,
)
from earmill.pipeline.dataset.snapshot import LogEntry, read_current, read_snapshot
from earmill.pipeline.dataset.watch import ShardFacts, shard_facts
from earmill.pipeline.storage.layout import Layout

if TYPE_CHECKING:
    from earmill.pipeline.reader.combined import JoinedFeatures
    from earmill.pipeline.reader.features import Features

T = TypeVar("T")


@dataclass(frozen=True)
class StoredShard:
    """One committed shard.

    Args:
        facts: Facts of its commit record; None if the record lacks some.
        rows: Path of the table of rows.
        quarantine: Path of the table of quarantined rows; None if there are none.
    """

    facts: ShardFacts | None
    rows_ok: int
    rows_bad: int
    rows: str
    quarantine: str | None


@dataclass(frozen=True)
class Stored:
    """A dataset opened for its report.

    Args:
        features: Current rows.
        entry: Log entry of the current snapshot; None before the dataset is closed.
        shards: Shards of the snapshot in order; before the dataset is closed, committed shards.
        additions: Names of added feature sets.
        joined: Rows that are good in all sets, with all streams; None without additions.
    """

    uri: str
    storage_options: Mapping[str, Any]
    layout: Layout
    features: Features
    entry: LogEntry | None
    shards: Mapping[str, StoredShard]
    additions: Sequence[str]
    joined: JoinedFeatures | None = None

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, Any]) -> Stored:
        """Read index and commit records.

        Raises:
            SourceError: No dataset there, or nothing committed yet.
            CommitError: A file of the dataset is damaged.
        """
        from earmill.pipeline.reader.open import open_features

        layout = Layout.open(uri, storage_options)
        features = open_features(uri, storage_options=storage_options)
        current = read_current(layout)
        snapshot = None if current is None else read_snapshot(layout, current)
        if snapshot is None:
            shards = commits_as(layout, lambda record: _shard(layout, record))
        else:
            refs = {shard: ref.generation for shard, ref in sorted(snapshot.commits.items())}
            shards = _named(layout, refs)
        additions = () if snapshot is None else tuple(sorted(snapshot.additions))
        return cls(
            uri=uri,
            storage_options=storage_options,
            layout=layout,
            features=features,
            entry=None if snapshot is None else snapshot.entry,
            shards=shards,
            additions=additions,
            joined=open_features(uri, additions=True, storage_options=storage_options)
            if additions
            else None,
        )

    def richest(self, position: int) -> tuple[Features | JoinedFeatures, int]:
        """Return the features with most streams for a row of `features`, and its position there."""
        if self.joined is not None:
            row_id = self.features.table.column("row_id")[position].as_py()
            with suppress(KeyError):
                return self.joined, self.joined.index_of(row_id)
        return self.features, position

    @property
    def facts(self) -> list[ShardFacts]:
        """Facts of the shards whose records hold them."""
        return [shard.facts for shard in self.shards.values() if shard.facts is not None]

    @property
    def rows_bad(self) -> int:
        """Number of quarantined rows."""
        return sum(shard.rows_bad for shard in self.shards.values())


def _named(layout: Layout, refs: Mapping[str, int]) -> dict[str, StoredShard]:
    """Read shards by the generation of their record."""

    def read(ref: tuple[str, int]) -> StoredShard:
        record = read_commit(layout, *ref)
        if record is None:
            raise CommitError(
                f"{layout.url()}: the commit of shard {ref[0]} is gone although the index names "
                "it; run `earmill verify`"
            )
        return _shard(layout, record)

    with Threads(READ_THREADS) as pool:
        return dict(zip(refs, pool.map(read, refs.items()), strict=True))


def _shard(layout: Layout, record: CommitRecord) -> StoredShard:
    facts: ShardFacts | None
    try:
        facts = shard_facts(layout, record)
    except (KeyError, TypeError, ValueError, AttributeError):
        facts = None
    rows = record.path("rows")
    assert rows is not None
    return StoredShard(facts, record.rows_ok, record.rows_bad, rows, record.path("quarantine"))


def spread_over(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[int(k)] for k in np.linspace(0, len(items) - 1, most).round()]
