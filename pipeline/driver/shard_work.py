"""A shard and what happened to it in this run, and the pieces of work that are made of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from earmill.pipeline.driver.culprit_search import Bisection
from earmill.pipeline.planning.shards import item_seconds
from earmill.pipeline.worker.messages import ShardOrder

if TYPE_CHECKING:
    from earmill.pipeline.planning.shards import Shard
    from earmill.pipeline.sources.base import Item


@dataclass(eq=False, slots=True)
class ShardWork:
    """One shard and its history in this run.

    Attributes:
        attempts: Failed attempts since the last search that were surely this shard's doing;
            `failures` counts every attempt that failed.
        copies: Calls in flight for it; two while a slow shard is tried a second time.
        worker: The slot where an attempt ended last.
        outages: How often it met one; the last time at `waits_since`.
        memory_share: Part of the usual memory that its next attempt may take.
    """

    shard: Shard
    attempts: int = 0
    failures: int = 0
    fruitless: int = 0
    copies: int = 0
    worker: int | None = None
    outages: int = 0
    waits_since: float = 0.0
    memory_share: float = 1.0
    culprits: dict[str, str] = field(default_factory=dict)
    search: Bisection | None = None

    @property
    def shard_id(self) -> str:
        return self.shard.shard_id

    @property
    def seconds(self) -> float:
        """Planned audio."""
        return self.shard.seconds

    def order(self, witnesses: Sequence[Item] = ()) -> ShardOrder:
        """The next attempt on the whole shard, under a fresh name."""
        return ShardOrder(
            shard=self.shard,
            attempt=secrets.token_hex(4),
            attempts=self.failures + 1,
            culprits=dict(self.culprits),
            witnesses=tuple(witnesses),
            memory_share=self.memory_share,
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work for one worker: a whole shard, or some of its rows as a probe.

    Args:
        probe: The rows to run without publishing; None for the whole shard.
        alone: No other shard may be on the worker meanwhile.
    """

    work: ShardWork
    probe: tuple[Item, ...] | None = None
    alone: bool = False

    @property
    def seconds(self) -> float:
        """Planned audio of the rows in question."""
        if self.probe is None:
            return self.work.seconds
        return sum(item_seconds(item) for item in self.probe)

    @property
    def rows(self) -> int:
        """Rows in question."""
        return self.work.shard.rows if self.probe is None else len(self.probe)
