"""Ranges of a file, and spans of large recordings that are read by ranges.

A range costs one request. What is asked for is what is read: nothing before, behind or between.

A span of ten seconds does not fetch a recording of a day. Where a row is a span of a file above
`MEMORY_BYTES` in a container that can be sought in (WAV, FLAC and their kin), its stream asks for
what the decoder reads. The checksum of the whole file is then not known: its column is null, of
local files too, and the store's tag says which object it was. That this has not changed is asked at
the beginning and at the end.

Spans of a long row (`planning.spans`) are read by different workers at different times: each asks
whether the file is still the planned one, of any size, so that no recording is made of two.
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
    answered,
    object_of,
    source_errors,
    stat_fields,
)
from earmill.pipeline.sources.fetch import (
    MEMORY_BYTES,
    Blob,
    Options,
    failed,
    fetch_all,
    is_final,
    load_object,
    may_go_on,
    patiently,
    temporary_file,
    waited_for,
)
from earmill.pipeline.storage.fsspec_store import is_web

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


class _Ranged(SeekableFile):
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


SEEKABLE = frozenset(
    ".aif .aifc .aiff .au .bw64 .bwf .caf .flac .nist .rf64 .snd .sph .w64 .wav .wave".split()
)
# Read at once after a jump; libFLAC finds its place in jumps.
BLOCK_BYTES = 64 << 10


def fetch_rows(items: Sequence[Item], options: Options) -> Iterator[Fetched]:
    """`fetch_all` of files that rows are, or are spans of; raises as that."""
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
    """What to say where the file of a row is another than was planned: by the store's tag, on this
    machine by the time of its last change. Its size is looked at where it is opened."""
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
        with waited_for():
            now = patiently(asked, _is_worth_it)[name]
    except Exception as error:  # stores raise their own
        return failed(item.uri, error)
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
    """What a row needs: ranges of a large file that it is a span of, else the whole object."""
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
    """A stream over a row's large object by ranges, to look at its header; None where the store
    gives no ranges, or the object is gone.

    Raises:
        SourceOutage: The store is away. SourceError: It cannot be asked.
    """

    def opened() -> BinaryIO | None:
        fs, path = object_of(item.uri, options)
        found = stat_fields(fs.info(path))
        if not found["size"] or not _has_ranges(fs, path):
            return None
        return RangedObject(fs, path, found["size"], found["etag"]).open()

    with source_errors(item.uri), suppress(FileNotFoundError):
        return answered(opened)
    return None


def can_seek(uri: str) -> bool:
    """Whether a file of this name is in a container that can be sought in."""
    name = uri.partition("?")[0] if is_web(uri) else uri
    return splitext(name)[1].lower() in SEEKABLE


def _has_ranges(fs: Any, path: str) -> bool:
    """Web servers may answer with the whole file; only asking for what is not its start tells."""
    try:
        return not may_go_on(fs) or bool(read_range(fs, path, Range(1, 2)))
    except UnreadableError:
        return False


class UnhashedFile(Blob):
    """A local file that is not read to its end for a checksum."""

    def digest(self) -> str:
        return ""


class RangedObject(Blob):
    """A remote object that is read where its streams read.

    Args:
        size: Of the object. tag: What the store calls its content, None where it has no name.
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
    """A stream over a `RangedObject`, which waits for a store that is away.

    Attributes:
        failure: What a read failed with, or that the object is another by now; see `check_arrived`.
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
        """Nothing: most of the object is not read."""
        return ""

    def read(self, size: int | None = -1) -> bytes:
        try:
            with waited_for():
                return patiently(lambda: super(RangedStream, self).read(size), _is_worth_it)
        except OSError as error:
            self._failure = error
            raise
        # Stores raise their own roots (botocore is no OSError), which would be lost in a decoder.
        except Exception as error:
            self._failure = OSError(errno.EIO, str(error))
            raise self._failure from error

    def _long_block_bytes(self) -> int:
        """Twice as much each time: a span may end soon."""
        return min(2 * len(self._block), LONG_BLOCK_BYTES)

    def _is_unchanged(self) -> bool:
        self._fs.invalidate_cache(self._path)
        with waited_for():
            info = patiently(lambda: self._fs.info(self._path), _is_worth_it)
        found = stat_fields(info)
        return (found["size"], found["etag"]) == (self._size, self._tag)


def _is_worth_it(error: Exception) -> bool:
    return not is_final(error)
