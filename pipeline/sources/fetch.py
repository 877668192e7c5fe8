"""Bytes of many objects, in order, a few ahead of the reader, in bounded memory.

Objects up to `MEMORY_BYTES` are read into memory, larger ones are opened in place (local) or copied
to a temporary file (remote), so every stream is seekable and no decoder waits on the network.
Neighbours with the same uri (spans of one recording) share one copy and one checksum.
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
from itertools import groupby
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import RowError, UnreadableError
from pipeline.hashing import sha256_of
from pipeline.sources.base import Fetched, Item, filesystem, one_line

MEMORY_BYTES = 64 << 20  # objects above this are not held in memory
AHEAD_BYTES = 256 << 20  # read ahead of the consumer at most this much
AHEAD_OBJECTS = 8
ATTEMPTS = 3
RETRY_PAUSE_S = 0.2

# Trying again does not help with these.
FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError)


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
    """A stream over a blob in a file; keeps the blob, and so a temporary file, alive."""

    def __init__(self, blob: Blob, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._blob = blob

    def digest(self) -> str:
        return self._blob.digest()


Options = Callable[[str], Mapping[str, Any]]


def fetch_all(items: Sequence[Item], options: Options) -> Iterator[Fetched]:
    """Every item in order with its stream or RowError; reads a few objects ahead.

    Args:
        items: What to fetch; neighbours of one uri share one copy.
        options: fsspec storage options of a uri.
    """
    groups = [list(group) for _, group in groupby(items, key=lambda item: item.uri)]
    waiting = deque(groups)
    running: deque[tuple[list[Item], Future[Blob | RowError]]] = deque()
    pool = ThreadPoolExecutor(AHEAD_OBJECTS, thread_name_prefix="fetch")
    try:
        while waiting or running:
            while waiting and _may_start(waiting[0], [group for group, _ in running]):
                group = waiting.popleft()
                running.append((group, pool.submit(load_blob, group[0], options)))
            group, future = running.popleft()
            blob = future.result()
            del future  # the last reference to the bytes is the consumer's
            for item in group:
                yield item, _opened(item, blob)
            del blob
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _may_start(group: list[Item], running: list[list[Item]]) -> bool:
    if not running:
        return True
    ahead = sum(_memory_bytes(items[0]) for items in [*running, group])
    return len(running) < AHEAD_OBJECTS and ahead <= AHEAD_BYTES


def _memory_bytes(item: Item) -> int:
    # An unknown size counts as the most that is ever held in memory.
    return MEMORY_BYTES if item.size is None else min(item.size, MEMORY_BYTES)


def _opened(item: Item, blob: Blob | RowError) -> BinaryIO | RowError:
    if isinstance(blob, RowError):
        return blob
    try:
        return _check_size(item, blob).open()
    except OSError as error:
        return UnreadableError(f"{item.uri}: cannot be opened: {one_line(error)}")


def _check_size(item: Item, blob: Blob) -> Blob:
    if item.size is not None and blob.nbytes != item.size:
        raise OSError(
            f"changed since it was planned: expected {item.size} bytes, got {blob.nbytes}"
        )
    return blob


def load_blob(item: Item, options: Options) -> Blob | RowError:
    """The object behind an item, with a few tries; never raises for the object's sake."""
    attempt = 1
    while True:
        try:
            fs, path = filesystem(item.uri, options(item.uri))
            return _load(fs, path, item.size)
        except FINAL_ERRORS as error:
            return _unreadable(item, error)
        # Backends raise classes of their own (botocore, aiohttp); a row error takes any of them.
        except Exception as error:
            if attempt == ATTEMPTS:
                return _unreadable(item, error)
        time.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
        attempt += 1


def _unreadable(item: Item, error: Exception) -> RowError:
    return UnreadableError(f"{item.uri}: cannot be fetched: {one_line(error)}")


def _load(fs: Any, path: str, size: int | None) -> Blob:
    if isinstance(fs, LocalFileSystem):
        return _load_local(path)
    if size is None:
        size = fs.info(path).get("size")
    if size is not None and size <= MEMORY_BYTES:
        return Blob(data=fs.cat_file(path))
    descriptor, name = tempfile.mkstemp(prefix="earmill-fetch-")
    os.close(descriptor)
    blob = Blob(path=name, temporary=True)
    fs.get_file(path, name)
    return blob


def _load_local(path: str) -> Blob:
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size > MEMORY_BYTES:
            return Blob(path=path)
        return Blob(data=stream.read())


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
