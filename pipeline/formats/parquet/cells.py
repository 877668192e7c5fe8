"""Cells of a Parquet file: how the frames of a row are one cell, or the cells of several rows.

    binary   binary                               the numbers, row after row, little endian; the
                                                  field's metadata has columns and dtype, and the
                                                  factor if numbers are not values
    nested   list<fixed_size_list<T>[columns]>    T: halffloat, float, or int32 of events

Bytes decode at the speed of memory; `numpy.frombuffer(cell, "<f2").reshape(-1, columns)` makes
frames of them anywhere. Nested lists show numbers to SQL, but Parquet keeps a level for every
number, which costs twenty times the time. Neither is `arrow.fixed_shape_tensor`, which Hugging Face
datasets refuse. Offsets of 32 bits suffice: a row group has at most 128 MB, or 256 MB if streams
were scaled and are float32 here. The nested form counts frames, not numbers. A file's schema names
its form. Layout versions 1 and 2 have the nested form alone.

`LongRows` divides rows that are too large for one cell over rows of the file that follow each
other. Arrow needs the memory of a cell several times to write or read it. A row with more than
`LIMIT_BYTES` of features therefore lies in several rows of the file, each a row group of its own.
A worker then needs as much memory for three hours as for ten minutes:

    row_id   seconds  modulation_start  modulation_n_frames  modulation
    a.wav    12.5     0                 1250                 ...
    day.flac 86400    1250              135000               frames 0 to 134999
    day.flac 86400    136250            135000               frames 135000 to 269999
    ...

Row id and scalars repeat; each part has its own start and number of frames. The parts' frames are
also in the file's metadata under `PARTS_KEY`, which only such files have.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.format import BINARY, NESTED

MB = 2**20
# About ten minutes of Dau1997.
LIMIT_BYTES = 32 * MB
PART_BYTES = 16 * MB
PARTS_KEY = b"earmill.parts"


def part_count(row_bytes: int) -> int:
    """Return the number of parts of a row with `row_bytes` bytes of features."""
    return 1 if row_bytes <= LIMIT_BYTES else -(-row_bytes // PART_BYTES)


def cut(n_frames: int, parts: int) -> list[tuple[int, int]]:
    """Return frames [first, last) of each part; parts differ by one frame at most."""
    return list(pairwise(n_frames * k // parts for k in range(parts + 1)))


@dataclass(frozen=True)
class LongRows:
    """The divided rows of one file: row of the shard -> stream -> frames of each part."""

    frames: Mapping[int, Mapping[str, Sequence[int]]]

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> LongRows:
        """Read the divided rows from a file's schema metadata.

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
        """Return the metadata for a file's schema."""
        return {PARTS_KEY: json.dumps(self.frames).encode()} if self.frames else {}

    def parts(self, row: int) -> int:
        """Return how many rows of the file a row of the shard has."""
        return len(next(iter(self.frames[row].values()))) if row in self.frames else 1

    def first(self, row: int) -> int:
        """Return the row of the file where a row of the shard starts."""
        return row + sum(self.parts(long) - 1 for long in self.frames if long < row)

    def spans(self, row: int, stream: str, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield parts of frames [first, last) of a divided row: row of the file, first, last."""
        counts = self.frames[row][stream]
        starts = accumulate(counts, initial=0)
        for part, (start, count) in enumerate(zip(starts, counts, strict=False)):
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                yield self.first(row) + part, low, high


# Column of the row ids.
ID_COLUMN = "row_id"
# Keys in the metadata of a binary column.
PREFIX = "earmill."
COLUMNS_KEY, DTYPE_KEY = b"earmill.columns", b"earmill.dtype"
# Levels of a number, or the length of a cell, cost up to 4 bytes.
OVERHEAD_BYTES = 4


class CellEncoding(ABC):
    """A way to store a stream's frames in a column; get one from `cell_encoding`.

    Attributes:
        compression: Codec of the column.
        level: Level of the codec, None if it has no levels.
    """

    compression: ClassVar[str]
    level: ClassVar[int | None]

    @abstractmethod
    def field(
        self, column: str, width: int, dtype: str, attrs: Mapping[str, str] | None = None
    ) -> pa.Field:
        """Name and type of the column.

        Args:
            column: The stream.
            width: Numbers of a stored row.
            dtype: Type of a number.
            attrs: What turns numbers into values, see `StreamLayout.number_attrs`.
        """

    @abstractmethod
    def stored(self, field: pa.Field) -> tuple[int, str]:
        """Return columns and dtype of the frames, as the file states them.

        Raises:
            CommitError: The file does not state them.
        """

    @abstractmethod
    def leaf(self, column: str) -> str:
        """Return the path of the column's numbers in the footer."""

    @abstractmethod
    def cells(self, frames: Sequence[np.ndarray], width: int, dtype: str) -> pa.Array:
        """Encode the frames of some rows as cells; the frames of a single row are not copied."""

    @abstractmethod
    def frames(self, cells: pa.Array, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode all frames of some cells, (frames, width), and the bounds of cells in them, int64.

        Raises:
            CommitError: A cell holds no whole frames, or nothing.
        """

    @abstractmethod
    def limits(self, rows: int, frames: int, width: int, dtype: str) -> tuple[int, int]:
        """Return the limits of the footer's claims: values and bytes of these rows and frames."""


def _named(attrs: Mapping[str, str] | None) -> dict[str, str]:
    return {f"{PREFIX}{name}": text for name, text in (attrs or {}).items()}


def _joined(frames: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """All numbers of some rows, flat."""
    whole = frames[0] if len(frames) == 1 else np.concatenate(frames, axis=0)
    return np.ascontiguousarray(whole, dtype=np.dtype(dtype).newbyteorder("<")).reshape(-1)


def _offsets(sizes: Sequence[int]) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


class BinaryCells(CellEncoding):
    """A cell is the bytes of its frames. lz4 finds what repeats, as in events, and costs nothing
    where nothing does."""

    compression, level = "lz4", None

    def field(
        self, column: str, width: int, dtype: str, attrs: Mapping[str, str] | None = None
    ) -> pa.Field:
        said = {COLUMNS_KEY: str(width), DTYPE_KEY: dtype} | _named(attrs)
        return pa.field(column, pa.binary(), metadata=said)

    def stored(self, field: pa.Field) -> tuple[int, str]:
        try:
            found = field.metadata
            return int(found[COLUMNS_KEY]), np.dtype(found[DTYPE_KEY].decode()).name
        except (TypeError, KeyError, ValueError) as err:
            raise CommitError(
                f"expected a binary column {field.name} that says its columns and its dtype, got "
                f"{field.metadata}; run `earmill verify`"
            ) from err

    def leaf(self, column: str) -> str:
        return column

    def cells(self, frames: Sequence[np.ndarray], width: int, dtype: str) -> pa.Array:
        flat = _joined(frames, dtype)
        frame_bytes = width * flat.itemsize
        offsets = _offsets([len(values) * frame_bytes for values in frames])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat.view(np.uint8))]
        return pa.Array.from_buffers(pa.binary(), len(frames), buffers)

    def frames(self, cells: pa.Array, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        stored = np.dtype(dtype).newbyteorder("<")
        frame_bytes = width * stored.itemsize
        _, places, content = cells.buffers()
        if not len(cells):
            return np.empty((0, width), stored), np.zeros(1, np.int64)
        offsets = np.frombuffer(places, np.int32)[cells.offset : cells.offset + len(cells) + 1]
        offsets = offsets.astype(np.int64)
        if cells.null_count or (np.diff(offsets) % frame_bytes).any():
            raise CommitError(
                f"expected whole frames of {frame_bytes} bytes in every cell: the file is damaged "
                "or not what was committed; run `earmill verify`"
            )
        start, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        flat = np.frombuffer(content or b"", np.uint8, size, start)
        return flat.view(stored).reshape(-1, width), (offsets - start) // frame_bytes

    def limits(self, rows: int, frames: int, width: int, dtype: str) -> tuple[int, int]:
        return rows, frames * width * np.dtype(dtype).itemsize + rows * OVERHEAD_BYTES


class NestedCells(CellEncoding):
    """A cell is a list of frames, each a list of numbers."""

    compression, level = "zstd", 3

    def field(
        self, column: str, width: int, dtype: str, attrs: Mapping[str, str] | None = None
    ) -> pa.Field:
        kind = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), width))
        return pa.field(column, kind, metadata=_named(attrs) or None)

    def stored(self, field: pa.Field) -> tuple[int, str]:
        try:
            frame = field.type.value_type
            return frame.list_size, np.dtype(frame.value_type.to_pandas_dtype()).name
        except (AttributeError, NotImplementedError) as err:
            raise CommitError(
                f"expected lists of frames in {field.name}, got {field.type}; run `earmill verify`"
            ) from err

    def leaf(self, column: str) -> str:
        return f"{column}.list.element.list.element"

    def cells(self, frames: Sequence[np.ndarray], width: int, dtype: str) -> pa.Array:
        blocks = pa.FixedSizeListArray.from_arrays(pa.array(_joined(frames, dtype)), width)
        offsets = _offsets([len(values) for values in frames])
        return pa.ListArray.from_arrays(pa.array(offsets), blocks)

    def frames(self, cells: Any, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        offsets = cells.offsets.to_numpy().astype(np.int64)
        values = cells.flatten().flatten().to_numpy().reshape(-1, width)
        return values, offsets - offsets[0]

    def limits(self, rows: int, frames: int, width: int, dtype: str) -> tuple[int, int]:
        values = frames * width + rows
        return values, values * (np.dtype(dtype).itemsize + OVERHEAD_BYTES)


CELL_ENCODINGS: dict[str, CellEncoding] = {BINARY: BinaryCells(), NESTED: NestedCells()}


def cell_encoding(kind: pa.DataType | None) -> CellEncoding:
    """Return the encoding of a column of a file, by its type."""
    return CELL_ENCODINGS[BINARY if kind == pa.binary() else NESTED]
