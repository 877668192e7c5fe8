"""Read-only binary streams: the base class of seekable ones, and their sha256."""

from __future__ import annotations

import hashlib
import io
from typing import BinaryIO


class SeekableFile(io.RawIOBase):
    """Base class of read-only seekable files. `readinto` of a subclass reads at `_at`.

    Args:
        size: Size of the file in bytes.
    """

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
        self._at = base + offset
        return self._at


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
