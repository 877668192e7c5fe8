"""Rows too large for one Parquet cell: divided over rows of the file that follow each other.

Arrow needs several times a cell to write or read it. A row with more than `LIMIT_BYTES` of features
therefore lies in several rows of the file, each a row group of its own, so that a worker needs no
more memory for three hours than for ten minutes:

    row_id   seconds  modulation_start  modulation_n_frames  modulation
    a.wav    12.5     0                 1250                 ...
    day.flac 86400    1250              135000               frames 0 to 134999
    day.flac 86400    136250            135000               frames 135000 to 269999
    ...

Row id and scalars repeat, start and number of frames are those of the part. The parts' frames are
also in the file's metadata under `PARTS_KEY`, which only such files have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from earmill.pipeline.common.errors import CommitError

MB = 2**20
# About ten minutes of Dau1997.
LIMIT_BYTES = 32 * MB
PART_BYTES = 16 * MB
PARTS_KEY = b"earmill.parts"


def part_count(row_bytes: int) -> int:
    """Into how many parts a row of so many bytes of features is divided."""
    return 1 if row_bytes <= LIMIT_BYTES else -(-row_bytes // PART_BYTES)


def cut(n_frames: int, parts: int) -> list[tuple[int, int]]:
    """Frames [first, last) of each part; they differ by one frame at most."""
    return list(pairwise(n_frames * k // parts for k in range(parts + 1)))


@dataclass(frozen=True)
class LongRows:
    """The divided rows of one file: row of the shard -> stream -> frames of each part."""

    frames: Mapping[int, Mapping[str, Sequence[int]]]

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> LongRows:
        """Out of a file's schema metadata.

        Raises:
            CommitError: It is not what a writer puts there.
        """
        text = (metadata or {}).get(PARTS_KEY, b"{}")
        try:
            frames = {
                int(row): {str(name): [*map(int, counts)] for name, counts in streams.items()}
                for row, streams in json.loads(text).items()
            }
        except (ValueError, TypeError, AttributeError) as err:
            raise CommitError(
                f"{PARTS_KEY.decode()}: expected frames by row and stream: {err}"
            ) from err
        for row, streams in frames.items():
            counts = [*streams.values()]
            if row < 0 or len({len(each) for each in counts}) != 1 or min(map(min, counts)) < 0:
                raise CommitError(f"{PARTS_KEY.decode()}: row {row} has no consistent parts")
        return cls(dict(sorted(frames.items())))

    def metadata(self) -> dict[bytes, bytes]:
        """What goes into a file's schema metadata."""
        return {PARTS_KEY: json.dumps(self.frames).encode()} if self.frames else {}

    def parts(self, row: int) -> int:
        """Rows of the file that a row of the shard takes."""
        return len(next(iter(self.frames[row].values()))) if row in self.frames else 1

    def first(self, row: int) -> int:
        """Row of the file where a row of the shard starts."""
        return row + sum(self.parts(long) - 1 for long in self.frames if long < row)

    def spans(self, row: int, stream: str, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The pieces of frames [first, last) of a divided row: row of the file, first, last."""
        counts = self.frames[row][stream]
        starts = accumulate(counts, initial=0)
        for part, (start, count) in enumerate(zip(starts, counts, strict=False)):
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                yield self.first(row) + part, low, high
