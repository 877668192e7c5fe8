"""Frames of a row out of decoded blocks: joined, converted with one rounding, copied or lent.

What a reader gives out is a fresh array, so that nobody can edit the cache. Who collates a batch
copies it once more. Inside `lending` frames come as they lie, read-only, and are copied once:

    with lending():
        row = features[5]              # row.features[stream] are LentFrames
    row.features[stream].fill(into)    # converted on the way

What is lent keeps its block in memory, and the cache does not use that for another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.formats.blocks import Piece


def converted(values: NDArray[Any], dtype: np.dtype[Any], scale: float = 1.0) -> NDArray[Any]:
    """Stored values times their scale in another type; the values themselves where nothing
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


def put_together(
    pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any], scale: float = 1.0
) -> NDArray[Any]:
    """A fresh array of what makes up some frames, times its scale; memory is taken when the first
    piece is there, as `shape` may be a claim that nothing holds.

    Raises:
        CommitError: The pieces are more or less than the array.
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
    """Raise CommitError unless there are as many as wanted."""
    if found != wanted:
        raise CommitError(f"expected {wanted} frames, the file gave {found}: run `earmill verify`")


def whole(pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """What makes up some stored rows as one array; not a copy where it is one piece."""
    found = [*pieces]
    if len(found) == 1 and found[0][1].shape == shape:
        return found[0][1]
    return put_together(found, shape, dtype)


# A block that is as many times as large as what is wanted of it is not kept for that.
MOST_OF_A_BLOCK = 8

_here = threading.local()


class LentFrames:
    """Frames of a row that are not put together yet.

    Args:
        pieces: Read-only parts of blocks. shape: (n_frames, width).
        dtype, scale: What they are to become, see `half.put_together`.
    Raises:
        CommitError: The pieces are more or less than the shape.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        scale: float = 1.0,
    ) -> None:
        self._pieces = [(first, _kept(piece)) for first, piece in pieces]
        check_frames(sum(len(piece) for _, piece in self._pieces), shape[0])
        self.shape, self.dtype, self._scale = shape, dtype, scale

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, into: NDArray[Any]) -> None:
        """Put them into an array of their shape, in C order."""
        for first, piece in self._pieces:
            convert_into(into[first : first + len(piece)], piece, self._scale)


@contextmanager
def lending() -> Iterator[None]:
    """Inside, frames that this thread reads are `LentFrames`."""
    before, _here.lends = getattr(_here, "lends", False), True
    try:
        yield
    finally:
        _here.lends = before


def given(
    pieces: Iterable[Piece], shape: tuple[int, int], dtype: np.dtype[Any], scale: float = 1.0
) -> NDArray[Any] | LentFrames:
    """Frames out of their pieces: a fresh array, or lent; raises as `put_together`."""
    if getattr(_here, "lends", False):
        return LentFrames(pieces, shape, dtype, scale)
    return put_together(pieces, shape, dtype, scale)


def _kept(piece: NDArray[Any]) -> NDArray[Any]:
    """The piece, or a copy where its block would be held for little."""
    block = piece.base
    is_small = isinstance(block, np.ndarray) and block.nbytes > MOST_OF_A_BLOCK * piece.nbytes
    return piece.copy() if is_small else piece
