"""An object of a stream: where its chunks lie, and their bytes."""

from __future__ import annotations

from earmill.pipeline.formats.zarr.arrays import read_index
from earmill.pipeline.storage.stored_file import Bytes, StoredFile


class FrameObject:
    """An object whose index is read. Safe in several threads.

    Args:
        file: Where it is.
        n_chunks: Places of chunks in it.
        whole: Fetch all of it in the request that brings the index: of an object that is small and
            wanted from its first chunk to its last.
    """

    def __init__(self, file: StoredFile, n_chunks: int, *, whole: bool) -> None:
        self.file = file
        content = file.read(0, file.nbytes) if whole else None
        self.spans = read_index(file, n_chunks, content)
        self._content = content

    def read(self, start: int, end: int) -> Bytes:
        """Bytes [start, end), until this thread reads again; what came with the index is given out
        once and then forgotten."""
        content, self._content = self._content, None
        if content is None:
            return self.file.read(start, end - start, passing=True)
        return content[start:end]
