"""Values of a stream in memory or in a file, their cast to the job's dtype, and the way back.

A row of hours has hundreds of megabytes of features, so `Spilled` holds the values of a long row in
a file without a name, which goes with the object or the process.

float16 holds 11 bits from 6.1e-5 to 65504, and values below 3e-8 are 0. Hair cells, in units of
their input, lie around 1e-4 at 65 dB SPL and 1e-9 in pauses. Their streams are divided by a power
of two, `StreamInfo.scale_factor`, which follows from the stream's unit.

    int8  = block*                            of BLOCK_FRAMES frames, the last may have fewer
    block = low high frame{1..64}             each a row of int8, one number a column
    scale = bfloat16, low and high byte       the smallest with |value| / scale <= 127, rounded up
    value = frame * scale                     exact in float32

So a clip of n frames has n + 2 ceil(n / 64) stored rows, and a block is read by itself. A value is
off by at most half a scale: 1/252 of the largest of its column in its block.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import (
    CommitError,
    DtypeRangeError,
    NonFiniteFeatureError,
    SpillError,
)
from earmill.pipeline.common.gathering import gathered

# Bytes that are read from a file of values or written to it at a time.
PIECE_BYTES = 4 * 2**20
# Small arrays are joined up to this many bytes: a call of numpy costs as much as 10 kB of work.
JOINED_BYTES = 2**18

INT8 = "int8"
# Layout of streams with one row a clip, which is stored in float32 whatever the job's dtype is.
CLIP = "clip"
BLOCK_FRAMES = 64
SCALE_ROWS = 2
BLOCK_ROWS = SCALE_ROWS + BLOCK_FRAMES
LARGEST = 127
HALF_BITS = 16  # bfloat16 is the upper half of a float32.
# Scale factor by unit. Largest values at 120 dB SPL: 10 in an input of "rms1=100dB" (the scale
# allows 32), 0.1 V of a hair cell (1 V), 40 sone/Cam (255).
FLOAT16_SCALES = {"input unit": 2.0**-11, "V": 2.0**-16, "sone/Cam": 2.0**-8}

Frames = NDArray[Any]
Float32Frames = NDArray[np.float32]


class Spilled:
    """An array (n, width) in a temporary file, which grows at its end and is read in slices."""

    ndim = 2

    def __init__(self, dtype: npt.DTypeLike, width: int, folder: str | None = None) -> None:
        self.dtype, self._width, self._length = np.dtype(dtype), width, 0
        self._folder = folder if folder and os.path.isdir(folder) else tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        weakref.finalize(self, self._file.close)

    @property
    def shape(self) -> tuple[int, int]:
        return self._length, self._width

    @property
    def nbytes(self) -> int:
        return self._length * self._width * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def append(self, block: Frames) -> None:
        """Add (n, width) values of the same dtype; a SpillError if there is no room."""
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

    def __getitem__(self, rows: slice) -> Frames:
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


Values = Frames | Spilled


def sliced(values: Values, size: int) -> Iterator[Frames]:
    """Return the values in blocks of `size` rows; the last block may have fewer."""
    return (values[start : start + size] for start in range(0, len(values), size))


def pieces(values: Values) -> Iterator[Frames]:
    """Return the values in blocks: an array whole, a file in pieces of `PIECE_BYTES`."""
    if not isinstance(values, Spilled):
        return iter([values])
    return sliced(values, max(1, PIECE_BYTES // max(1, values.shape[1] * values.dtype.itemsize)))


def join(blocks: Sequence[Frames]) -> Frames:
    """Return blocks (n, width) as one, without a copy if there is one."""
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def joined_pieces(rows: Iterable[Values]) -> Iterator[Frames]:
    """Yield the values of all rows in blocks; a block holds about `JOINED_BYTES` of small rows."""
    every = chain.from_iterable(map(pieces, rows))
    return map(join, gathered(every, attrgetter("nbytes"), JOINED_BYTES))


def converted(values: Frames, dtype: np.dtype[Any], scale: float = 1.0) -> Frames:
    """Return stored values times their scale in another type, or as they are if nothing changes."""
    if scale == 1.0 and values.dtype == dtype:
        return values
    found = np.empty(values.shape, dtype)
    convert_into(found, values, scale)
    return found


def convert_into(into: Frames, values: Frames, scale: float = 1.0) -> None:
    """Fill an array in C order with values times their scale, rounded once."""
    widens = values.dtype == np.float16 and into.dtype == np.float32
    widen = _compiled_widen() if widens else None
    if widen is not None:
        widen(values, into, scale)
    elif scale == 1.0:
        into[...] = values
    else:
        exact = np.result_type(values.dtype, np.float32, into.dtype)
        np.multiply(values, exact.type(scale), out=into, dtype=exact)


@lru_cache(maxsize=1)
def _compiled_widen() -> Callable[[Frames, Frames, float], None] | None:
    """Return the conversion of float16 to float32 that numba compiles, with numpy's bits at a
    multiple of its speed; None where numba is missing."""
    try:
        # Imported here: it loads a compiler.
        from earmill.pipeline.formats.half import widen
    except ImportError:
        return None
    return widen


@dataclass(frozen=True)
class CastError:
    """Errors of the cast of a stream.

    Args:
        worst: Largest relative error of the values that stayed above zero.
        worst_normal: Largest relative error in the range where float16 has all its bits.
        nonzero, below, zeroed: Numbers of values not zero, below that range, and made zero.
    """

    worst: float = 0.0
    worst_normal: float = 0.0
    nonzero: int = 0
    below: int = 0
    zeroed: int = 0

    @classmethod
    def of_all(cls, errors: Sequence[CastError]) -> CastError:
        worst, worst_normal, *counts = zip(*map(astuple, errors), strict=True)
        return cls(max(worst), max(worst_normal), *map(sum, counts))


def total(parts: Iterable[Mapping[str, CastError]]) -> dict[str, CastError]:
    by_name: dict[str, list[CastError]] = {}
    for part in parts:
        for name, error in part.items():
            by_name.setdefault(name, []).append(error)
    return {name: CastError.of_all(errors) for name, errors in by_name.items()}


def as_stored(streams: Iterable[StreamInfo], dtype: str) -> list[StreamInfo]:
    """Return the streams with the scale and the layout in which they are stored."""
    known = []
    for info in streams:
        if info.layout == "frames" and not info.frame_rate_hz:
            info = replace(info, layout=CLIP)
        elif info.layout == "frames" and dtype == "float16":
            info = replace(info, scale_factor=FLOAT16_SCALES.get(info.unit, 1.0))
        elif info.layout == "frames" and dtype == INT8:
            info = replace(info, layout=INT8)
        known.append(info)
    return known


class Caster:
    """Casts the frames of a job's streams, which are given as they are stored, see `as_stored`."""

    def __init__(self, dtype: npt.DTypeLike, streams: Iterable[StreamInfo] = ()) -> None:
        known = [*streams]
        # Streams of an int8 job that are not stored in blocks are float32.
        self.dtype = np.dtype(np.float32 if np.dtype(dtype) == INT8 else dtype)
        self._scales = {info.name: info.scale_factor for info in known}
        self._clips = frozenset(info.name for info in known if info.layout == CLIP)
        #: Streams whose frames are stored in blocks that share a scale.
        self.in_blocks = frozenset(info.name for info in known if info.layout == INT8)

    def __call__(self, name: str, frames: Frames) -> tuple[Frames, CastError]:
        """Return stored frames and the error of the cast; RowError for frames that do not fit."""
        scale = self._scales.get(name, 1.0)
        # One pass over the values decides both; NaN and infinity spread through min and max.
        low, high = (float(frames.min()), float(frames.max())) if frames.size else (0.0, 0.0)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteFeatureError(f"stream {name}: the model returned NaN or infinity")
        dtype = np.dtype(np.float32) if name in self._clips else self.dtype
        limit = float(np.finfo(dtype).max) * scale
        if max(-low, high) > limit:
            raise DtypeRangeError(
                f"stream {name}: expected values up to {limit:g} for {dtype}, got "
                f"{low if -low > high else high:g}; use output.dtype float32"
            )
        if name in self.in_blocks:
            return quantised(frames), CastError()
        if dtype == np.float16:
            return halved(frames, 1.0 / scale)
        scaled = frames if scale == 1.0 else frames * frames.dtype.type(1.0 / scale)
        return scaled.astype(dtype, copy=False), CastError()


def halved(frames: Frames, factor: float) -> tuple[Frames, CastError]:
    """Return the frames times a power of two in float16, and the error of the cast."""
    # Imported here: it loads a compiler.
    from earmill.pipeline.formats.half import narrow

    cast = np.empty(frames.shape, np.float16)
    if frames.dtype == np.float32:
        return cast, CastError(*narrow(frames, cast, factor))
    wanted = frames * frames.dtype.type(factor)
    cast[...] = wanted
    return cast, cast_error(wanted, cast)


def cast_error(wanted: Frames, cast: Frames) -> CastError:
    size = np.abs(wanted)
    kept, normal = cast != 0, size >= np.finfo(cast.dtype).smallest_normal
    # The error of a zero is 0, whatever divides it.
    relative = np.abs(cast.astype(wanted.dtype) - wanted)
    relative /= np.maximum(size, np.finfo(wanted.dtype).tiny)
    # Normal values are never zeroed, and zeroed values were not zero.
    nonzero = int(np.count_nonzero(size))
    return CastError(
        worst=float(relative.max(initial=0.0, where=kept)),
        worst_normal=float(relative.max(initial=0.0, where=normal)),
        nonzero=nonzero,
        below=nonzero - int(np.count_nonzero(normal)),
        zeroed=nonzero - int(np.count_nonzero(kept)),
    )


def stored_rows(n_frames: int) -> int:
    """Return how many rows in int8 a clip of `n_frames` frames has."""
    return n_frames + SCALE_ROWS * -(-n_frames // BLOCK_FRAMES)


def quantised(frames: Frames) -> NDArray[np.int8]:
    """Encode finite frames (n, columns) in int8; the first frame begins a block."""
    frames = np.asarray(frames, np.float32)
    blocks, low_bits = _in_blocks(frames, BLOCK_FRAMES), np.uint32(2**HALF_BITS - 1)
    rows = np.empty((len(blocks), BLOCK_ROWS, frames.shape[1]), np.int8)
    exact = np.abs(blocks).max(axis=1) / np.float32(LARGEST)
    # Rounded up to bfloat16. Numbers from 0 on are in the order of their bits.
    bits = (np.ascontiguousarray(exact).view(np.uint32) + low_bits) & ~low_bits
    scale, upper = bits.view(np.float32), bits >> HALF_BITS
    rows[:, 0] = upper.astype(np.uint8).view(np.int8)
    rows[:, 1] = (upper >> 8).astype(np.uint8).view(np.int8)
    # Zeros stay zeros whatever they are divided by.
    scaled = blocks / np.where(scale > 0, scale, 1)[:, None]
    rows[:, SCALE_ROWS:] = np.rint(scaled, out=scaled)
    return rows.reshape(-1, frames.shape[1])[: stored_rows(len(frames))]


def dequantised(rows: Frames) -> Float32Frames:
    """Decode the frames of rows in int8 that begin with a block; a CommitError for bad scales."""
    blocks = _in_blocks(rows, BLOCK_ROWS)
    low, high = (blocks[:, place].view(np.uint8).astype(np.uint32) for place in (0, 1))
    scale = ((high << 8 | low) << HALF_BITS).view(np.float32)
    if not np.isfinite(scale).all():
        raise CommitError(
            "expected finite scales of a block in int8, got others: the file is damaged or not "
            "what was committed; run `earmill verify`"
        )
    frames: Float32Frames = blocks[:, SCALE_ROWS:] * scale[:, None]
    return frames.reshape(-1, rows.shape[1])[: max(0, len(rows) - SCALE_ROWS * len(blocks))]


def _in_blocks(rows: Frames, size: int) -> Frames:
    """Return rows as (block, row, column); zeros fill the last block."""
    if missing := -len(rows) % size:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)])
    return rows.reshape(-1, size, rows.shape[1])
