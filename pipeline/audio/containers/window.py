"""A part of a stream, with bytes of our own in front of it, as one seekable stream."""

from __future__ import annotations

import io
from typing import Any, BinaryIO


def open_window(
    stream: BinaryIO, start: int = 0, stop: int | None = None, prefix: bytes = b""
) -> BinaryIO:
    """Return `prefix`, then the bytes of `stream` from `start` to `stop`, as one stream.

    Args:
        stop: Byte behind the last; None is the end of the stream.
    """
    if not prefix and not start and stop is None:
        stream.seek(0)
        return stream
    return io.BufferedReader(_Window(stream, start, stop, prefix))


class _Window(io.RawIOBase):
    """See `open_window`."""

    def __init__(self, stream: BinaryIO, start: int, stop: int | None, prefix: bytes) -> None:
        self._stream, self._start, self._prefix = stream, start, prefix
        end = stream.seek(0, io.SEEK_END)
        end = end if stop is None else min(stop, end)
        self._size = len(prefix) + max(0, end - start)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        chunk = self._prefix[self._position : self._position + len(view)]
        left = self._size - self._position
        if not chunk and left > 0:
            self._stream.seek(self._position - len(self._prefix) + self._start)
            chunk = self._stream.read(min(len(view), left))
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
