"""Decoded blocks of shards: the interface of a shard's reader, and a cache of bounded size.

`Slabs` is memory for many blocks of one size at a time, in pages of 2 MB where the system has them.
Blocks of a MB are read and written once from end to end; in pages of 4 KB a processor looks up
where they are after every few hundred ns of that, in a virtual machine twice. numpy asks for large
pages (madvise) for what is larger than any block: so that is taken, and cut.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore, Condition, Lock
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError
from earmill.pipeline.common.machine import cores

Bytes = npt.NDArray[np.uint8]

# Cut at once.
SLAB_BYTES = 8 * 2**20
# Smaller blocks are used before they leave the processor's cache.
LEAST_BYTES, MOST_BYTES = 2**17, SLAB_BYTES // 2
# Sizes at a time: a set has one or two a stream, and of each a slab may be cut to half only.
MOST_SIZES = 8
PAGE_BYTES, LINE_BYTES = 2**21, 64


class Slabs:
    """Gives memory out part by part; a slab is gone when all that was cut of it is. Not safe in
    several threads."""

    def __init__(self) -> None:
        self._left: dict[int, list[Bytes]] = {}
        self._cut: WeakValueDictionary[int, Bytes] = WeakValueDictionary()

    def take(self, nbytes: int) -> Bytes:
        """Memory of this size; that of one block where a slab for it does not pay."""
        known = nbytes in self._left or len(self._left) < MOST_SIZES
        if not (known and LEAST_BYTES <= nbytes <= MOST_BYTES):
            return np.empty(nbytes, np.uint8)
        left = self._left.setdefault(nbytes, [])
        if not left:
            left += reversed(self._parts(nbytes))
        return left.pop()

    def owns(self, memory: Bytes) -> bool:
        """Whether this is memory that was taken from here, as a whole: nobody else's."""
        if memory.flags.owndata:
            return True
        whole = memory.base.obj if isinstance(memory.base, memoryview) else None
        return whole is not None and self._cut.get(id(whole)) is whole

    def clear(self) -> None:
        """Let go of what nobody has taken."""
        self._left.clear()

    def _parts(self, nbytes: int) -> list[Bytes]:
        slab = np.empty(SLAB_BYTES + PAGE_BYTES, np.uint8)
        self._cut[id(slab)] = slab
        # Views of a view refer to the array that owns the memory; of a buffer, to the part itself.
        whole = slab.data[-slab.ctypes.data % PAGE_BYTES :]
        pitch = -(-nbytes // LINE_BYTES) * LINE_BYTES
        firsts = range(0, SLAB_BYTES - nbytes + 1, pitch)
        return [np.frombuffer(whole[first : first + nbytes], np.uint8) for first in firsts]


DecodedBlock = tuple[np.ndarray, ...]
Key = TypeVar("Key", bound=Hashable)
# File of a shard, stream, number of the block in it.
BlockKey = tuple[str, str, int]
# Stream, number of the block in it.
Block = tuple[str, int]
# Memory of blocks that were thrown away, kept for the next ones: first touching new memory costs as
# much as decoding into it. No more than the cache may hold; of a full one so much.
SPARE_BYTES = 32 * 2**20
# Memory is that much larger than its block at most.
MOST_OF_MEMORY = 1.25
# Used blocks that stay while blocks come in order.
SCANNED_BYTES = 16 * 2**20
# A cache that holds so many slabs takes memory by them.
LEAST_SLABS = 8


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

    A block that was read ahead stays until it is used, while used ones go: the next to be needed is
    the one that has lain here longest. One that was passed over goes when as much as the cache
    holds has come after it.

    Args:
        max_bytes: Bound on what is kept. The newest block is always kept, even when larger.
        counts: Where reads are counted.
    """

    def __init__(self, max_bytes: int, counts: IoCounts) -> None:
        self.max_bytes = max_bytes
        self.counts = counts
        self.nbytes = 0
        self._blocks: OrderedDict[Hashable, DecodedBlock] = OrderedDict()
        # Read ahead and not used yet, in the order in which they came, with `counts.bytes_read`
        # at that time.
        self._unused: OrderedDict[Hashable, tuple[DecodedBlock, int]] = OrderedDict()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        # Blocks under way, and whether they are read ahead.
        self._under_way: dict[Hashable, bool] = {}
        self._spare: list[np.ndarray] = []
        self._spare_bytes = 0
        self._slabs = Slabs()
        # Of `_blocks`, and how many of them stay in each scan under way.
        self._used_bytes = 0
        self._scans: list[int] = []
        # Held while blocks are decoded. Requests to a store come in bursts: sixteen threads that
        # decode on two cores leave a ninth of them to the one that hands rows out.
        self.decoding = BoundedSemaphore(cores())

    def get(self, key: Hashable) -> DecodedBlock | None:
        """A kept block, now the most recently used, or None; waits for one that is under way."""
        with self._changed:
            while key in self._under_way and not self._keeps(key):
                self._changed.wait()
            return self._used(key)

    def held(self, keys: Iterable[Hashable]) -> list[DecodedBlock | None]:
        """The kept ones of these blocks, now the most recently used, and None for the others: what
        a row asks first, as its blocks are nearly always there."""
        with self._lock:
            return [self._used(key) for key in keys]

    def claim(self, keys: Iterable[Key], *, ahead: bool = False) -> list[Key]:
        """Of these blocks those that are neither kept nor under way; they are under way now.

        Whoever claims a block gives it back with `release`, or others wait for ever.

        Args:
            ahead: Nobody needs them yet.
        """
        with self._changed:
            found = [key for key in keys if not (self._keeps(key) or key in self._under_way)]
            self._under_way.update(dict.fromkeys(found, ahead))
            return found

    def loaded(self, key: Hashable, load: Callable[[], DecodedBlock]) -> DecodedBlock:
        """A kept block, or what `load` gives; who else asks meanwhile waits instead of reading."""
        (there,) = self.held([key])
        if there is not None:
            return there
        mine = self.claim([key])
        try:
            return (None if mine else self.get(key)) or self.put(key, load())
        finally:
            self.release(mine)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Blocks are no longer under way, whether they were put here or not."""
        with self._changed:
            for key in keys:
                self._under_way.pop(key, None)
            self._changed.notify_all()

    @contextmanager
    def scan(self, n_blocks: int) -> Iterator[None]:
        """Inside, blocks are used in order and not again: those that were used are let go of soon,
        and the next go into memory that the processor still has at hand. Of two that read in order
        at a time the second may want what the first has used: all stays.

        Args:
            n_blocks: Used ones that stay, whatever their size.
        """
        # Without the lock: a generator may end wherever Python collects it, also inside of it.
        self._scans.append(n_blocks)
        try:
            yield
        finally:
            self._scans.remove(n_blocks)

    def memory(self, nbytes: int, *, many: bool = False) -> npt.NDArray[np.uint8]:
        """Memory for a block: that of one that was thrown away, where one has about this size.

        Args:
            many: More of exactly this size are asked for.
        """
        most = int(MOST_OF_MEMORY * nbytes)
        with self._changed:
            # The last first: it may still be in the cache of the processor.
            for number in reversed(range(len(self._spare))):
                if nbytes <= self._spare[number].nbytes <= most:
                    found = self._spare.pop(number)
                    self._spare_bytes -= found.nbytes
                    return found[:nbytes]
            if many and self.max_bytes >= LEAST_SLABS * SLAB_BYTES:
                return self._slabs.take(nbytes)[:]
        return np.empty(nbytes, np.uint8)[:]

    def put(self, key: Hashable, block: DecodedBlock) -> DecodedBlock:
        """Keep a block that was just read; its arrays become read-only."""
        for array in block:
            array.flags.writeable = False
        size = _nbytes(block)
        with self._changed:
            self.counts.blocks_read += 1
            self.counts.bytes_read += sum(array.nbytes for array in block)
            # Read twice, as by two openings of one shard, it is kept and weighed once.
            self.nbytes += size - _nbytes(self._used(key) or ())
            self._used_bytes -= _nbytes(self._blocks.pop(key, ()))
            if self._under_way.get(key):
                self._unused[key] = block, self.counts.bytes_read
            else:
                self._blocks[key] = block
                self._used_bytes += size
            while self._is_full():
                self._throw_away(key)
            self._changed.notify_all()
        return block

    def _is_full(self) -> bool:
        if self.nbytes > self.max_bytes:
            return len(self._blocks) + len(self._unused) > 1
        if self._used_bytes <= SCANNED_BYTES:
            return False
        scans = tuple(self._scans)
        return len(scans) == 1 and len(self._blocks) > max(1, *scans)

    def _keeps(self, key: Hashable) -> bool:
        return key in self._blocks or key in self._unused

    def _used(self, key: Hashable) -> DecodedBlock | None:
        """A kept block, now the most recently used, or None."""
        if key in self._unused:
            block = self._blocks[key] = self._unused.pop(key)[0]
            self._used_bytes += _nbytes(block)
        elif key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def _throw_away(self, newest: Hashable) -> None:
        """Let go of one block, but not of the newest."""
        oldest, waiting = next(iter(self._blocks), newest), next(iter(self._unused), newest)
        if waiting != newest and (oldest == newest or self._is_passed_over(waiting)):
            self._used(waiting)
            self._blocks.move_to_end(waiting, last=False)
        old, shared = _pop_oldest(self._blocks)
        self.nbytes -= _nbytes(old)
        self._used_bytes -= _nbytes(old)
        if not shared:
            self._save_memory(old[0].base)

    def _is_passed_over(self, key: Hashable) -> bool:
        return self.counts.bytes_read - self._unused[key][1] > self.max_bytes

    def _save_memory(self, memory: np.ndarray | None) -> None:
        """Keep what `memory` gave."""
        if memory is None or memory.dtype != np.uint8 or not self._slabs.owns(memory):
            return
        most = max(min(SPARE_BYTES, self.max_bytes), self.max_bytes - self.nbytes)
        if self._spare_bytes + memory.nbytes <= most:
            memory.flags.writeable = True
            self._spare.append(memory)
            self._spare_bytes += memory.nbytes

    def clear(self) -> None:
        """Drop every block."""
        with self._changed:
            self._blocks.clear()
            self._unused.clear()
            self._spare.clear()
            self._slabs.clear()
            self.nbytes = self._used_bytes = self._spare_bytes = 0


def _nbytes(block: DecodedBlock) -> int:
    """Of the memory that it keeps."""
    return sum(
        array.base.nbytes if isinstance(array.base, np.ndarray) else array.nbytes for array in block
    )


def _counts(block: DecodedBlock) -> tuple[int, ...]:
    """How many refer to the block, to its array and to the array's memory: a view of a view refers
    to the memory itself."""
    array = block[0]
    return sys.getrefcount(block), sys.getrefcount(array), sys.getrefcount(array.base)


def _pop_oldest(blocks: OrderedDict[Hashable, DecodedBlock]) -> tuple[DecodedBlock, bool]:
    """The block used longest ago, and whether somebody may still read it."""
    _, old = blocks.popitem(last=False)
    # Before there is a tuple of both, which refers to it too.
    shared = not isinstance(old[0].base, np.ndarray) or _counts(old) != _UNSHARED
    return old, shared


def _unshared() -> tuple[int, ...]:
    """What `_counts` is of a block that was in no hands but the cache's, in this Python."""
    blocks = OrderedDict({0: (np.empty(8, np.uint8).view(np.int16),)})
    _, old = blocks.popitem(last=False)
    return _counts(old)


_UNSHARED = _unshared()


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
        """The blocks that hold these frames."""

    def prepare(self, streams: Iterable[str], pool: Executor) -> None:
        """Fetch what reading these streams asks for first, such as where blocks lie, for who reads
        them soon.

        Args:
            pool: For requests side by side; its threads wait for nothing but those.
        """

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[Sequence[Block]]:
        """Blocks in groups, each for one call of `load`; what `prepare` fetches is fetched on the
        way where it is not there."""

    def load(self, blocks: Sequence[Block]) -> None:
        """Fetch and decode blocks into the cache."""


# Where a piece begins in a span, and its frames, (n, width).
Piece = tuple[int, np.ndarray]


class GivesPieces(Protocol):
    """A shard that shows frames where they are decoded, for who copies or converts them anyway."""

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """What makes up a span, read-only, in the stored dtype and in any order."""


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
