"""A dataset opened for its report: its current rows and the facts of its commit records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.text import named_line
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    commits_as,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.snapshot import LogEntry, read_current, read_snapshot
from earmill.pipeline.dataset.watch import ShardFacts, shard_facts
from earmill.pipeline.reader.combined import JoinedFeatures
from earmill.pipeline.reader.features import Features
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True)
class Stored:
    """A dataset opened for its report. Shards and log entry come from the current snapshot. Before
    the dataset is closed, all committed shards are here, and no entry."""

    uri: str
    storage_options: Mapping[str, Any]
    layout: Layout
    features: Features
    shards: Mapping[str, tuple[ShardFacts, str]]  # With the path of the table of rows.
    entry: LogEntry | None = None
    additions: Sequence[str] = ()
    joined: JoinedFeatures | None = None  # rows that are good in all feature sets, with additions

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, Any]) -> Stored:
        layout = Layout.open(uri, storage_options)
        features = open_features(uri, storage_options=storage_options)
        current = read_current(layout)
        snapshot = None if current is None else read_snapshot(layout, current)

        def shown(record: CommitRecord) -> tuple[ShardFacts, str]:
            try:
                return shard_facts(layout, record), str(record.path("rows"))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {record.shard} has an unknown form "
                    f"({named_line(error)}); run `earmill verify`"
                ) from error

        if snapshot is None:
            return cls(uri, storage_options, layout, features, commits_as(layout, shown))

        def read(shard: str) -> tuple[ShardFacts, str]:
            record = read_commit(layout, shard, snapshot.commits[shard].generation)
            if record is None:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {shard} is gone although the index names "
                    "it; run `earmill verify`"
                )
            return shown(record)

        names = sorted(snapshot.commits)
        with reading_pool(layout, len(names)) as pool:
            shards = dict(zip(names, pool.map(read, names), strict=True))
        additions, joined = sorted(snapshot.additions), None
        if additions:
            joined = open_features(uri, additions=True, storage_options=storage_options)
        return cls(
            uri, storage_options, layout, features, shards, snapshot.entry, additions, joined
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
        return [facts for facts, _ in self.shards.values()]

    @property
    def rows_bad(self) -> int:
        return sum(facts.rows_bad for facts in self.facts)
