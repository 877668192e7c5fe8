"""Decoded blocks of shards: a bounded cache, the interface of a shard's reader, and a row's frames
out of blocks. Frames are joined to fresh arrays, so that no caller edits the cache, or are views
(`copy=False`), which keep their blocks in memory and are copied once, by `FrameView.fill`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import BoundedSemaphore, Condition
from typing import Any, Protocol, TypeVar

import numpy as np

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError
from earmill.pipeline.common.machine import cores
from earmill.pipeline.formats.values import Frames, convert_into

DecodedBlock = tuple[np.ndarray, ...]
Key = TypeVar("Key", bound=Hashable)
BlockKey = tuple[str, str, int]  # File of a shard, stream, number of the block in the stream.
Block = tuple[str, int]  # Stream, number of the block in the stream.
# First frame of a piece, counted in its span, and the piece's frames, (n, width).
Piece = tuple[int, np.ndarray]
# A view of a part of a larger block than this many times the part is copied, not kept.
MAX_BLOCK_RATIO = 8


@dataclass
class IoCounts:
    """Reads of this process since it opened the dataset."""

    shards_opened: int = 0
    blocks_read: int = 0  # Zarr chunks, or columns of Parquet row groups.
    bytes_read: int = 0


class BlockCache:
    """An LRU cache of decoded blocks, bounded in bytes, with one loader for each block. Safe in
    several threads.

    Used blocks are evicted first, because rows will soon need blocks that were read ahead. A block
    that was read ahead goes before them if no row has used it while `max_bytes` were read.

    Args:
        max_bytes: Limit of the cache in bytes; the newest block is kept even if it is larger.
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
        # Acquired while blocks are decoded: sixteen threads that decode on two cores would leave a
        # ninth of them to the thread that hands rows out.
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
        """Return the blocks that are neither cached nor being loaded. The caller loads them now and
        gives them back with `release`, or other threads wait for ever. `ahead`: no row needs them
        yet."""
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
        with self._changed:
            self._used.clear()
            self._ahead.clear()
            self.nbytes = 0

    def _has(self, key: Hashable) -> bool:
        return key in self._used or key in self._ahead

    def _use(self, key: Hashable) -> DecodedBlock | None:
        if key in self._ahead:
            self._used[key] = self._ahead.pop(key)[0]
        elif key in self._used:
            self._used.move_to_end(key)
        return self._used.get(key)

    def _evict(self, newest: Hashable) -> None:
        used, ahead = next(iter(self._used), newest), next(iter(self._ahead), newest)
        if ahead != newest and (
            used == newest or self.counts.bytes_read - self._ahead[ahead][1] > self.max_bytes
        ):
            block, _ = self._ahead.pop(ahead)
        else:
            block = self._used.pop(used)
        self.nbytes -= _nbytes(block)


def _nbytes(block: DecodedBlock) -> int:
    """Return the bytes that a block keeps in memory: an array may be a part of a larger one."""
    wholes = (array.base if isinstance(array.base, np.ndarray) else array for array in block)
    return sum(whole.nbytes for whole in wholes)


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
        """Return the frames as a fresh (last - first, width) array in the stored dtype."""

    def close(self) -> None:
        """Close file handles."""


class BlockReader(ABC):
    """A `ShardReader` of blocks, which threads can fetch into the cache before they are needed. No
    handle is open between reads.

    Args:
        rel: Path of the shard in the dataset.
        columns: Stream name to (width, dtype name) on disk.
    """

    def __init__(self, rel: str, columns: Mapping[str, tuple[int, str]]) -> None:
        self.rel, self.columns = rel, columns

    @abstractmethod
    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Yield the pieces of a span, read-only, in the stored dtype and in any order."""

    @abstractmethod
    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """Return the numbers of the blocks that hold these frames."""

    @abstractmethod
    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[Sequence[Block]]:
        """Group blocks for calls of `load`, after requests for what locates them. The threads of
        the pool wait for nothing but such requests."""

    @abstractmethod
    def load(self, blocks: Sequence[Block]) -> None:
        """Fetch and decode blocks into the cache."""

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        width, dtype = self.columns[stream]
        shape = span.last - span.first, width
        return join_frames(self.pieces(stream, span), shape, np.dtype(dtype))

    def close(self) -> None:
        return


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


def join_frames(
    pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any], scale: float = 1.0
) -> Frames:
    """Join pieces to a fresh array, times their scale; CommitError for another number of frames."""
    into = np.empty((0, shape[1]), dtype)
    found = 0
    for first, piece in pieces:
        if not found:  # After a first piece came: a damaged index may claim any `shape`.
            into = np.empty(shape, dtype)
        convert_into(into[first : first + len(piece)], piece, scale)
        found += len(piece)
    _check_frames(found, shape[0])
    return into


def _check_frames(found: int, wanted: int) -> None:
    if found != wanted:
        raise CommitError(f"expected {wanted} frames, the file gave {found}: run `earmill verify`")


class FrameView:
    """Frames of a row that are not joined yet: read-only parts of blocks; raises as
    `join_frames`."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        scale: float = 1.0,
    ) -> None:
        self._pieces = []
        for first, piece in pieces:
            is_small = _nbytes((piece,)) > MAX_BLOCK_RATIO * piece.nbytes
            self._pieces.append((first, piece.copy() if is_small else piece))
        _check_frames(sum(len(piece) for _, piece in self._pieces), shape[0])
        self.shape, self.dtype, self._scale = shape, dtype, scale

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, into: Frames) -> None:
        """Copy the frames into an array of their shape, in C order."""
        for first, piece in self._pieces:
            convert_into(into[first : first + len(piece)], piece, self._scale)
