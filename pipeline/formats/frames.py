"""Frames of a row out of decoded blocks: joined, converted with one rounding, copied or viewed.

A reader gives fresh arrays, so that nobody can edit the cache. Code that collates a batch copies
frames once more, so it asks for views (`copy=False`), which are copied once:

    row.features[stream].fill(into)    # a FrameView; converted on the way

A view keeps its block in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.formats.block_cache import Piece


def converted(values: NDArray[Any], dtype: np.dtype[Any], scale: float = 1.0) -> NDArray[Any]:
    """Convert stored values times their scale to another type; return them as they are if nothing
    changes."""
    if scale == 1.0 and values.dtype == dtype:
        return values
    found = np.empty(values.shape, dtype)
    convert_into(found, values, scale)
    return found


def convert_into(into: NDArray[Any], values: NDArray[Any], scale: float = 1.0) -> None:
    """Fill an array in C order with values times their scale."""
    try:
        # Here, so that whoever reads no values pays for no compiler.
        from amtcore.kernels.vector.half import widen
    except ImportError as error:
        raise missing_package(error) from error

    if values.dtype == np.float16 and into.dtype == np.float32:
        widen(values, into, scale)
    elif scale == 1.0:
        into[...] = values
    elif values.dtype == np.float16 and into.dtype == np.float16:
        whole = np.empty(values.shape, np.float32)
        widen(values, whole, scale)
        into[...] = whole
    else:
        exact = np.result_type(values.dtype, np.float32, into.dtype)
        into[...] = values.astype(exact) * exact.type(scale)


def join_frames(
    pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any], scale: float = 1.0
) -> NDArray[Any]:
    """Join pieces to a fresh array, times their scale. Memory is taken when the first piece is
    there, because `shape` may be a claim of a damaged index.

    Raises:
        CommitError: The pieces have more or fewer frames than the array.
    """
    into = np.empty((0, shape[1]), dtype)
    found = 0
    for first, piece in pieces:
        if not found:
            into = np.empty(shape, dtype)
        convert_into(into[first : first + len(piece)], piece, scale)
        found += len(piece)
    check_frames(found, shape[0])
    return into


def check_frames(found: int, wanted: int) -> None:
    """Raise CommitError unless as many frames were found as wanted."""
    if found != wanted:
        raise CommitError(f"expected {wanted} frames, the file gave {found}: run `earmill verify`")


def whole(pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return pieces of stored rows as one array; a single piece is not copied."""
    found = [*pieces]
    if len(found) == 1 and found[0][1].shape == shape:
        return found[0][1]
    return join_frames(found, shape, dtype)


# A view of a part of a larger block than this many times the part is copied, not kept.
MAX_BLOCK_RATIO = 8


class FrameView:
    """Frames of a row that are not joined yet.

    Args:
        pieces: Read-only parts of blocks.
        shape: (n_frames, width).
        dtype: Type of the joined frames.
        scale: Factor of the stored values.
    Raises:
        CommitError: The pieces have more or fewer frames than the shape.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        scale: float = 1.0,
    ) -> None:
        self._pieces = [(first, _own_piece(piece)) for first, piece in pieces]
        check_frames(sum(len(piece) for _, piece in self._pieces), shape[0])
        self.shape, self.dtype, self._scale = shape, dtype, scale

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, into: NDArray[Any]) -> None:
        """Copy the frames into an array of their shape, in C order."""
        for first, piece in self._pieces:
            convert_into(into[first : first + len(piece)], piece, self._scale)


def frames_of(
    pieces: Iterable[Piece],
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    scale: float = 1.0,
    *,
    copy: bool = True,
) -> NDArray[Any] | FrameView:
    """Return frames as a fresh array, or as a view of their pieces; raises as `join_frames`."""
    if copy:
        return join_frames(pieces, shape, dtype, scale)
    return FrameView(pieces, shape, dtype, scale)


def _own_piece(piece: NDArray[Any]) -> NDArray[Any]:
    """Return the piece, or a copy if its block is too large to be kept for it."""
    block = piece.base
    is_small = isinstance(block, np.ndarray) and block.nbytes > MAX_BLOCK_RATIO * piece.nbytes
    return piece.copy() if is_small else piece
