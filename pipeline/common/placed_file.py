"""A file that is read at a place: what those over bytes from elsewhere have in common."""

from __future__ import annotations

import io


class PlacedFile(io.RawIOBase):
    """Seekable, not to be written; whoever derives from it reads at `_at` and moves it on.

    Args:
        size: Of the file, bytes.
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
