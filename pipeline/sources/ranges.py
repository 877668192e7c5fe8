"""Ranges of a file: read from wherever it is, and shown to a library as if the file were there.

A range costs one request. What is asked for is what is read: nothing before, behind or between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import PlacedFile
from earmill.pipeline.common.errors import UnreadableError
from earmill.pipeline.sources.fetch import (
    MEMORY_BYTES,
    Blob,
    may_go_on,
    temporary_file,
)
from earmill.pipeline.storage.regular import open_regular

T = TypeVar("T")
R = TypeVar("R")

# Of a long range at a time.
PIECE_BYTES = 8 << 20
# A jump of less costs less to read through, a long block at a time, than a request.
NEAR_BYTES, LONG_BLOCK_BYTES = 32 << 10, 1 << 20


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in the fewest ranges, in order."""
    found: list[Range] = []
    for one in sorted(ranges):
        if found and one.start <= found[-1].end:
            found[-1] = Range(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def read_range(fs: Any, path: str, wanted: Range) -> bytes:
    """The bytes of one range of a file.

    Raises:
        UnreadableError: The file ends before, or its server gives no ranges.
        ConnectionError: Fewer bytes arrived.
    """
    if isinstance(fs, LocalFileSystem):
        with open_regular(path) as stream:
            stream.seek(wanted.start)
            data = stream.read(wanted.nbytes)
    elif may_go_on(fs):
        data = _from_web(fs, path, wanted)
    else:
        data = fs.cat_file(path, start=wanted.start, end=wanted.end)
    if len(data) != wanted.nbytes:
        fs.invalidate_cache(path)
        now = fs.info(path).get("size")
        if now is not None and now < wanted.end:
            raise UnreadableError(f"{path}: ends at byte {now:,}, before {wanted.end:,}")
        raise ConnectionError(f"{path}: got {len(data)} of {wanted.nbytes} bytes")
    return bytes(data)


def _from_web(fs: Any, path: str, wanted: Range) -> bytes:
    """A range off a web server, never more of it than was asked for."""
    try:  # the size is what keeps fsspec from asking for it
        with fs.open(path, "rb", size=wanted.end, cache_type="none") as stream:
            stream.seek(wanted.start)
            return bytes(stream.read(wanted.nbytes))
    except ValueError as error:  # what fsspec says of an answer with the whole file
        raise UnreadableError(f"{path}: the server gives no ranges of files: {error}") from error


def load_ranges(fs: Any, path: str, ranges: Sequence[Range], touch: Callable[[], None]) -> Blob:
    """The bytes of some ranges one behind the other, in memory or, where they are many, in a file.

    Args:
        touch: Called whenever bytes arrive.
    """
    pieces = _pieces(fs, path, ranges, touch)
    if sum(one.nbytes for one in ranges) <= MEMORY_BYTES:
        return Blob(data=b"".join(pieces))
    name = temporary_file()
    blob = Blob(path=name, temporary=True)
    with open(name, "wb") as file:
        file.writelines(pieces)
    return blob


def _pieces(
    fs: Any, path: str, ranges: Sequence[Range], touch: Callable[[], None]
) -> Iterator[bytes]:
    for one in ranges:
        for start in range(one.start, one.end, PIECE_BYTES):
            piece = Range(start, min(start + PIECE_BYTES, one.end))
            yield read_range(fs, path, piece)
            touch()


class _Ranged(PlacedFile):
    """What is read into a buffer by `read`."""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view)) or b""
        view[: len(data)] = data
        return len(data)


class RangedFile(_Ranged):
    """A file read by ranges: a block wherever something is wanted, what lies between is skipped.

    Where little is skipped, reading on costs less than asking again: blocks are long then.

    Args:
        fs, path: Which. size: Where it ends, or what is wanted of it.
        block_bytes: Read at once after a jump.
    """

    def __init__(self, fs: Any, path: str, size: int, block_bytes: int) -> None:
        super().__init__(size)
        self._fs, self._path, self._block_bytes = fs, path, block_bytes
        self._block, self._start = b"", 0

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        behind = self._start + len(self._block)
        if wanted and not self._start <= self._at <= self._at + wanted <= behind:
            self._fill(wanted)
        data = self._block[self._at - self._start :][:wanted] if wanted else b""
        self._at += wanted
        return data

    def _fill(self, wanted: int) -> None:
        """Have `wanted` bytes from here on, and those behind them that a request is worth."""
        behind = self._start + len(self._block)
        kept = self._block[self._at - self._start :] if self._start <= self._at < behind else b""
        near = bool(self._block) and 0 <= self._at - behind < NEAR_BYTES
        block = self._long_block_bytes() if near else self._block_bytes
        first = self._at + len(kept)
        last = min(self._size, self._at + max(wanted, block))
        self._block = kept + read_range(self._fs, self._path, Range(first, last))
        self._start = self._at

    def _long_block_bytes(self) -> int:
        """To read at once where reading goes on."""
        return LONG_BLOCK_BYTES


class SparseFile(_Ranged):
    """A file of which only some ranges are here.

    Args:
        stream: The bytes of the ranges, one behind the other.
        ranges: Which they are, in order.
        size: Of the whole file.
    """

    def __init__(self, stream: BinaryIO, ranges: Sequence[Range], size: int) -> None:
        super().__init__(size)
        self._stream, self._ranges = stream, ranges
        self._starts = [one.start for one in ranges]
        self._offsets = [sum(one.nbytes for one in ranges[:n]) for n in range(len(ranges))]

    def read(self, size: int | None = -1) -> bytes:
        """What is here from this place on; OSError where nothing is."""
        number = bisect_right(self._starts, self._at) - 1
        left = self._ranges[number].end - self._at if number >= 0 else 0
        wanted = self._size - self._at if size is None or size < 0 else size
        if wanted and left <= 0:
            raise OSError(f"byte {self._at:,} was not fetched")
        self._stream.seek(self._offsets[number] + self._at - self._starts[number])
        data = self._stream.read(min(wanted, left))
        self._at += len(data)
        return data


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """`map(work, items)` in threads, a few results early and never more."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="list")
    running: deque[Future[R]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:  # the first failure ends it
        pool.shutdown(cancel_futures=True)
