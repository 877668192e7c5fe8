"""Bytes of many objects, in order and prefetched in bounded memory.

Objects up to `MEMORY_BYTES` are read into memory. Larger objects are opened in place (local) or
copied to a temporary file (remote), so every stream is seekable and no decoder waits for the
network. Neighbours with the same uri (spans of one recording) share one copy and one checksum.

An outage of the store is retried by the policy in `sources.base`, and then ends the reading with
`SourceOutage`: no row is at fault. If the store refuses one name, or its client fails because of
the name or the content, that row becomes a RowError.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import groupby
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import open_regular, sha256_of
from earmill.pipeline.common.errors import RowError, SourceOutage, UnreadableError
from earmill.pipeline.common.monitoring import FETCH, carried
from earmill.pipeline.common.text import named_line
from earmill.pipeline.sources.base import (
    Fetched,
    Item,
    is_final,
    longest_silence_s,
    object_of,
    retry_fetch,
    row_error,
    row_error_of,
    source_wait,
)
from earmill.pipeline.storage.scratch import own_folder

MEMORY_BYTES = 64 << 20  # larger objects are not held in memory
MOST_BYTES = 64 << 30  # limit for an object of unknown size
READ_AHEAD_BYTES = 256 << 20  # limit of bytes read ahead of the consumer
AHEAD_OBJECTS = 8


class Blob:
    """The bytes of an object, in memory or in a file.

    Args:
        data: The bytes, or None.
        path: A local file holding them, or None.
        temporary: True deletes the file with the blob.
    """

    def __init__(
        self, data: bytes | None = None, path: str | None = None, *, temporary: bool = False
    ) -> None:
        self._data, self._path = data, path
        self._digest: str | None = None
        self._lock = threading.Lock()
        if temporary and path is not None:
            weakref.finalize(self, _unlink, path)

    @property
    def nbytes(self) -> int:
        return len(self._data) if self._data is not None else os.path.getsize(str(self._path))

    def open(self) -> BinaryIO:
        """Return a new stream over the bytes, which also has a `digest` method."""
        if self._data is not None:
            return MemoryStream(self, self._data)
        return FileStream(self, str(self._path))

    def digest(self) -> str:
        """Return the sha256 of the bytes, computed once."""
        with self._lock:
            if self._digest is None:
                with self.open() as stream:
                    self._digest = sha256_of(stream)
            return self._digest


class MemoryStream(io.BytesIO):
    """A stream over a blob in memory; it shares the bytes until it is written."""

    def __init__(self, blob: Blob, data: bytes) -> None:
        super().__init__(data)
        self._blob = blob

    def digest(self) -> str:
        return self._blob.digest()


class FileStream(io.BufferedReader):
    """A stream over a blob in a file; it keeps the blob, and so a temporary file, alive.

    Attributes:
        failure: The error of a failed read. Decoders take a failed read for the end of the file;
            see `check_arrived`.
    """

    def __init__(self, blob: Blob, path: str) -> None:
        watched = WatchedFile(open_regular(path).detach())
        super().__init__(watched)
        self._blob, self._watched = blob, watched

    @property
    def failure(self) -> OSError | None:
        return self._watched.failure

    @failure.setter
    def failure(self, error: OSError) -> None:
        """Set the error of a read of the same bytes in another process."""
        self._watched.failure = error

    def digest(self) -> str:
        return self._blob.digest()


class WatchedFile(io.RawIOBase):
    """A raw file that remembers the error of a failed read."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.failure: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._raw.readinto(buffer)
        except OSError as error:
            self.failure = error
            raise

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()


def check_arrived(stream: BinaryIO, uri: str) -> None:
    """Raise the error of a failed read below a decoder.

    Raises:
        SourceOutage: The bytes could not be read.
        RowError: The object itself is at fault.
    """
    failure = getattr(stream, "failure", None)
    if failure is None:
        return
    cause = failure.__cause__
    if isinstance(cause, Exception) and (row_error := row_error_of(uri, cause)) is not None:
        raise row_error
    raise SourceOutage(f"{uri}: cannot be read: {named_line(failure)}") from failure


Options = Callable[[str], Mapping[str, Any]]
# Reads the bytes of an item with these filesystem options, and calls the function when bytes
# arrive. A retry calls it again.
Load = Callable[["Item", Mapping[str, Any], Callable[[], None]], Blob]


class _Task:
    """An object that is being fetched.

    Attributes:
        moved: Monotonic time at which bytes last arrived or a try began, s.
        abandoned: True if the consumer has ended.
    """

    def __init__(self, group: list[Item]) -> None:
        self.group = group
        self.future: Future[Blob | RowError]
        self.abandoned = False
        self.moved = time.monotonic()

    def touch(self) -> None:
        self.moved = time.monotonic()

    def result(self) -> Blob | RowError:
        """Wait for the object; a read stalls after `longest_silence_s` without a byte."""
        limit_s = longest_silence_s(_memory_bytes(self.group[0]))
        with source_wait():
            while True:
                left_s = self.moved + limit_s - time.monotonic()
                if wait_for([self.future], timeout=max(0.0, left_s)).done:
                    return self.future.result()
                if time.monotonic() - self.moved >= limit_s:
                    raise SourceOutage(f"{self.group[0].uri}: no byte within {limit_s:.0f} s")


def load_object(item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
    """Read the whole object of an item."""
    fs, path = object_of(item.uri, options)
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
        _check_whole(fs, path, blob.nbytes)
    return blob


def fetch_all(
    items: Sequence[Item], options: Options, load: Load = load_object
) -> Iterator[Fetched]:
    """Yield every item in order with its stream or RowError; a few objects are read ahead.

    Args:
        items: Items; neighbours of one uri share one copy.
        options: Returns the fsspec storage options of a uri.
        load: Reads the bytes of an item; called from several threads.
    Raises:
        SourceOutage: The store was away for an item.
    """
    waiting = deque(list(group) for _, group in groupby(items, key=lambda item: item.uri))
    running: deque[_Task] = deque()
    pool = ThreadPoolExecutor(AHEAD_OBJECTS, thread_name_prefix="fetch")
    try:
        while waiting or running:
            while waiting and _may_start(waiting[0], [task.group for task in running]):
                running.append(_started(pool, waiting.popleft(), options, load))
            # The task stays in the queue during the wait, so that an early end abandons it too.
            blob = running[0].result()
            # Dropping the task drops its reference to the bytes; the consumer has the last one.
            for item in running.popleft().group:
                yield item, _opened(item, blob)
            del blob
    finally:
        for task in running:
            task.abandoned = True
        # A hanging read must not delay a consumer that has given up.
        pool.shutdown(wait=False, cancel_futures=True)


def _started(pool: ThreadPoolExecutor, group: list[Item], options: Options, load: Load) -> _Task:
    task = _Task(group)
    task.future = pool.submit(carried(FETCH, load_blob), group[0], options, task, load)
    return task


def _may_start(group: list[Item], running: list[list[Item]]) -> bool:
    if not running:
        return True
    ahead = sum(_memory_bytes(items[0]) for items in [*running, group])
    return len(running) < AHEAD_OBJECTS and ahead <= READ_AHEAD_BYTES


def _memory_bytes(item: Item) -> int:
    # An unknown size counts as the maximum that is held in memory.
    return MEMORY_BYTES if item.size is None else min(item.size, MEMORY_BYTES)


def _opened(item: Item, blob: Blob | RowError) -> BinaryIO | RowError:
    if isinstance(blob, RowError):
        return blob
    try:
        if item.size is not None and blob.nbytes != item.size:
            return UnreadableError(
                f"{item.uri}: changed since it was planned: expected {item.size} bytes, "
                f"got {blob.nbytes}"
            )
        return blob.open()
    except OSError as error:
        return row_error(item.uri, error)


def load_blob(
    item: Item, options: Options, task: _Task | None = None, load: Load = load_object
) -> Blob | RowError:
    """Return the object of an item, or the RowError of a refusal.

    Raises:
        SourceOutage: The store was away for all tries.
    """
    task = task or _Task([item])

    def attempt() -> Blob:
        task.touch()
        return load(item, options(item.uri), task.touch)

    try:
        return retry_fetch(attempt, lambda error: not (task.abandoned or is_final(error)))
    # Backends raise classes of their own (botocore, aiohttp); `classify` knows them.
    except Exception as error:
        return row_error(item.uri, error)


def may_go_on(fs: Any) -> bool:
    """Return True if an answer can exceed the stated size or be endless, as from a web server."""
    return isinstance(fs, AbstractFileSystem) and not {"http", "https"}.isdisjoint(fs.protocol)


def temporary_file() -> str:
    """Return the name of a new empty file."""
    descriptor, name = tempfile.mkstemp(prefix="fetch-", dir=own_folder())
    os.close(descriptor)
    return name


def _check_whole(fs: Any, path: str, nbytes: int) -> None:
    """Refuse a short read: a broken connection can look like a short object."""
    fs.invalidate_cache(path)
    now = fs.info(path).get("size")
    if now is not None and now != nbytes:
        raise ConnectionError(f"got {nbytes} of {now} bytes")


class _Progress(Callback):
    """Notes that bytes arrive, and stops an answer that is longer than the object."""

    def __init__(self, touch: Callable[[], None], path: str, limit: int) -> None:
        super().__init__()
        self._touch, self._path, self._limit = touch, path, limit

    def call(self, *args: Any, **kwargs: Any) -> None:
        self._touch()
        if self.value > self._limit:
            raise UnreadableError(f"{self._path}: expected {self._limit} bytes, got more")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
