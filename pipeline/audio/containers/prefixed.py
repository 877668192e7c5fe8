"""Bytes in front of a stream, so that a decoder reads a header that the file itself lacks."""

from __future__ import annotations

import io
from typing import Any, BinaryIO


def open_prefixed(stream: BinaryIO, prefix: bytes, offset: int) -> BinaryIO:
    """`prefix` followed by `stream` from `offset` on, as one seekable stream."""
    if not prefix and not offset:
        stream.seek(0)
        return stream
    return io.BufferedReader(_Prefixed(stream, prefix, offset))


class _Prefixed(io.RawIOBase):
    """Bytes in front of a stream; see `open_prefixed`."""

    def __init__(self, stream: BinaryIO, prefix: bytes, offset: int) -> None:
        self._stream, self._prefix, self._offset = stream, prefix, offset
        self._size = len(prefix) + stream.seek(0, io.SEEK_END) - offset
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
        if not chunk:
            self._stream.seek(self._position - len(self._prefix) + self._offset)
            chunk = self._stream.read(len(view))
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
