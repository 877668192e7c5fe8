"""One committed file, read by ranges: with plain system calls where it is local.

Not by a memory map: a file that another process cuts short would then end the reading process by a
signal, where a read can say what is wrong.
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

# Of what is read to be decoded at once, a request to a remote store at most; memory of a thread, as
# new memory costs more than reading.
SCRATCH_BYTES = 8 * 2**20
_scratch = threading.local()


class StoredFile:
    """A file of a dataset that never changes; it holds no handle between reads.

    Args:
        layout: The dataset.
        rel: The file in it.
        nbytes, sha256: As the commit has them; by the latter a local cache finds the file.
    """

    def __init__(self, layout: Layout, rel: str, nbytes: int, sha256: str) -> None:
        self.layout, self.rel, self.nbytes, self._sha256 = layout, rel, nbytes, sha256

    @cached_property
    def _path(self) -> str:
        return self.layout.inside(self.rel)

    def read(self, start: int, length: int, *, passing: bool = False) -> Bytes:
        """Bytes [start, start + length), in an array of their own.

        Args:
            passing: In memory that may be filled anew by this thread's next call: for who has done
                with them by then.
        Raises:
            CommitError: The file is missing, or has not so many.
        """
        self._check(start, length)
        try:
            memory = _memory(length) if passing else np.empty(length, np.uint8)
            found = (
                self._local(start, memory) if self.layout.is_local else self._remote(start, memory)
            )
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as err:
            raise CommitError(
                f"{self.layout.url(self.rel)} is missing although it is committed; run "
                "`earmill verify`"
            ) from err
        except NotRegularError as err:
            raise CommitError(f"{err}; put the file back, or run `earmill verify`") from err
        if len(found) != length:
            raise self._short(start, length, f"ends after {start + len(found)}")
        return found

    def parts(self, bounds: Sequence[int]) -> Iterator[Bytes]:
        """Bytes from the first bound to the last in parts, cut at those between, each in memory
        that may be filled anew with the next one and by `read(passing=True)`: decoded at once they
        are still in the cache of the processor. A remote store is asked once for all of them.
        Raises as `read`."""
        self._check(bounds[0], bounds[-1] - bounds[0])
        done = 0
        if not self.layout.is_local and self.layout.cache is None:
            sizes = [end - start for start, end in pairwise(bounds)]
            memory = _memory(max(sizes))
            for part in self.layout.parts_straight(self.rel, bounds[0], sizes, memory):
                yield part
                done += 1
        left = bounds[done:]
        if len(left) > 1:
            content = self.read(left[0], left[-1] - left[0], passing=self.layout.is_local)
            for start, end in pairwise(left):
                yield content[start - left[0] : end - left[0]]

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

    def _remote(self, start: int, into: Bytes) -> Bytes:
        cache = self.layout.cache
        if cache is None:
            return self._fetched(start, into)

        def fetch(start: int, length: int) -> Bytes:
            return self._fetched(start, np.empty(length, np.uint8))

        return cache.read(self._sha256, self.nbytes, start, len(into), fetch)

    def _fetched(self, start: int, into: Bytes) -> Bytes:
        """In `into` or elsewhere; fewer where the file ends before."""
        if not len(into) or [*self.layout.parts_straight(self.rel, start, [len(into)], into)]:
            return into
        return np.frombuffer(self.layout.read_range(self.rel, start, len(into)), np.uint8)

    def _check(self, start: int, length: int) -> None:
        if not 0 <= start <= start + length <= self.nbytes:
            raise self._short(start, length, f"was committed with {self.nbytes} bytes")

    def _short(self, start: int, length: int, why: str) -> CommitError:
        return CommitError(
            f"{self.layout.url(self.rel)}: expected {length} bytes from byte {start} on, the file "
            f"{why}; it is damaged: run `earmill verify`"
        )


def _memory(nbytes: int) -> Bytes:
    """Memory of this thread, or fresh where that is too small."""
    if nbytes > SCRATCH_BYTES:
        return np.empty(nbytes, np.uint8)
    if not hasattr(_scratch, "memory"):
        _scratch.memory = np.empty(SCRATCH_BYTES, np.uint8)
    whole: Bytes = _scratch.memory
    return whole[:nbytes]
