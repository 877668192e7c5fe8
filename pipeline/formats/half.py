"""Stored values in the type and unit that is asked for, rounded once."""

from __future__ import annotations

from collections.abc import Iterable
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
