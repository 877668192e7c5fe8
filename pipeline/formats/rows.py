"""Rows that a worker hands to the writers, good or quarantined, and the files written of them.

Plain frozen records without behaviour, so that they pickle and compare. A row's scalars become
columns of the tables in `formats.row_table`; its streams become frames in Zarr and Parquet.

`Spilled` holds the values of a long row in a file instead of memory. A row of hours has hundreds of
megabytes of features, and a worker has two shards at once. `Spilled` takes a stream block by block
and gives slices back, so a row of any length takes the memory of one block. Its file has no name
and goes with the object, or with the process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from earmill.pipeline.common.errors import SpillError
from earmill.pipeline.storage.documents import Strict

if TYPE_CHECKING:
    pass

# Bytes that are read or written at a time.
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
    """Yield the values in blocks: an array whole, a file in pieces of `PIECE_BYTES`."""
    if not isinstance(values, Spilled):
        yield values
        return
    step = max(1, PIECE_BYTES // max(1, values.shape[1] * values.dtype.itemsize))
    for start in range(0, len(values), step):
        yield values[start : start + step]


@dataclass(frozen=True)
class CastError:
    """Errors of the cast of a stream.

    Args:
        worst: Largest relative error of the values that stayed above zero.
        worst_normal: The same of those in the range where float16 has all its bits.
        nonzero: Values that were not zero. below: Of these, those under that range.
        zeroed: Of these, those that became zero.
    """

    worst: float = 0.0
    worst_normal: float = 0.0
    nonzero: int = 0
    below: int = 0
    zeroed: int = 0

    def __add__(self, other: CastError) -> CastError:
        return CastError(
            max(self.worst, other.worst),
            max(self.worst_normal, other.worst_normal),
            self.nonzero + other.nonzero,
            self.below + other.below,
            self.zeroed + other.zeroed,
        )

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain values."""
        return asdict(self)


def total(parts: Iterable[Mapping[str, CastError]]) -> dict[str, CastError]:
    """Add up the errors of several rows or stretches, by stream."""
    whole: dict[str, CastError] = {}
    for part in parts:
        for name, error in part.items():
            whole[name] = whole.get(name, CastError()) + error
    return whole


Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class FeatureRow:
    """One clip (or one channel of it) with its features and everything known about its origin.

    Args:
        row_id: Unique in the dataset; channel policy `each` makes it `<plan row id>#ch<k>`.
        plan_row_id: The row of the plan this came from.
        channel: Source channel index, -1 for mixed or only.
        seconds: Duration of the audio the features stand for, s.
        facts: Provenance by name (uri, etag, pcm_sha256, decoder, rate_hz, gain_db, ...).
        extra: The source's own columns, carried through.
        streams: Stream name to (n_frames, width), already in the output dtype; of a stream of
            events to (n_events, 3) in int32, see `formats.stream_layout`. Those of a long clip lie
            in files, see `earmill.pipeline.formats.rows`.
        steps: Name of each stream of events, or of frames in int8, to the steps or frames of the
            clip.
        cast_errors: Name of each stream of frames to what the cast into the output dtype cost.
    """

    row_id: str
    plan_row_id: str
    channel: int
    seconds: float
    facts: Mapping[str, Scalar]
    extra: Mapping[str, Any]
    streams: Mapping[str, Values] = field(repr=False)
    steps: Mapping[str, int] = field(default_factory=dict)
    cast_errors: Mapping[str, CastError] = field(default_factory=dict)


@dataclass(frozen=True)
class QuarantineRow:
    """One row that could not be processed.

    Args:
        row_id: A plan row id, or `<plan row id>#ch<k>` where only one channel failed.
        uri: Where the audio was.
        stage: fetch, decode, channels, resample, extract or worker.
        error_class: Snake-case name of the reason.
        message: Expected, got, what to do.
        attempts: How often it was tried.
    """

    row_id: str
    uri: str
    stage: str
    error_class: str
    message: str
    attempts: int


@dataclass(frozen=True)
class OutFile(Strict):
    """One published file: path relative to the root, bytes, and sha256 of the content."""

    path: str
    bytes: int
    sha256: str
