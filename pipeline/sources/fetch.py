"""Bytes of objects, whole or by ranges, in order and prefetched in bounded memory.

Objects up to `MEMORY_BYTES` are read into memory. Larger objects are opened in place (local) or
copied to a temporary file (remote), so every stream is seekable and no decoder waits for the
network. Neighbours with the same uri (spans of one recording) share one copy and one checksum.

If a row is a span of a larger file in a seekable container (such as WAV and FLAC), its stream
requests only what the decoder reads. The checksum of the whole file is then null; the content tag
of the store identifies the object, at the beginning and at the end. Workers that read spans of one
long row (`planning.spans`) check that the file is still the planned file. An outage of the store is
retried (`sources.base`), and then raises `SourceOutage`: no row is at fault.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tempfile
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from posixpath import splitext
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import SeekableFile, open_regular, sha256_of
from earmill.pipeline.common.errors import RowError, SourceOutage, UnreadableError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.monitoring import carried
from earmill.pipeline.common.text import named_line
from earmill.pipeline.sources import base
from earmill.pipeline.sources.base import Fetched, Item
from earmill.pipeline.storage.backend import is_web
from earmill.pipeline.storage.scratch import own_folder

T = TypeVar("T")
R = TypeVar("R")

MEMORY_BYTES = 64 << 20  # larger objects are not held in memory
MOST_BYTES = 64 << 30  # limit for an object of unknown size
READ_AHEAD_BYTES = 256 << 20  # limit of bytes read ahead of the consumer
AHEAD_TASKS = 8
# An object stalls if no byte arrives for this time, plus its time at the lowest rate.
STALL_S = 120.0
SLOWEST_BYTES_PER_S = 100_000
PIECE_BYTES = 8 << 20  # A long range is read in pieces of this size.
BLOCK_BYTES = 64 << 10  # Bytes of a block after a jump; libFLAC seeks in jumps.
# Reading over a smaller gap, in long blocks, costs less than a request.
NEAR_BYTES, LONG_BLOCK_BYTES = 32 << 10, 1 << 20
SEEKABLE = frozenset(
    ".aif .aifc .aiff .au .bw64 .bwf .caf .flac .nist .rf64 .snd .sph .w64 .wav .wave".split()
)


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_range(fs: Any, path: str, wanted: Range) -> bytes:
    """Return the bytes of one range of a file; UnreadableError if the file ends before, or its
    server supports no ranges."""
    if isinstance(fs, LocalFileSystem):
        with open_regular(path) as stream:
            stream.seek(wanted.start)
            data = stream.read(wanted.nbytes)
    elif may_go_on(fs):
        try:  # with a size, fsspec does not ask for it
            with fs.open(path, "rb", size=wanted.end, cache_type="none") as stream:
                stream.seek(wanted.start)
                data = stream.read(wanted.nbytes)
        except ValueError as error:  # fsspec raises it if the answer is the whole file
            text = f"{path}: the server gives no ranges of files: {error}"
            raise UnreadableError(text) from error
    else:
        data = fs.cat_file(path, start=wanted.start, end=wanted.end)
    if len(data) != wanted.nbytes:
        now = base.stat_now(fs, path)["size"]
        if now is not None and now < wanted.end:
            raise UnreadableError(f"{path}: ends at byte {now:,}, before {wanted.end:,}")
        raise ConnectionError(f"{path}: got {len(data)} of {wanted.nbytes} bytes")
    return bytes(data)


def may_go_on(fs: Any) -> bool:
    """Return True if an answer can exceed the stated size or be endless, as from a web server."""
    return isinstance(fs, AbstractFileSystem) and not {"http", "https"}.isdisjoint(fs.protocol)


class RangedFile(SeekableFile):
    """A file that is read in blocks by range requests; `size` may be the end of the used part.
    After a jump, a block has `block_bytes`; after a small gap it is long: reading on costs less
    than a request."""

    def __init__(self, fs: Any, path: str, size: int, block_bytes: int) -> None:
        super().__init__(size)
        self._fs, self._path, self._block_bytes = fs, path, block_bytes
        self._block, self._start = b"", 0

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        behind = self._start + len(self._block)
        if wanted and not self._start <= self._at <= self._at + wanted <= behind:
            is_inside = self._start <= self._at < behind
            kept = self._block[self._at - self._start :] if is_inside else b""
            near = bool(self._block) and 0 <= self._at - behind < NEAR_BYTES
            block = self._long_block_bytes() if near else self._block_bytes
            last = min(self._size, self._at + max(wanted, block))
            missing = Range(self._at + len(kept), last)
            self._block = kept + read_range(self._fs, self._path, missing)
            self._start = self._at
        first = self._at - self._start
        self._at += wanted
        return self._block[first : first + wanted] if wanted else b""

    def _long_block_bytes(self) -> int:
        return LONG_BLOCK_BYTES


class SparseFile(SeekableFile):
    """A file of `size` bytes of which only some ranges are available, concatenated in a stream."""

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


class Blob:
    """The bytes of an object, in memory or in a file; a temporary file is deleted with it."""

    def __init__(
        self,
        data: bytes | None = None,
        path: str | None = None,
        *,
        temporary: bool = False,
        digest: str | None = None,
    ) -> None:
        self._data, self._path, self._digest = data, path, digest
        self._lock = threading.Lock()
        if temporary and path is not None:
            weakref.finalize(self, Path(path).unlink, missing_ok=True)

    @property
    def nbytes(self) -> int:
        return len(self._data) if self._data is not None else os.path.getsize(str(self._path))

    def open(self) -> BinaryIO:
        """Return a new stream over the bytes, which also has a `digest` method."""
        if self._data is None:
            return _FileStream(self, str(self._path))
        stream: Any = _MemoryStream(self._data)
        stream.digest = self.digest
        return stream

    def opened(self, item: Item) -> BinaryIO:
        """Return `open` for a row; UnreadableError if the object has not the planned size."""
        if item.size is not None and self.nbytes != item.size:
            raise UnreadableError(
                f"{item.uri}: changed since it was planned: expected {item.size} bytes, "
                f"got {self.nbytes}"
            )
        return self.open()

    def digest(self) -> str:
        """Return the sha256 of the bytes, computed once; empty if it is not known."""
        with self._lock:
            if self._digest is None and self._data is not None:
                self._digest = hashlib.sha256(self._data).hexdigest()
            elif self._digest is None:
                with self.open() as stream:
                    self._digest = sha256_of(stream)
            return self._digest


class _MemoryStream(io.BytesIO):
    """A stream that shares the bytes until it is written; it takes a `digest`."""


class _FileStream(io.BufferedReader):
    """A stream over a blob in a file. Decoders take a failed read, here or in another process, for
    the end of the file, so its error is kept in `failure`; see `check_arrived`."""

    def __init__(self, blob: Blob, path: str) -> None:
        super().__init__(open_regular(path).detach())
        self.digest = blob.digest  # keeps the blob, and so a temporary file, alive
        self.failure: OSError | None = None

    def read(self, size: int | None = -1) -> bytes:
        try:
            return super().read(size)
        except OSError as error:
            self.failure = error
            raise


class _RangedObject(Blob):
    """A remote object that is read by ranges; `tag` is the content tag of its store, or None."""

    def __init__(self, fs: Any, path: str, size: int, tag: str | None) -> None:
        super().__init__()
        self._opener, self._size = partial(RangedStream, fs, path, size, tag), size

    @property
    def nbytes(self) -> int:
        return self._size

    def open(self) -> BinaryIO:
        return self._opener()  # type: ignore[return-value]


class RangedStream(RangedFile):
    """A stream over an object that is read by ranges. Outages of the store are retried."""

    def __init__(self, fs: Any, path: str, size: int, tag: str | None) -> None:
        super().__init__(fs, path, size, BLOCK_BYTES)
        self._tag = tag
        self._failure: OSError | None = None

    @property
    def failure(self) -> OSError | None:
        if self._failure is None:
            now = base.retry_read(lambda: base.stat_now(self._fs, self._path))
            if (now["size"], now["etag"]) != (self._size, self._tag):
                text = "the object was replaced while it was read"
                self._failure = OSError(errno.ESTALE, text)
        return self._failure

    @failure.setter
    def failure(self, error: OSError) -> None:
        self._failure = error

    def digest(self) -> str:
        """Return no checksum, because most of the object is not read."""
        return ""

    def read(self, size: int | None = -1) -> bytes:
        try:
            return base.retry_read(lambda: super(RangedStream, self).read(size))
        except OSError as error:
            self._failure = error
            raise
        except Exception as error:  # a decoder loses a store's own classes
            self._failure = OSError(errno.EIO, str(error))
            raise self._failure from error

    def _long_block_bytes(self) -> int:
        """Return twice the bytes of the last block, as a span may end soon."""
        return min(2 * len(self._block), LONG_BLOCK_BYTES)


def check_arrived(stream: object, uri: str) -> None:
    """Raise the error of a failed read below a decoder: SourceOutage, or the object's RowError."""
    failure = getattr(stream, "failure", None)
    if failure is None:
        return
    cause = failure.__cause__
    if isinstance(cause, Exception) and (found := base.row_error_of(uri, cause)) is not None:
        raise found
    raise SourceOutage(f"{uri}: cannot be read: {named_line(failure)}") from failure


Options = Callable[[str], Mapping[str, Any]]
# Reads the bytes of an item with these filesystem options, and calls the function when bytes
# arrive. A retry calls it again.
Load = Callable[[Item, Mapping[str, Any], Callable[[], None]], Blob]


def load_object(item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
    """Read the whole object of an item."""
    fs, path = base.object_of(item.uri, options)
    size = item.size
    if isinstance(fs, LocalFileSystem):
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            # Never more than the file held when it was opened: it may grow without end.
            return Blob(path=path) if size > MEMORY_BYTES else Blob(data=stream.read(size))
    if size is None:
        size = fs.info(path).get("size")
    if size is not None and size <= MEMORY_BYTES and not may_go_on(fs):
        blob = Blob(data=fs.cat_file(path))
    else:
        name = temporary_file()
        blob = Blob(path=name, temporary=True)
        limit = MOST_BYTES if size is None else size
        fs.get_file(path, name, callback=_Progress(touch, path, limit))
    if blob.nbytes != size:
        # A broken connection can look like a short object.
        now = base.stat_now(fs, path)["size"]
        if now is not None and now != blob.nbytes:
            raise ConnectionError(f"got {blob.nbytes} of {now} bytes")
    return blob


class _Progress(Callback):
    """Notes that bytes arrive, and stops an answer that is longer than the object."""

    def __init__(self, touch: Callable[[], None], path: str, limit: int) -> None:
        super().__init__()
        self._touch, self._path, self._limit = touch, path, limit

    def call(self, *args: Any, **kwargs: Any) -> None:
        self._touch()
        if self.value > self._limit:
            raise UnreadableError(f"{self._path}: expected {self._limit} bytes, got more")


def load_span(item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
    """Return what a row needs: a large object by ranges if the row is a span, else the object."""
    is_small = item.size is not None and item.size <= MEMORY_BYTES
    if (item.start_s, item.end_s) == (None, None) or not can_seek(item.uri) or is_small:
        return load_object(item, options, touch)
    fs, path = base.object_of(item.uri, options)
    if isinstance(fs, LocalFileSystem):
        is_large = os.stat(path).st_size > MEMORY_BYTES
        # Most of a large file is not read, so it has no checksum.
        return Blob(path=path, digest="") if is_large else load_object(item, options, touch)
    found = base.stat_fields(fs.info(path))
    touch()
    if (found["size"] or 0) <= MEMORY_BYTES or not _has_ranges(fs, path):
        return load_object(item, options, touch)
    if item.etag is not None and found["etag"] != item.etag:
        raise UnreadableError(
            f"{item.uri}: changed since it was planned: expected tag {item.etag}, "
            f"got {found['etag']}"
        )
    return _RangedObject(fs, path, found["size"], found["etag"])


def load_ranges(fs: Any, path: str, ranges: Sequence[Range], touch: Callable[[], None]) -> Blob:
    """Return the bytes of ranges, concatenated; `touch` is called whenever bytes arrive."""

    def pieces() -> Iterator[bytes]:
        for one in ranges:
            for start in range(one.start, one.end, PIECE_BYTES):
                yield read_range(fs, path, Range(start, min(start + PIECE_BYTES, one.end)))
                touch()

    return blob_of(pieces(), sum(one.nbytes for one in ranges))


def blob_of(pieces: Iterable[bytes], nbytes: int) -> Blob:
    """Return pieces of `nbytes` bytes in all as one blob, in a temporary file if they are large."""
    if nbytes <= MEMORY_BYTES:
        return Blob(data=b"".join(pieces))
    name = temporary_file()
    blob = Blob(path=name, temporary=True)
    with open(name, "wb") as file:
        file.writelines(pieces)
    return blob


def temporary_file() -> str:
    """Return the name of a new empty file."""
    descriptor, name = tempfile.mkstemp(prefix="fetch-", dir=own_folder())
    os.close(descriptor)
    return name


def open_ranged(item: Item, options: Mapping[str, Any]) -> BinaryIO | None:
    """Return a stream over an object by ranges; None without range support or without object."""

    def opened() -> BinaryIO | None:
        fs, path = base.object_of(item.uri, options)
        found = base.stat_fields(fs.info(path))
        if not found["size"] or not _has_ranges(fs, path):
            return None
        return _RangedObject(fs, path, found["size"], found["etag"]).open()

    with base.source_errors(item.uri), suppress(FileNotFoundError):
        return base.retry_listing(opened)
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


def load_blob(
    item: Item,
    options: Options,
    load: Load = load_object,
    touch: Callable[[], None] = lambda: None,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Blob | RowError:
    """Return the object of an item, or the RowError of a refusal; SourceOutage after all tries.
    `touch` is called when bytes arrive or a try begins."""

    def attempt() -> Blob:
        touch()
        return load(item, options(item.uri), touch)

    try:
        return base.FETCH_RETRIES.run(
            attempt, lambda error: not (is_abandoned() or base.is_final(error))
        )
    # Backends raise classes of their own (botocore, aiohttp); `classify` knows them.
    except Exception as error:
        return base.row_error(item.uri, error)


class _Task:
    """An object that is being fetched for a group of neighbours with one uri. Bytes last arrived,
    or a try began, at the monotonic time `moved`, s."""

    def __init__(
        self, pool: ThreadPoolExecutor, group: list[Item], options: Options, load: Load
    ) -> None:
        self.group, self.abandoned, self.moved = group, False, time.monotonic()
        self.nbytes = _memory_bytes(group)

        def load_first() -> Blob | RowError:
            return load_blob(group[0], options, load, self._touch, lambda: self.abandoned)

        self.future = pool.submit(carried("fetch", load_first))

    def _touch(self) -> None:
        self.moved = time.monotonic()

    def result(self) -> Blob | RowError:
        """Wait for the object; SourceOutage if a read stalls."""
        limit_s = STALL_S + self.nbytes / SLOWEST_BYTES_PER_S
        with base.waits.waiting():
            while True:
                left_s = self.moved + limit_s - time.monotonic()
                if wait_for([self.future], timeout=max(0.0, left_s)).done:
                    return self.future.result()
                if time.monotonic() - self.moved >= limit_s:
                    raise SourceOutage(f"{self.group[0].uri}: no byte within {limit_s:.0f} s")


def fetch_all(
    items: Sequence[Item], options: Options, load: Load = load_object
) -> Iterator[Fetched]:
    """Yield every item in order with its stream or RowError; a few objects are read ahead. `load`
    is called from several threads. SourceOutage if the store was away for an item."""
    waiting = deque(list(group) for _, group in groupby(items, key=lambda item: item.uri))
    running: deque[_Task] = deque()
    pool = ThreadPoolExecutor(AHEAD_TASKS, thread_name_prefix="fetch")
    try:
        while waiting or running:
            while waiting and len(running) < AHEAD_TASKS:
                held = sum(task.nbytes for task in running)
                if running and held + _memory_bytes(waiting[0]) > READ_AHEAD_BYTES:
                    break
                running.append(_Task(pool, waiting.popleft(), options, load))
            # The task stays in the queue during the wait, so that an early end abandons it too.
            blob = running[0].result()
            for item in running.popleft().group:
                stream: BinaryIO | RowError
                try:
                    stream = blob if isinstance(blob, RowError) else blob.opened(item)
                except UnreadableError as error:
                    stream = error
                except OSError as error:
                    stream = base.row_error(item.uri, error)
                yield item, stream
            # The consumer has the last reference to the bytes.
            del blob, stream
    finally:
        for task in running:
            task.abandoned = True
        # A hanging read must not delay a consumer that has given up.
        pool.shutdown(wait=False, cancel_futures=True)


def _memory_bytes(group: list[Item]) -> int:
    # An unknown size counts as the maximum that is held in memory.
    size = group[0].size
    return MEMORY_BYTES if size is None else min(size, MEMORY_BYTES)


def fetch_rows(items: Sequence[Item], options: Options) -> Iterator[Fetched]:
    """Yield `fetch_all` for rows that are files or spans of files; raises as `fetch_all`."""
    with closing(fetch_all(items, options, load_span)) as fetched:  # type: ignore[type-var]
        for item, stream in fetched:
            if item.part_of is not None and not isinstance(stream, RowError):
                if (error := _replaced(item, options(item.uri))) is not None:
                    stream.close()
                    stream = error
            yield item, stream


def _replaced(item: Item, options: Mapping[str, Any]) -> RowError | None:
    """Return an error if the tag, or the local time of change, of a file is not the planned one."""
    fs, path = base.object_of(item.uri, options)
    is_here = isinstance(fs, LocalFileSystem)
    name, what = ("mtime", "time of change") if is_here else ("etag", "tag")
    planned = getattr(item, name)
    try:
        now = base.retry_read(lambda: base.stat_now(fs, path))[name]
    except Exception as error:  # stores raise classes of their own
        return base.row_error(item.uri, error)
    if planned is None or now is None or planned == now:
        return None
    if is_here:
        planned, now = (
            f"{datetime.fromtimestamp(s, UTC):%Y-%m-%d %H:%M:%S.%f}" for s in (planned, now)
        )
    return UnreadableError(
        f"{item.uri}: changed since it was planned: expected {what} {planned}, got {now}; "
        "`earmill retry` takes its spans from the file as it is now"
    )


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `map(work, items)`, computed by threads; at most `threads` results wait."""
    running: deque[Future[R]] = deque()
    with Threads(threads, "list") as pool:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
