"""Ranges of a file: read from wherever it is, and shown to a library as if the file were there.

A range costs one request. What is asked for is what is read: nothing before, behind or between.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.errors import UnreadableError
from earmill.pipeline.sources.fetch import (
    MEMORY_BYTES,
    Blob,
    may_go_on,
    temporary_file,
)
from earmill.pipeline.sources.regular import open_regular

T = TypeVar("T")
R = TypeVar("R")

# Of a long range at a time.
PIECE_BYTES = 8 << 20


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


def read_range(fs: Any, path: str, size: int, wanted: Range) -> bytes:
    """The bytes of one range of a file of `size` bytes.

    Raises:
        ConnectionError: Fewer arrived. UnreadableError: The server knows no ranges.
    """
    if isinstance(fs, LocalFileSystem):
        with open_regular(path) as stream:
            stream.seek(wanted.start)
            data = stream.read(wanted.nbytes)
    elif may_go_on(fs):
        data = _from_web(fs, path, size, wanted)
    else:
        data = fs.cat_file(path, start=wanted.start, end=wanted.end)
    if len(data) != wanted.nbytes:
        raise ConnectionError(f"{path}: got {len(data)} of {wanted.nbytes} bytes")
    return bytes(data)


def _from_web(fs: Any, path: str, size: int, wanted: Range) -> bytes:
    """A range off a web server, never more of it than was asked for."""
    try:
        with fs.open(path, "rb", size=size, cache_type="none") as stream:
            stream.seek(wanted.start)
            return bytes(stream.read(wanted.nbytes))
    except ValueError as error:  # what fsspec says of an answer with the whole file
        raise UnreadableError(f"{path}: the server gives no ranges of files: {error}") from error


def load_ranges(
    fs: Any, path: str, size: int, ranges: Sequence[Range], touch: Callable[[], None]
) -> Blob:
    """The bytes of some ranges one behind the other, in memory or, where they are many, in a file.

    Args:
        touch: Called whenever bytes arrive.
    """
    pieces = _pieces(fs, path, size, ranges, touch)
    if sum(one.nbytes for one in ranges) <= MEMORY_BYTES:
        return Blob(data=b"".join(pieces))
    name = temporary_file()
    blob = Blob(path=name, temporary=True)
    with open(name, "wb") as file:
        file.writelines(pieces)
    return blob


def _pieces(
    fs: Any, path: str, size: int, ranges: Sequence[Range], touch: Callable[[], None]
) -> Iterator[bytes]:
    for one in ranges:
        for start in range(one.start, one.end, PIECE_BYTES):
            piece = Range(start, min(start + PIECE_BYTES, one.end))
            yield read_range(fs, path, size, piece)
            touch()


class SparseFile(io.RawIOBase):
    """A file of which only some ranges are here.

    Args:
        stream: The bytes of the ranges, one behind the other.
        ranges: Which they are, in order.
        size: Of the whole file.
    """

    def __init__(self, stream: BinaryIO, ranges: Sequence[Range], size: int) -> None:
        self._stream, self._ranges, self._size = stream, ranges, size
        self._starts = [one.start for one in ranges]
        self._offsets = [sum(one.nbytes for one in ranges[:n]) for n in range(len(ranges))]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

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

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


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
