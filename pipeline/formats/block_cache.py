"""Decoded blocks of shards: the interface of a shard's reader, and a cache of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import BoundedSemaphore, Condition
from typing import Protocol, TypeVar

import numpy as np

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError
from earmill.pipeline.common.machine import cores

DecodedBlock = tuple[np.ndarray, ...]
Key = TypeVar("Key", bound=Hashable)
# File of a shard, stream, number of the block in the stream.
BlockKey = tuple[str, str, int]
# Stream, number of the block in the stream.
Block = tuple[str, int]


@dataclass
class IoCounts:
    """Reads of this process since it opened the dataset.

    Args:
        shards_opened: Shard files or stores opened.
        blocks_read: Zarr inner chunks or Parquet row-group columns fetched and decoded.
        bytes_read: Their decoded bytes.
    """

    shards_opened: int = 0
    blocks_read: int = 0
    bytes_read: int = 0


class BlockCache:
    """An LRU cache of decoded blocks, bounded in bytes, with one loader for each block. Safe in
    several threads.

    Blocks that were read ahead are evicted after the used ones: a row will need them soon. A block
    read ahead that no row has used is evicted first when `max_bytes` have been read after it.

    Args:
        max_bytes: Bound on what is kept. The newest block is always kept, even when larger.
        counts: Counters of the blocks that are read.
    """

    def __init__(self, max_bytes: int, counts: IoCounts) -> None:
        self.max_bytes = max_bytes
        self.counts = counts
        self.nbytes = 0
        # The least recently used first.
        self._used: OrderedDict[Hashable, DecodedBlock] = OrderedDict()
        # Read ahead and not used yet, the oldest first, with `counts.bytes_read` at that time.
        self._ahead: OrderedDict[Hashable, tuple[DecodedBlock, int]] = OrderedDict()
        self._changed = Condition()
        # Blocks that are being loaded, and whether they are read ahead.
        self._loading: dict[Hashable, bool] = {}
        # Acquired while blocks are decoded. Answers of a store come in bursts: sixteen threads that
        # decode on two cores would leave a ninth of them to the thread that hands rows out.
        self.decoding = BoundedSemaphore(cores())

    def get(self, key: Hashable) -> DecodedBlock | None:
        """Return a cached block, or None; waits for a block that is being loaded."""
        with self._changed:
            while key in self._loading and not self._has(key):
                self._changed.wait()
            return self._use(key)

    def held(self, keys: Iterable[Hashable]) -> list[DecodedBlock | None]:
        """Return cached blocks, and None for the others; does not wait."""
        with self._changed:
            return [self._use(key) for key in keys]

    def claim(self, keys: Iterable[Key], *, ahead: bool = False) -> list[Key]:
        """Return the blocks that are neither cached nor being loaded; the caller loads them now.

        The caller gives every claimed block back with `release`, or others wait for ever.

        Args:
            keys: The blocks.
            ahead: No row needs them yet.
        """
        with self._changed:
            claimed = [key for key in keys if not (self._has(key) or key in self._loading)]
            self._loading.update(dict.fromkeys(claimed, ahead))
            return claimed

    def release(self, keys: Iterable[Hashable]) -> None:
        """Give claimed blocks back, whether they were put here or not."""
        with self._changed:
            for key in keys:
                self._loading.pop(key, None)
            self._changed.notify_all()

    def loaded(self, key: Hashable, load: Callable[[], DecodedBlock]) -> DecodedBlock:
        """Return a cached block, or load it; other threads that need the block wait for it."""
        (cached,) = self.held([key])
        if cached is not None:
            return cached
        claimed = self.claim([key])
        try:
            return (None if claimed else self.get(key)) or self.put(key, load())
        finally:
            self.release(claimed)

    def put(self, key: Hashable, block: DecodedBlock) -> DecodedBlock:
        """Keep a block that was just read; its arrays become read-only."""
        for array in block:
            array.flags.writeable = False
        with self._changed:
            self.counts.blocks_read += 1
            self.counts.bytes_read += sum(array.nbytes for array in block)
            # Two openings of one shard may read a block twice; it is kept and counted once.
            self.nbytes += _nbytes(block) - _nbytes(self._use(key) or ())
            self._used.pop(key, None)
            if self._loading.get(key):
                self._ahead[key] = block, self.counts.bytes_read
            else:
                self._used[key] = block
            while self.nbytes > self.max_bytes and len(self._used) + len(self._ahead) > 1:
                self._evict(key)
            self._changed.notify_all()
        return block

    def clear(self) -> None:
        """Drop every block."""
        with self._changed:
            self._used.clear()
            self._ahead.clear()
            self.nbytes = 0

    def _has(self, key: Hashable) -> bool:
        return key in self._used or key in self._ahead

    def _use(self, key: Hashable) -> DecodedBlock | None:
        """Return a cached block, which becomes the most recently used, or None."""
        if key in self._ahead:
            self._used[key] = self._ahead.pop(key)[0]
        elif key in self._used:
            self._used.move_to_end(key)
        return self._used.get(key)

    def _evict(self, newest: Hashable) -> None:
        """Drop one block, but not the newest."""
        used, ahead = next(iter(self._used), newest), next(iter(self._ahead), newest)
        if ahead != newest and (used == newest or self._is_passed_over(ahead)):
            block, _ = self._ahead.pop(ahead)
        else:
            block = self._used.pop(used)
        self.nbytes -= _nbytes(block)

    def _is_passed_over(self, key: Hashable) -> bool:
        return self.counts.bytes_read - self._ahead[key][1] > self.max_bytes


def _nbytes(block: DecodedBlock) -> int:
    """Return the bytes that a block keeps in memory: an array may be a part of a larger one."""
    return sum(
        array.base.nbytes if isinstance(array.base, np.ndarray) else array.nbytes for array in block
    )


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


class ReadsAhead(Protocol):
    """A shard whose blocks can be fetched before they are needed, in other threads."""

    rel: str

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """Return the numbers of the blocks that hold these frames."""

    def prepare(self, streams: Iterable[str], pool: Executor) -> None:
        """Fetch what reading these streams needs first, such as the places of blocks.

        Args:
            streams: Streams that are read soon.
            pool: Threads for concurrent requests; they wait for nothing but those requests.
        """

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[Sequence[Block]]:
        """Group blocks for calls of `load`. Fetches what `prepare` would have fetched, if
        `prepare` was not called."""

    def load(self, blocks: Sequence[Block]) -> None:
        """Fetch and decode blocks into the cache."""


# First frame of a piece, counted in its span, and the piece's frames, (n, width).
Piece = tuple[int, np.ndarray]


class GivesPieces(Protocol):
    """A shard that gives views of decoded blocks, for callers that copy or convert the frames."""

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Yield the pieces of a span, read-only, in the stored dtype and in any order."""


class ShardReader(Protocol):
    """One open shard."""

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """Return the frames as a fresh (last - first, width) array in the stored dtype."""

    def close(self) -> None:
        """Close file handles."""


def other_row(rel: str, span: FrameSpan, found: object) -> CommitError:
    """Make the error for a file that has another row at this place than the index."""
    there = "nothing" if found is None else repr(str(found))
    return CommitError(
        f"{rel}: the index has row {span.row_id!r} at {span.row}, the file holds {there} there; "
        f"the index does not belong to this file: {CLOSE_AGAIN}"
    )


def outside(rel: str, what: str, wanted: int, there: int) -> CommitError:
    """Make the error for an index that reaches beyond the end of a file."""
    return CommitError(
        f"{rel}: the index expects {wanted} of {what}, the file holds {there}; "
        "the file is damaged or does not belong to this index: run `earmill verify`"
    )
