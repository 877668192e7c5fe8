"""A fingerprint of a shard's contents that does not depend on the file format.

The digest of a stream is a sha256 of the frame counts of the rows, the further counts of the layout
(the steps of events), and the sha256 of all values in row order. Integers are int64, everything is
little endian. It is taken from rows in memory and from each encoded file: a lost value shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.monitoring import doing
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.formats.values import joined_pieces

Counts = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class StreamDigest:
    """Frames, columns, dtype name and hash of a stream of a shard."""

    frames: int
    width: int
    dtype: str
    sha256: str


@dataclass(frozen=True)
class ShardDigest:
    """Row ids in order, and a digest per stream."""

    row_ids: tuple[str, ...]
    streams: Mapping[str, StreamDigest]


class StreamHasher:
    """Builds a `StreamDigest` from blocks of frames, in row order, as they are on disk."""

    def __init__(self, width: int, dtype: str) -> None:
        self._width = width
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._values = hashlib.sha256()
        self._frames = 0

    def update(self, frames: np.ndarray) -> None:
        block = np.ascontiguousarray(frames, dtype=self._dtype)
        self._frames += len(block)
        with doing("hash"):
            self._values.update(block.reshape(-1).view(np.uint8).data)

    def digest(self, *row_counts: Counts) -> StreamDigest:
        whole = hashlib.sha256()
        for counts in row_counts:
            whole.update(np.asarray(counts, dtype="<i8").tobytes())
        whole.update(self._values.digest())
        return StreamDigest(self._frames, self._width, self._dtype.name, whole.hexdigest())


def digest_blocks(
    blocks: Iterable[np.ndarray], width: int, dtype: str, *row_counts: Counts
) -> StreamDigest:
    """Return the digest of a stream given as blocks of frames, which may cut rows."""
    hasher = StreamHasher(width, dtype)
    for block in blocks:
        hasher.update(block)
    return hasher.digest(*row_counts)


def digest_rows(
    rows: Sequence[FeatureRow], streams: Sequence[StreamInfo], dtype: str
) -> ShardDigest:
    """Return the digest of the rows in memory, with which every file is compared."""
    digests = {}
    for info in streams:
        values = [row.streams[info.name] for row in rows]
        layout = layout_of(info)
        kind = layout.stored_width, layout.stored_dtype(dtype)
        sizes, blocks = [len(v) for v in values], joined_pieces(values)
        digests[info.name] = digest_blocks(blocks, *kind, sizes, *layout.counts_of(rows))
    return ShardDigest(tuple(row.row_id for row in rows), digests)


def differences(expected: ShardDigest, got: ShardDigest) -> list[str]:
    """Describe the differences of two digests, one line each; empty if they are equal."""
    found = []
    wanted, there = expected.row_ids, got.row_ids
    if wanted != there:
        text = str(len(there))
        if len(wanted) == len(there):
            row = next(i for i in range(len(wanted)) if wanted[i] != there[i])
            text = f"{there[row]!r} for {wanted[row]!r} at row {row}"
        found.append(f"expected {len(wanted)} row ids, read back {text}")
    for name, want in expected.streams.items():
        have = got.streams.get(name)
        if have is None:
            found.append(f"stream {name} is missing")
        elif (want.frames, want.width, want.dtype) != (have.frames, have.width, have.dtype):
            found.append(
                f"stream {name}: expected {want.frames} x {want.width} {want.dtype}, "
                f"read back {have.frames} x {have.width} {have.dtype}"
            )
        elif want.sha256 != have.sha256:
            found.append(f"stream {name}: the values read back differ from those written")
    return found
