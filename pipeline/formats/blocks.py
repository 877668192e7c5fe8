"""Decoded blocks of shards, in a cache of bounded size, and what a reader of a shard promises."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError

DecodedBlock = tuple[np.ndarray, ...]


@dataclass
class IoCounts:
    """What this process has read since the dataset was opened here.

    Args:
        shards_opened: Shard files or stores opened.
        blocks_read: Zarr inner chunks or Parquet row-group columns fetched and decoded.
        bytes_read: Their decoded bytes.
    """

    shards_opened: int = 0
    blocks_read: int = 0
    bytes_read: int = 0


class BlockCache:
    """Decoded blocks, least recently used thrown away first. Safe in several threads.

    Args:
        max_bytes: Bound on what is kept. The newest block is always kept, even when larger.
        counts: Where reads are counted.
    """

    def __init__(self, max_bytes: int, counts: IoCounts) -> None:
        self.max_bytes = max_bytes
        self.counts = counts
        self.nbytes = 0
        self._blocks: OrderedDict[Hashable, DecodedBlock] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> DecodedBlock | None:
        """A kept block, now the most recently used, or None."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: Hashable, block: DecodedBlock) -> DecodedBlock:
        """Keep a block that was just read; its arrays become read-only."""
        for array in block:
            array.flags.writeable = False
        size = _nbytes(block)
        with self._lock:
            self.counts.blocks_read += 1
            self.counts.bytes_read += size
            # Read twice, as by two openings of one shard, it is kept and weighed once.
            self.nbytes += size - _nbytes(self._blocks.pop(key, ()))
            self._blocks[key] = block
            while self.nbytes > self.max_bytes and len(self._blocks) > 1:
                self.nbytes -= _nbytes(self._blocks.popitem(last=False)[1])
        return block

    def clear(self) -> None:
        """Drop every block."""
        with self._lock:
            self._blocks.clear()
            self.nbytes = 0


def _nbytes(block: DecodedBlock) -> int:
    return sum(array.nbytes for array in block)


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """Frames [first, last) of one stream of one row of a shard.

    Args:
        row_id: Name of the row.
        row: Position of the row in its shard.
        start: Where the row's frames start in the shard's stream.
        first: First frame wanted, counted inside the row.
        last: One past the last.
    """

    row_id: str
    row: int
    start: int
    first: int
    last: int


class ShardReader(Protocol):
    """One open shard."""

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """A fresh (last - first, width) array in the stored dtype."""

    def close(self) -> None:
        """Let go of file handles."""


def other_row(rel: str, span: FrameSpan, found: object) -> CommitError:
    """The file at `rel` has another row where the index has this one."""
    there = "nothing" if found is None else repr(str(found))
    return CommitError(
        f"{rel}: the index has row {span.row_id!r} at {span.row}, the file holds {there} there; "
        f"the index does not belong to this file: {CLOSE_AGAIN}"
    )


def outside(rel: str, what: str, wanted: int, there: int) -> CommitError:
    """The index reaches beyond what the file at `rel` holds."""
    return CommitError(
        f"{rel}: the index expects {wanted} of {what}, the file holds {there}; "
        "the file is damaged or does not belong to this index: run `earmill verify`"
    )
