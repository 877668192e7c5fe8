"""A dataset opened for its report: its current rows and the facts of its commit records."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.text import named_line
from earmill.pipeline.dataset.commit_record import newest_generations, read_commit, reading_pool
from earmill.pipeline.dataset.snapshot import Snapshot, read_current, read_snapshot
from earmill.pipeline.dataset.watch import ShardFacts, shard_facts
from earmill.pipeline.reader.combined import JoinedFeatures
from earmill.pipeline.reader.features import Features
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True)
class Stored:
    """A dataset opened for its report, with the shards of the current snapshot. Before the dataset
    is closed, these are all committed shards."""

    uri: str
    storage_options: Mapping[str, Any]
    layout: Layout
    features: Features
    joined: Features | JoinedFeatures  # Rows that are good in all feature sets, additions included.
    snapshot: Snapshot | None
    shards: Mapping[str, tuple[ShardFacts, str]]  # With the path of the table of rows.

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, Any]) -> Stored:
        layout = Layout.open(uri, storage_options)
        features = open_features(uri, storage_options=storage_options)
        joined: Features | JoinedFeatures = features
        current = read_current(layout)
        snapshot = None if current is None else read_snapshot(layout, current)
        if snapshot is None:
            commits = newest_generations(layout)
        else:
            commits = {shard: ref.generation for shard, ref in sorted(snapshot.commits.items())}
            if snapshot.additions:
                joined = open_features(uri, additions=True, storage_options=storage_options)

        def read(shard: str) -> tuple[ShardFacts, str]:
            record = read_commit(layout, shard, commits[shard])
            if record is None:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {shard} is gone although the dataset "
                    "names it; run `earmill verify`"
                )
            try:
                return shard_facts(layout, record), str(record.path("rows"))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {shard} has an unknown form "
                    f"({named_line(error)}); run `earmill verify`"
                ) from error

        with reading_pool(layout, len(commits)) as pool:
            shards = dict(zip(commits, pool.map(read, commits), strict=True))
        return cls(uri, storage_options, layout, features, joined, snapshot, shards)

    def richest(self, position: int) -> tuple[Features | JoinedFeatures, int]:
        """Return the features with most streams for a row of `features`, and its position there."""
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
