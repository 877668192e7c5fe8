"""Read-only binary streams: regular files alone (a pipe or device may never end), the base class of
seekable ones, byte ranges, the sha256. Opening alone can change a device, so the kind of a file is
asked before. It is asked again afterwards: the name can be given to another file in between."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterable
from typing import Any, BinaryIO

from earmill.pipeline.common.errors import NotRegularError

Range = tuple[int, int]  # First byte of a range in a file, and the byte after the last.


def joined_ranges(ranges: Iterable[Range], gap_bytes: int = 0) -> list[Range]:
    """Return the fewest ranges with these bytes, in order; gaps up to `gap_bytes` are filled."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start - found[-1][1] <= gap_bytes:
            start, before = found.pop()
            end = max(before, end)
        found.append((start, end))
    return found


class SeekableFile(io.RawIOBase):
    """Base class of read-only seekable files; a subclass has `read` or `readinto`, at `_at`."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view)) or b""
        view[: len(data)] = data
        return len(data)


def sha256_of(stream: BinaryIO) -> str:
    """Return the sha256 of a file from its position to its end."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def digest_of(stream: BinaryIO) -> str:
    """Return the sha256 of a whole stream, by its method `digest()` if it has one."""
    cached = getattr(stream, "digest", None)
    if callable(cached):
        return str(cached())
    stream.seek(0)
    return sha256_of(stream)


KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str) -> io.BufferedReader:
    """Open a regular file for reading, links followed; NotRegularError for anything else."""
    check_regular(path)
    # Does not wait, whatever has taken the file's place since.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: str, descriptor: int | None = None) -> None:
    """Raise NotRegularError where a name, or an open file of that name, is no regular file."""
    mode = os.stat(path if descriptor is None else descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegularError(f"{path}: expected a regular file, got {kind}")
