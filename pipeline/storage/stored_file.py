"""A committed file, read by ranges: with plain system calls where it is local.

A memory map is not used: where another process cuts the file short, a map ends the reading process
by a signal, and a read raises an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.byte_streams import open_descriptor
from earmill.pipeline.common.errors import CommitError, NotRegularError
from earmill.pipeline.storage.layout import Layout

Bytes = NDArray[np.uint8]

# Memory that each thread reuses for bytes that are decoded at once: new memory costs more than
# reading.
SCRATCH_BYTES = 8 * 2**20
_scratch = threading.local()


class StoredFile:
    """A file of a dataset that never changes; it holds no handle between reads.

    Args:
        layout: The dataset.
        rel: The file in it.
        nbytes: Size of the file, as committed.
        sha256: Hash of the file, as committed; a local cache finds the file by it.
    """

    def __init__(self, layout: Layout, rel: str, nbytes: int, sha256: str) -> None:
        self.layout, self.rel, self.nbytes, self._sha256 = layout, rel, nbytes, sha256

    @cached_property
    def _path(self) -> str:
        return self.layout.inside(self.rel)

    def read(self, start: int, length: int, *, passing: bool = False) -> Bytes:
        """Return bytes [start, start + length).

        Args:
            passing: Return memory that this thread's next call may overwrite.

        Raises:
            CommitError: The file is missing, or ends before.
        """
        if not 0 <= start <= start + length <= self.nbytes:
            raise self._short(start, length, f"was committed with {self.nbytes} bytes")
        try:
            if self.layout.is_local:
                found = self._local(
                    start, _memory(length) if passing else np.empty(length, np.uint8)
                )
            elif self.layout.cache is None:
                found = self._fetched(start, length)
            else:
                cache = self.layout.cache
                found = cache.read(self._sha256, self.nbytes, start, length, self._fetched)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise CommitError(
                f"{self.layout.url(self.rel)} is missing although it is committed; run "
                "`earmill verify`"
            ) from error
        except NotRegularError as error:
            raise CommitError(f"{error}; put the file back, or run `earmill verify`") from error
        if len(found) != length:
            raise self._short(start, length, f"ends after {start + len(found)}")
        return found

    def parts(self, bounds: Sequence[int]) -> Iterator[Bytes]:
        """Yield bytes from the first bound to the last in parts, cut at the bounds between.

        The store is asked once for all of them. Each part lies in memory that the next
        `read(passing=True)` may overwrite. Raises as `read`.
        """
        content = self.read(bounds[0], bounds[-1] - bounds[0], passing=self.layout.is_local)
        for start, end in pairwise(bounds):
            yield content[start - bounds[0] : end - bounds[0]]

    def _local(self, start: int, into: Bytes) -> Bytes:
        done = 0
        handle = open_descriptor(self._path)
        try:
            while done < len(into):
                count = os.preadv(handle, [into[done:].data], start + done)
                if not count:
                    break
                done += count
        finally:
            os.close(handle)
        return into[:done]

    def _fetched(self, start: int, length: int) -> Bytes:
        """Return bytes of the remote file, fewer where it ends before."""
        return np.frombuffer(self.layout.read_range(self.rel, start, length), np.uint8)

    def _short(self, start: int, length: int, why: str) -> CommitError:
        return CommitError(
            f"{self.layout.url(self.rel)}: expected {length} bytes from byte {start} on, the file "
            f"{why}; it is damaged: run `earmill verify`"
        )


def _memory(nbytes: int) -> Bytes:
    """Return memory of this thread, or new memory where that is too small."""
    if nbytes > SCRATCH_BYTES:
        return np.empty(nbytes, np.uint8)
    if not hasattr(_scratch, "memory"):
        _scratch.memory = np.empty(SCRATCH_BYTES, np.uint8)
    whole: Bytes = _scratch.memory
    return whole[:nbytes]
