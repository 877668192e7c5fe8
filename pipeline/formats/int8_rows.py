"""Frames in int8 with a scale for every column of a block: half of float16, and the error it has.

    clip  = block*                            of BLOCK_FRAMES frames, the last may have fewer
    block = low high frame{1..64}             each a row of int8, one number a column
    scale = bfloat16, low and high byte       the smallest with |value| / scale <= 127, rounded up
    value = frame * scale                     exact in float32

So a clip of n frames has n + 2 ceil(n / 64) stored rows, which any format holds like frames, and a
block is read by itself. A value is off by at most half a scale: 1/252 of the largest of its column
in its block. What that is on speech, stream by stream: `python -m benchmarks.int8`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.spill import Values

INT8 = "int8"
BLOCK_FRAMES = 64
SCALE_ROWS = 2
BLOCK_ROWS = SCALE_ROWS + BLOCK_FRAMES
LARGEST = 127
# bfloat16 is the upper half of a float32.
HALF_BITS = 16

Rows = NDArray[np.int8]
Frames = NDArray[np.float32]


def stored_rows(n_frames: int) -> int:
    """Stored rows of a clip of so many frames."""
    return n_frames + SCALE_ROWS * -(-n_frames // BLOCK_FRAMES)


def quantised(frames: NDArray[Any]) -> Rows:
    """Frames (n, columns), finite, as stored rows; they begin a block."""
    frames = np.asarray(frames, np.float32)
    rows = np.empty((stored_rows(len(frames)), frames.shape[1]), np.int8)
    for some, into in _equal_blocks(frames, BLOCK_FRAMES, rows, BLOCK_ROWS):
        scale = _rounded_up(np.abs(some).max(axis=1) / np.float32(LARGEST))
        upper = scale.view(np.uint32) >> HALF_BITS
        into[:, 0] = upper.astype(np.uint8).view(np.int8)
        into[:, 1] = (upper >> 8).astype(np.uint8).view(np.int8)
        # Zeros stay zeros whatever they are divided by.
        into[:, SCALE_ROWS:] = np.rint(some / np.where(scale > 0, scale, 1)[:, None])
    return rows


def dequantised(rows: NDArray[Any]) -> Frames:
    """The frames of stored rows that begin a block.

    Raises:
        CommitError: A scale is no finite number.
    """
    blocks = -(-len(rows) // BLOCK_ROWS)
    frames = np.empty((max(0, len(rows) - SCALE_ROWS * blocks), rows.shape[1]), np.float32)
    for some, into in _equal_blocks(rows, BLOCK_ROWS, frames, BLOCK_FRAMES):
        low, high = (some[:, place].view(np.uint8).astype(np.uint32) for place in (0, 1))
        scale = ((high << 8 | low) << HALF_BITS).view(np.float32)
        if not np.isfinite(scale).all():
            raise CommitError(
                "expected finite scales of a block in int8, got others: the file is damaged or not "
                "what was committed; run `earmill verify`"
            )
        np.multiply(some[:, SCALE_ROWS:], scale[:, None], out=into)
    return frames


def _rounded_up(values: Frames) -> Frames:
    """bfloat16 from 0 on, as float32."""
    bits = np.ascontiguousarray(values).view(np.uint32) + np.uint32(2**HALF_BITS - 1)
    return (bits & ~np.uint32(2**HALF_BITS - 1)).view(np.float32)


def _equal_blocks(
    whole: NDArray[Any], size: int, into: NDArray[Any], into_size: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Both as (block, row, column): first the full blocks, then the last one if it has fewer."""
    full, width = len(whole) // size, whole.shape[1]
    if full:
        yield (
            whole[: full * size].reshape(full, size, width),
            into[: full * into_size].reshape(full, into_size, width),
        )
    if len(whole) > full * size:
        yield whole[None, full * size :], into[None, full * into_size :]


def read_frames(
    read: Callable[[int, int], NDArray[Any]],
    *,
    n_stored: int,
    n_frames: int,
    span: tuple[int, int],
) -> Frames:
    """Frames [first, last) of a clip.

    Args:
        read: Gives stored rows of the clip.
        n_stored, n_frames: Stored rows and frames of the clip.
    Raises:
        CommitError: Stored rows and frames do not go together.
    """
    if n_stored != stored_rows(n_frames):
        raise CommitError(
            f"expected {stored_rows(n_frames)} rows in int8 for {n_frames} frames, the index says "
            f"{n_stored}; run `earmill verify`"
        )
    first, last = span
    begin, end = first // BLOCK_FRAMES, -(-last // BLOCK_FRAMES)
    rows = read(begin * BLOCK_ROWS, max(begin * BLOCK_ROWS, min(n_stored, end * BLOCK_ROWS)))
    frames = dequantised(rows)
    start = begin * BLOCK_FRAMES
    # A part of its own, which may be written to and does not keep the whole.
    return frames if len(frames) == last - first else frames[first - start : last - start].copy()


class Int8Frames:
    """The frames of a clip's stored rows, of which slices are taken.

    Args:
        rows: All stored rows of the clip. n_frames: Of the clip.
    """

    def __init__(self, rows: Values, n_frames: int) -> None:
        self._rows, self._n_frames = rows, n_frames

    def __len__(self) -> int:
        return self._n_frames

    def __getitem__(self, frames: slice) -> Frames:
        first, last, _ = frames.indices(self._n_frames)
        n_stored = len(self._rows)
        return read_frames(
            lambda start, stop: np.asarray(self._rows[start:stop]),
            n_stored=n_stored,
            n_frames=self._n_frames,
            span=(first, max(first, last)),
        )
