"""A dataset opened for its report: its current rows and the facts of its commit records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    from earmill.pipeline.reader.features import Features
    from earmill.pipeline.reader.joined import JoinedFeatures


@dataclass(frozen=True)
class StoredShard:
    """One committed shard: its facts, if its record holds them, and the paths of its tables."""

    facts: ShardFacts | None
    rows_ok: int
    rows_bad: int
    rows: str
    quarantine: str | None


@dataclass(frozen=True)
class Stored:
    """A dataset opened for its report.

    Shards and log entry come from the current snapshot. Before the dataset is closed, all
    committed shards are here, and no entry.
    """

    uri: str
    storage_options: Mapping[str, Any]
    layout: Layout
    features: Features
    entry: LogEntry | None
    shards: Mapping[str, StoredShard]
    additions: Sequence[str]
    joined: JoinedFeatures | None  # rows that are good in all feature sets; None without additions

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, Any]) -> Stored:
        """Read index and commit records."""
        from earmill.pipeline.reader.open import open_features

        layout = Layout.open(uri, storage_options)
        features = open_features(uri, storage_options=storage_options)
        current = read_current(layout)
        snapshot = None if current is None else read_snapshot(layout, current)
        if snapshot is None:
            shards = commits_as(layout, lambda record: _shard(layout, record))
            return cls(uri, storage_options, layout, features, None, shards, (), None)
        refs = {shard: ref.generation for shard, ref in sorted(snapshot.commits.items())}
        with Threads(READ_THREADS) as pool:
            read = pool.map(lambda ref: _shard_of(layout, *ref), refs.items())
            shards = dict(zip(refs, read, strict=True))
        joined = None
        if snapshot.additions:
            joined = open_features(uri, additions=True, storage_options=storage_options)
        additions = sorted(snapshot.additions)
        entry = snapshot.entry
        return cls(uri, storage_options, layout, features, entry, shards, additions, joined)

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


def _shard_of(layout: Layout, shard: str, generation: int) -> StoredShard:
    record = read_commit(layout, shard, generation)
    if record is None:
        raise CommitError(
            f"{layout.url()}: the commit of shard {shard} is gone although the index names it; run "
            "`earmill verify`"
        )
    return _shard(layout, record)


def _shard(layout: Layout, record: CommitRecord) -> StoredShard:
    facts: ShardFacts | None = None
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        facts = shard_facts(layout, record)
    rows = record.path("rows")
    assert rows is not None
    return StoredShard(facts, record.rows_ok, record.rows_bad, rows, record.path("quarantine"))
