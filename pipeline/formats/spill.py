"""The values of a long row, held in a file instead of memory.

A row of hours has hundreds of megabytes of features, and a worker has two shards at once. `Spilled`
takes a stream block by block and gives slices back, so that what a row costs in memory is one
block, however long it is. Its file has no name: it goes with the object, or with the process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from earmill.pipeline.common.errors import SpillError

# What is read or written at a time.
PIECE_BYTES = 4 * 2**20


class Spilled:
    """An array (n, width) that grows at its end and is read in slices.

    Args:
        dtype: Of the values.
        width: Columns.
        folder: Where the file lies; None, and one that is missing, mean the system's folder for
            temporary files.
    Invariants:
        `np.asarray(spilled)` equals the blocks that were added, one after another.
    """

    ndim = 2

    def __init__(self, dtype: npt.DTypeLike, width: int, folder: str | None = None) -> None:
        self.dtype, self._width, self._length = np.dtype(dtype), width, 0
        there = folder is not None and os.path.isdir(folder)
        self._folder = folder if there else tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        weakref.finalize(self, self._file.close)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, width)."""
        return self._length, self._width

    @property
    def size(self) -> int:
        """Values."""
        return self._length * self._width

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def append(self, block: npt.NDArray[Any]) -> None:
        """Add (n, width) values of the same dtype.

        Raises:
            SpillError: The file cannot be written: no room, most likely.
        """
        if block.shape[1:] != (self._width,) or block.dtype != self.dtype:
            raise ValueError(
                f"expected (n, {self._width}) {self.dtype}, got {block.shape} {block.dtype}"
            )
        left = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        at = self.nbytes
        try:
            while len(left):
                count = os.pwrite(self._file.fileno(), left, at)
                left, at = left[count:], at + count
        except OSError as error:
            raise self._failed(error) from error
        self._length += len(block)

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Rows [start, stop), read from the file."""
        start, stop, step = rows.indices(self._length)
        if step != 1:
            raise ValueError(f"expected a slice without a step, got {rows}")
        found = np.empty((max(0, stop - start), self._width), self.dtype)
        into = found.reshape(-1).view(np.uint8).data
        at = start * self._width * self.dtype.itemsize
        while len(into):
            count = os.preadv(self._file.fileno(), [into], at)
            if not count:
                raise SpillError(f"a file of temporary values ends after {at} bytes: run again")
            into, at = into[count:], at + count
        return found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def _failed(self, error: OSError) -> SpillError:
        return SpillError(
            error.errno,
            f"the features of a long row cannot be held in a file: {error.strerror}; make room",
            self._folder,
        )


Values = npt.NDArray[Any] | Spilled


def pieces(values: Values) -> Iterator[npt.NDArray[Any]]:
    """The values in blocks: of an array itself, of a file as much as may be in memory."""
    if not isinstance(values, Spilled):
        yield values
        return
    step = max(1, PIECE_BYTES // max(1, values.shape[1] * values.dtype.itemsize))
    for start in range(0, len(values), step):
        yield values[start : start + step]
