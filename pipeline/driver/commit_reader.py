"""Commit records as the driver asks for them, one by one, read side by side where that pays.

A store takes tens of milliseconds to answer: read one after the other, records would bound a job of
many workers to some tens of shards a second. Those of shards that ended together are asked for
together; the more end meanwhile, the more there are the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from earmill.pipeline.dataset.commit_record import READ_THREADS
from earmill.pipeline.driver.shard_tracker import Committed


class CommitReader:
    """What `Ledger` asks whether a shard is done.

    Args:
        read: Reads the record of a shard; None where there is none.
        side_by_side: Whether several reads at a time are faster than one.
    """

    def __init__(self, read: Callable[[str], Committed | None], *, side_by_side: bool) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(READ_THREADS, "commits") if side_by_side else None
        self._begun: dict[str, Future[Committed | None]] = {}

    def look_ahead(self, shards: Sequence[str]) -> None:
        """Begin to read the records of these; those begun before are out of date."""
        self._begun = {}
        if self._threads is not None and len(shards) > 1:
            self._begun = {shard: self._threads.submit(self._read, shard) for shard in {*shards}}

    def __call__(self, shard_id: str) -> Committed | None:
        """The record of a shard as it is now, or was when its attempt had ended."""
        begun = self._begun.pop(shard_id, None)
        return self._read(shard_id) if begun is None else begun.result()
