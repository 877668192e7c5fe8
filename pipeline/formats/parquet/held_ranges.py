"""Bytes of a Parquet file that are there already, as a file for Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from earmill.pipeline.common.byte_streams import PlacedFile
from earmill.pipeline.storage.stored_file import Bytes, StoredFile

# First byte of something in a file, and the byte behind.
Span = tuple[int, int]
# First byte of a range, and what it holds.
Held = tuple[int, Bytes]


def joined(spans: Iterable[Span], gap_bytes: int) -> Iterator[Span]:
    """Spans in the order of the file; those that lie closer than `gap_bytes` as one."""
    begin = end = -1
    for low, high in sorted(spans):
        if end >= 0 and low - end > gap_bytes:
            yield begin, end
            end = -1
        begin = low if end < 0 else begin
        end = max(end, high)
    if end >= 0:
        yield begin, end


def fetched(file: StoredFile, spans: Iterable[Span]) -> list[Held]:
    """These ranges of a file."""
    return [(low, file.read(low, high - low)) for low, high in spans]


class HeldRanges(PlacedFile):
    """A file of which some ranges are held; Arrow takes their parts without a copy.

    Args:
        nbytes: Of the file.
        held: What is there of it.
    """

    def __init__(self, nbytes: int, held: Iterable[Held] = ()) -> None:
        super().__init__(nbytes)
        self.hold(held)

    def hold(self, held: Iterable[Held]) -> None:
        """These from now on, in place of those of before."""
        self._held = [*held]

    def part(self, start: int, nbytes: int) -> Bytes:
        """Bytes [start, start + nbytes) of the file.

        Raises:
            ValueError: They are not held.
        """
        for begin, content in self._held:
            if begin <= start and 0 <= nbytes <= begin + len(content) - start:
                return content[start - begin : start - begin + nbytes]
        raise ValueError(f"bytes {start} to {start + nbytes} of the file were not fetched")

    def read_buffer(self, nbytes: int) -> pa.Buffer:
        """What Arrow calls; see `read`."""
        found = self.part(self._at, nbytes)
        self._at += nbytes
        return pa.py_buffer(found)

    def read(self, nbytes: int = -1) -> bytes:
        """The next bytes."""
        return self.read_buffer(nbytes).to_pybytes()
