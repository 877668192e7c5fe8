"""A stream as a decoding library wants it: no name, a bound on what a header may cost, kept errors.

Libraries read through callbacks, in which an exception is lost; here it is kept. Until `opened` is
called, a header that makes the library read on and on meets the end of the file instead.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from earmill.pipeline.audio.containers.window import open_window

# Pictures and seek tables in a header take a few MB; a walk over chunks a few reads each.
HEADER_BYTES = 64 << 20
HEADER_READS = 200_000


class DecoderInput:
    """Reads for a decoding library.

    Args:
        stream: Seekable bytes.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._failures: list[OSError] = []
        self._bytes_left, self._reads_left = HEADER_BYTES, HEADER_READS
        self._bounded = True

    @property
    def error(self) -> OSError | None:
        """The first failure of the stream, or of a window on it."""
        return self._failures[0] if self._failures else None

    def window(self, start: int, stop: int | None, prefix: bytes = b"") -> DecoderInput:
        """Return the input for a part of the stream, at its start; see `open_window`."""
        part = DecoderInput(open_window(self._stream, start, stop, prefix))
        part._failures = self._failures
        return part

    def opened(self) -> None:
        """The header is read: what follows are samples, of any length."""
        self._bounded = False

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        chunk = self.read(len(view))
        view[: len(chunk)] = chunk
        return len(chunk)

    def read(self, size: int = -1) -> bytes:
        if self._bounded and not self._may_read():
            return b""
        try:
            chunk = self._stream.read(size)
        except OSError as error:
            self._failures.append(error)
            return b""
        self._bytes_left -= len(chunk)
        return chunk

    def _may_read(self) -> bool:
        self._reads_left -= 1
        return self._reads_left >= 0 and self._bytes_left > 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Where the stream is afterwards: unmoved where a damaged header asks for nonsense."""
        try:
            return self._stream.seek(offset, whence)
        except (ValueError, OverflowError, OSError):
            return self._stream.tell()

    def tell(self) -> int:
        return self._stream.tell()
