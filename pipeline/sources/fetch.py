"""Bytes of many objects, in order, a few ahead of the reader, in bounded memory.

Objects up to `MEMORY_BYTES` are read into memory, larger ones are opened in place (local) or copied
to a temporary file (remote), so every stream is seekable and no decoder waits on the network.
Neighbours with the same uri (spans of one recording) share one copy and one checksum.

A store that is away is asked again for `RETRIES.budget_s`, then `SourceOutage` ends the reading: an
outage is no property of a row. Only a clear no to one name, or a client that fails over the name or
its content, becomes a RowError in its place.
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
from contextlib import contextmanager
from itertools import groupby
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.byte_streams import open_regular, sha256_of
from earmill.pipeline.common.counts import SOURCE
from earmill.pipeline.common.errors import (
    AbsentError,
    ErrorKind,
    RowError,
    SourceOutage,
    UnreadableError,
    chain,
    classify,
)
from earmill.pipeline.common.retries import RetryPolicy, T
from earmill.pipeline.common.text import named_line
from earmill.pipeline.common.timing import FETCH, carried
from earmill.pipeline.sources.base import Fetched, Item, object_of
from earmill.pipeline.storage.scratch import own_folder

MEMORY_BYTES = 64 << 20  # objects above this are not held in memory
MOST_BYTES = 64 << 30  # of an object whose size nobody says
READ_AHEAD_BYTES = 256 << 20  # read ahead of the consumer at most this much
AHEAD_OBJECTS = 8
# In one go; the driver tries the whole shard again later.
RETRIES = RetryPolicy(budget_s=45.0, what=SOURCE)
# Without a byte for so long, or slower than this on the whole, a read counts as stalled.
STALL_S = 120.0
SLOWEST_BYTES_PER_S = 100_000


class Blob:
    """The bytes of one object, in memory or in a file.

    Args:
        data: The bytes, or None.
        path: A local file holding them, or None.
        temporary: Delete the file with the blob.
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
        """A new stream over the bytes, with a `digest` method beside the usual ones."""
        if self._data is not None:
            return MemoryStream(self, self._data)
        return FileStream(self, str(self._path))

    def digest(self) -> str:
        """sha256 of the bytes, computed once."""
        with self._lock:
            if self._digest is None:
                with self.open() as stream:
                    self._digest = sha256_of(stream)
            return self._digest


class MemoryStream(io.BytesIO):
    """A stream over a blob in memory; shares the bytes until somebody writes."""

    def __init__(self, blob: Blob, data: bytes) -> None:
        super().__init__(data)
        self._blob = blob

    def digest(self) -> str:
        return self._blob.digest()


class FileStream(io.BufferedReader):
    """A stream over a blob in a file; keeps the blob, and so a temporary file, alive.

    Attributes:
        failure: What a read failed with. Decoders take a failed read for the end of the file; see
            `check_arrived`.
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
        """A read of the same bytes failed in another process."""
        self._watched.failure = error

    def digest(self) -> str:
        return self._blob.digest()


class WatchedFile(io.RawIOBase):
    """A raw file that remembers that a read failed."""

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
    """Raise what failed below a decoder, whatever the decoder made of it.

    Raises:
        SourceOutage: Bytes could not be had.
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
# The bytes of an item, out of a filesystem of these options; called again while the store is away.
# The function is to be called whenever bytes arrive.
Load = Callable[["Item", Mapping[str, Any], Callable[[], None]], Blob]


_waits: dict[int, float] = {}


@contextmanager
def waited_for() -> Iterator[None]:
    """Somebody can do nothing but wait for the source in here."""
    me = threading.get_ident()
    _waits[me] = time.monotonic()
    try:
        yield
    finally:
        del _waits[me]


def longest_wait_s() -> float:
    """For how long a reader in this process has been waiting for the source, s."""
    began = min(_waits.copy().values(), default=None)
    return 0.0 if began is None else time.monotonic() - began


class _Task:
    """One object on its way.

    Attributes:
        moved: When something last arrived or a new try began, on the clock of `RETRIES`.
        abandoned: Nobody waits for it any more.
    """

    def __init__(self, group: list[Item]) -> None:
        self.group = group
        self.future: Future[Blob | RowError]
        self.abandoned = False
        self.moved = time.monotonic()

    def touch(self) -> None:
        self.moved = time.monotonic()

    def result(self) -> Blob | RowError:
        """Wait for it, but not for ever."""
        with waited_for():
            return self._result()

    def _result(self) -> Blob | RowError:
        patience_s = STALL_S + _memory_bytes(self.group[0]) / SLOWEST_BYTES_PER_S
        while True:
            left_s = self.moved + patience_s - time.monotonic()
            if wait_for([self.future], timeout=max(0.0, left_s)).done:
                return self.future.result()
            if time.monotonic() - self.moved >= patience_s:
                raise SourceOutage(f"{self.group[0].uri}: no byte within {patience_s:.0f} s")


def load_object(item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
    """The whole object that an item's uri names."""
    fs, path = object_of(item.uri, options)
    return _load(fs, path, item.size, touch)


def fetch_all(
    items: Sequence[Item], options: Options, load: Load = load_object
) -> Iterator[Fetched]:
    """Every item in order with its stream or RowError; reads a few objects ahead.

    Args:
        items: What to fetch; neighbours of one uri share one copy.
        options: fsspec storage options of a uri.
        load: How the bytes of an item are had; from several threads.
    Raises:
        SourceOutage: At the first item that could not be asked for.
    """
    waiting = deque(list(group) for _, group in groupby(items, key=lambda item: item.uri))
    running: deque[_Task] = deque()
    pool = ThreadPoolExecutor(AHEAD_OBJECTS, thread_name_prefix="fetch")
    try:
        while waiting or running:
            while waiting and _may_start(waiting[0], [task.group for task in running]):
                running.append(_started(pool, waiting.popleft(), options, load))
            # Left in the line while it is waited for: what ends this loop abandons it too.
            blob = running[0].result()
            # With the task goes its reference to the bytes: the last one is the consumer's.
            for item in running.popleft().group:
                yield item, _opened(item, blob)
            del blob
    finally:
        for task in running:
            task.abandoned = True
        # A read that hangs must not hold up who gave up on it.
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
    # An unknown size counts as the most that is ever held in memory.
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
        return failed(item.uri, error)


def load_blob(
    item: Item, options: Options, task: _Task | None = None, load: Load = load_object
) -> Blob | RowError:
    """The object behind an item, or the store's no to it.

    Raises:
        SourceOutage: Nobody answered, however often asked.
    """
    task = task or _Task([item])

    def attempt() -> Blob:
        task.touch()
        return load(item, options(item.uri), task.touch)

    try:
        return patiently(attempt, lambda error: not (task.abandoned or is_final(error)))
    # Backends raise classes of their own (botocore, aiohttp); `classify` knows them.
    except Exception as error:
        return failed(item.uri, error)


def patiently(work: Callable[[], T], worth_it: Callable[[Exception], bool]) -> T:
    """The value of `work`, tried again in what time a shard may wait; then its own exception."""
    return RETRIES.run(work, worth_it)


def is_final(error: Exception) -> bool:
    """A clear no of the store, or a defect; asking again does not help."""
    return row_error_of("", error) is not None or classify(error) is ErrorKind.REFUSED


def failed(uri: str, error: Exception) -> RowError:
    """The row error of a clear no or a defect; SourceOutage is raised for everything else."""
    if (row_error := row_error_of(uri, error)) is not None:
        return row_error
    if classify(error) is ErrorKind.REFUSED:
        return AbsentError(f"{uri}: cannot be fetched: {named_line(error)}")
    raise SourceOutage(f"{uri}: cannot be fetched: {named_line(error)}") from error


def row_error_of(uri: str, error: Exception) -> RowError | None:
    """Return the row error behind an exception that the object itself causes; None for others."""
    for one in chain(error):
        if isinstance(one, RowError):
            return one
    if classify(error) is not ErrorKind.DEFECT:
        return None
    return UnreadableError(f"{uri}: cannot be read: {named_line(error, where=True)}")


def _load(fs: Any, path: str, size: int | None, touch: Callable[[], None]) -> Blob:
    if isinstance(fs, LocalFileSystem):
        return _load_local(path)
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


def may_go_on(fs: Any) -> bool:
    """Whether an answer can be longer than was said, or endless: a web server's, not a store's."""
    return isinstance(fs, AbstractFileSystem) and not {"http", "https"}.isdisjoint(fs.protocol)


def temporary_file() -> str:
    """A new empty file for one object."""
    descriptor, name = tempfile.mkstemp(prefix="fetch-", dir=own_folder())
    os.close(descriptor)
    return name


def _check_whole(fs: Any, path: str, nbytes: int) -> None:
    """A connection that breaks can look like a short object: ask how long it is now."""
    fs.invalidate_cache(path)
    now = fs.info(path).get("size")
    if now is not None and now != nbytes:
        raise ConnectionError(f"got {nbytes} of {now} bytes")


class _Progress(Callback):
    """Tells that bytes arrive, and ends an answer that is longer than the object."""

    def __init__(self, touch: Callable[[], None], path: str, limit: int) -> None:
        super().__init__()
        self._touch, self._path, self._limit = touch, path, limit

    def call(self, *args: Any, **kwargs: Any) -> None:
        self._touch()
        if self.value > self._limit:
            raise UnreadableError(f"{self._path}: expected {self._limit} bytes, got more")


def _load_local(path: str) -> Blob:
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        # Never more than it held when it was opened: a file may grow without end.
        return Blob(path=path) if size > MEMORY_BYTES else Blob(data=stream.read(size))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
