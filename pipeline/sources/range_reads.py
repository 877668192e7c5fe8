"""Ranges of a file, and spans of large recordings that are read by ranges.

A range costs one request, and exactly its bytes are read.

A span of ten seconds does not fetch a recording of a day. If a row is a span of a file above
`MEMORY_BYTES` in a seekable container (such as WAV and FLAC), its stream requests only what the
decoder reads. The checksum of the whole file is then unknown and its column is null, also for local
files. The content tag of the store identifies the object. It is compared at the beginning and at
the end.

Spans of a long row (`planning.spans`) are read by different workers at different times. Each worker
checks that the file is still the planned one, whatever its size, so no recording is read from two
versions of a file.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from posixpath import splitext
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import SeekableFile, open_regular
from earmill.pipeline.common.errors import RowError, UnreadableError
from earmill.pipeline.sources.base import (
    Fetched,
    Item,
    object_of,
    retry_listing,
    retry_read,
    row_error,
    source_errors,
    stat_fields,
)
from earmill.pipeline.sources.fetch import (
    MEMORY_BYTES,
    Blob,
    Options,
    fetch_all,
    load_object,
    may_go_on,
    temporary_file,
)
from earmill.pipeline.storage.backend import is_web

T = TypeVar("T")
R = TypeVar("R")

# A long range is read in pieces of this size.
PIECE_BYTES = 8 << 20
# Reading over a smaller gap, in long blocks, costs less than a request.
NEAR_BYTES, LONG_BLOCK_BYTES = 32 << 10, 1 << 20


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same bytes as the fewest ranges, in order."""
    found: list[Range] = []
    for one in sorted(ranges):
        if found and one.start <= found[-1].end:
            found[-1] = Range(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def read_range(fs: Any, path: str, wanted: Range) -> bytes:
    """Return the bytes of one range of a file.

    Raises:
        UnreadableError: The file ends before the range, or its server supports no ranges.
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
    """Return a range from a web server; no more bytes are read."""
    try:  # with a size, fsspec does not ask for it
        with fs.open(path, "rb", size=wanted.end, cache_type="none") as stream:
            stream.seek(wanted.start)
            return bytes(stream.read(wanted.nbytes))
    except ValueError as error:  # fsspec raises it if the answer is the whole file
        raise UnreadableError(f"{path}: the server gives no ranges of files: {error}") from error


def load_ranges(fs: Any, path: str, ranges: Sequence[Range], touch: Callable[[], None]) -> Blob:
    """Return the bytes of ranges, concatenated, in memory or in a file if they are large.

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


class _Ranged(SeekableFile):
    """Base class of files whose `readinto` calls `read`."""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view)) or b""
        view[: len(data)] = data
        return len(data)


class RangedFile(_Ranged):
    """A file that is read in blocks by range requests, only where it is used.

    After a small gap, reading on costs less than another request, so the blocks are long.

    Args:
        fs: Filesystem of the file.
        path: Path of the file.
        size: Size of the file, or the end of the part that is used.
        block_bytes: Bytes of a block after a jump.
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
        """Fetch at least `wanted` bytes from here on."""
        behind = self._start + len(self._block)
        kept = self._block[self._at - self._start :] if self._start <= self._at < behind else b""
        near = bool(self._block) and 0 <= self._at - behind < NEAR_BYTES
        block = self._long_block_bytes() if near else self._block_bytes
        first = self._at + len(kept)
        last = min(self._size, self._at + max(wanted, block))
        self._block = kept + read_range(self._fs, self._path, Range(first, last))
        self._start = self._at

    def _long_block_bytes(self) -> int:
        """Return the bytes of a block where reading goes on."""
        return LONG_BLOCK_BYTES


class SparseFile(_Ranged):
    """A file of which only some ranges are available.

    Args:
        stream: The bytes of the ranges, concatenated.
        ranges: The ranges, in order.
        size: Size of the whole file.
    """

    def __init__(self, stream: BinaryIO, ranges: Sequence[Range], size: int) -> None:
        super().__init__(size)
        self._stream, self._ranges = stream, ranges
        self._starts = [one.start for one in ranges]
        self._offsets = [sum(one.nbytes for one in ranges[:n]) for n in range(len(ranges))]

    def read(self, size: int | None = -1) -> bytes:
        """Return the available bytes from here on; OSError if there are none."""
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
    """Yield `map(work, items)`, computed by threads; at most `threads` results wait."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="list")
    running: deque[Future[R]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:  # the first failure ends the loop
        pool.shutdown(cancel_futures=True)


SEEKABLE = frozenset(
    ".aif .aifc .aiff .au .bw64 .bwf .caf .flac .nist .rf64 .snd .sph .w64 .wav .wave".split()
)
# Bytes of a block after a jump; libFLAC seeks in jumps.
BLOCK_BYTES = 64 << 10


def fetch_rows(items: Sequence[Item], options: Options) -> Iterator[Fetched]:
    """Yield `fetch_all` for rows that are files or spans of files; raises as `fetch_all`."""
    with closing(fetch_all(items, options, load_span)) as fetched:  # type: ignore[type-var]
        for item, stream in fetched:
            if item.part_of is None or isinstance(stream, RowError):
                yield item, stream
            elif (error := _replaced(item, options(item.uri))) is None:
                yield item, stream
            else:
                stream.close()
                yield item, error


def _replaced(item: Item, options: Mapping[str, Any]) -> RowError | None:
    """Return an error if the file of a row has changed since it was planned.

    The tag of the store is compared, or the time of change of a local file. The size is compared
    when the file is opened.
    """
    fs, path = object_of(item.uri, options)
    is_here = isinstance(fs, LocalFileSystem)

    def asked() -> Mapping[str, Any]:
        if is_here:
            return {"mtime": os.stat(path).st_mtime}
        fs.invalidate_cache(path)
        return stat_fields(fs.info(path))

    name = "mtime" if is_here else "etag"
    planned = getattr(item, name)
    try:
        now = retry_read(asked)[name]
    except Exception as error:  # stores raise classes of their own
        return row_error(item.uri, error)
    if planned is None or now is None or planned == now:
        return None
    if is_here:
        planned, now = (
            f"{datetime.fromtimestamp(s, UTC):%Y-%m-%d %H:%M:%S.%f}" for s in (planned, now)
        )
    what = "time of change" if is_here else "tag"
    return UnreadableError(
        f"{item.uri}: changed since it was planned: expected {what} {planned}, got {now}; "
        "`earmill retry` takes its spans from the file as it is now"
    )


def load_span(item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
    """Return what a row needs: a large object by ranges if the row is a span, else the object."""
    is_small = item.size is not None and item.size <= MEMORY_BYTES
    if (item.start_s, item.end_s) == (None, None) or not can_seek(item.uri) or is_small:
        return load_object(item, options, touch)
    fs, path = object_of(item.uri, options)
    if isinstance(fs, LocalFileSystem):
        is_large = os.stat(path).st_size > MEMORY_BYTES
        return UnhashedFile(path=path) if is_large else load_object(item, options, touch)
    found = stat_fields(fs.info(path))
    touch()
    if (found["size"] or 0) <= MEMORY_BYTES or not _has_ranges(fs, path):
        return load_object(item, options, touch)
    if item.etag is not None and found["etag"] != item.etag:
        raise UnreadableError(
            f"{item.uri}: changed since it was planned: expected tag {item.etag}, "
            f"got {found['etag']}"
        )
    return RangedObject(fs, path, found["size"], found["etag"])


def open_ranged(item: Item, options: Mapping[str, Any]) -> BinaryIO | None:
    """Return a stream over an object by ranges, to read its header.

    The result is None if the store supports no ranges, or the object is gone.

    Raises:
        SourceOutage: The store is away.
        SourceError: The store cannot be asked.
    """

    def opened() -> BinaryIO | None:
        fs, path = object_of(item.uri, options)
        found = stat_fields(fs.info(path))
        if not found["size"] or not _has_ranges(fs, path):
            return None
        return RangedObject(fs, path, found["size"], found["etag"]).open()

    with source_errors(item.uri), suppress(FileNotFoundError):
        return retry_listing(opened)
    return None


def can_seek(uri: str) -> bool:
    """Return True if the name belongs to a seekable container."""
    name = uri.partition("?")[0] if is_web(uri) else uri
    return splitext(name)[1].lower() in SEEKABLE


def _has_ranges(fs: Any, path: str) -> bool:
    """Return True if the store supports ranges. A web server may send the whole file instead."""
    try:
        return not may_go_on(fs) or bool(read_range(fs, path, Range(1, 2)))
    except UnreadableError:
        return False


class UnhashedFile(Blob):
    """A local file without a checksum, because most of it is not read."""

    def digest(self) -> str:
        return ""


class RangedObject(Blob):
    """A remote object that is read by ranges.

    Args:
        fs: Filesystem of the object.
        path: Path of the object.
        size: Bytes of the object.
        tag: Content tag of the store; None if it has none.
    """

    def __init__(self, fs: Any, path: str, size: int, tag: str | None) -> None:
        super().__init__()
        self._fs, self._object, self._size, self._tag = fs, path, size, tag

    @property
    def nbytes(self) -> int:
        return self._size

    def open(self) -> BinaryIO:
        return RangedStream(self._fs, self._object, self._size, self._tag)  # type: ignore[return-value]


class RangedStream(RangedFile):
    """A stream over a `RangedObject`; outages of the store are retried.

    Attributes:
        failure: The error of a failed read, or of an object that was replaced; see `check_arrived`.
    """

    def __init__(self, fs: Any, path: str, size: int, tag: str | None) -> None:
        super().__init__(fs, path, size, BLOCK_BYTES)
        self._tag = tag
        self._failure: OSError | None = None

    @property
    def failure(self) -> OSError | None:
        if self._failure is None and not self._is_unchanged():
            self._failure = OSError(errno.ESTALE, "the object was replaced while it was read")
        return self._failure

    @failure.setter
    def failure(self, error: OSError) -> None:
        self._failure = error

    def digest(self) -> str:
        """Return no checksum, because most of the object is not read."""
        return ""

    def read(self, size: int | None = -1) -> bytes:
        try:
            return retry_read(lambda: super(RangedStream, self).read(size))
        except OSError as error:
            self._failure = error
            raise
        # Stores raise classes of their own (botocore's is no OSError), which a decoder would lose.
        except Exception as error:
            self._failure = OSError(errno.EIO, str(error))
            raise self._failure from error

    def _long_block_bytes(self) -> int:
        """Return twice the bytes of the last block, as a span may end soon."""
        return min(2 * len(self._block), LONG_BLOCK_BYTES)

    def _is_unchanged(self) -> bool:
        self._fs.invalidate_cache(self._path)
        info = retry_read(lambda: self._fs.info(self._path))
        found = stat_fields(info)
        return (found["size"], found["etag"]) == (self._size, self._tag)
