"""Output dtypes: float16 with checks and scales, int8 with a scale for every column of a block.

float16 holds 11 bits from 6.1e-5 to 65504. Smaller values lose bits, and values below 3e-8 are 0.
Hair cells in units of their input lie around 1e-4 at 65 dB SPL and at 1e-9 in pauses. Their streams
are stored divided by a power of two, `StreamInfo.scale_factor`, which costs no bit. Readers
multiply by the factor. The factor follows from the stream's unit, so every attempt writes equal
bytes.

int8 takes half the space of float16.

    clip  = block*                            of BLOCK_FRAMES frames, the last may have fewer
    block = low high frame{1..64}             each a row of int8, one number a column
    scale = bfloat16, low and high byte       the smallest with |value| / scale <= 127, rounded up
    value = frame * scale                     exact in float32

So a clip of n frames has n + 2 ceil(n / 64) stored rows, which any format holds like frames, and a
block is read by itself. A value is off by at most half a scale: 1/252 of the largest of its column
in its block. `python -m benchmarks.int8` measures the error of each stream on speech.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError, DtypeRangeError, NonFiniteFeatureError
from earmill.pipeline.formats.rows import CastError, Values

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

INT8 = "int8"
BLOCK_FRAMES = 64
SCALE_ROWS = 2
BLOCK_ROWS = SCALE_ROWS + BLOCK_FRAMES
LARGEST = 127
# bfloat16 is the upper half of a float32.
HALF_BITS = 16

Int8Rows = NDArray[np.int8]
Float32Frames = NDArray[np.float32]


def stored_rows(n_frames: int) -> int:
    """Return how many stored rows a clip of `n_frames` frames has."""
    return n_frames + SCALE_ROWS * -(-n_frames // BLOCK_FRAMES)


def quantised(frames: NDArray[Any]) -> Int8Rows:
    """Encode finite frames (n, columns) as stored rows; the first frame begins a block."""
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


def dequantised(rows: NDArray[Any]) -> Float32Frames:
    """Decode the frames of stored rows; the first row begins a block.

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


def _rounded_up(values: Float32Frames) -> Float32Frames:
    """Round values from 0 on up to bfloat16, as float32."""
    bits = np.ascontiguousarray(values).view(np.uint32) + np.uint32(2**HALF_BITS - 1)
    return (bits & ~np.uint32(2**HALF_BITS - 1)).view(np.float32)


def _equal_blocks(
    whole: NDArray[Any], size: int, into: NDArray[Any], into_size: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield both as (block, row, column): first the full blocks, then a shorter last one."""
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
) -> Float32Frames:
    """Read frames [first, last) of a clip.

    Args:
        read: Reads stored rows [first, last) of the clip.
        n_stored: Stored rows of the clip.
        n_frames: Frames of the clip.
        span: First frame, and the frame after the last.
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
    """The frames of a clip that is stored in int8; slices are decoded when they are taken.

    Args:
        rows: All stored rows of the clip.
        n_frames: Frames of the clip.
    """

    def __init__(self, rows: Values, n_frames: int) -> None:
        self._rows, self._n_frames = rows, n_frames

    def __len__(self) -> int:
        return self._n_frames

    def __getitem__(self, frames: slice) -> Float32Frames:
        first, last, _ = frames.indices(self._n_frames)
        n_stored = len(self._rows)
        return read_frames(
            lambda start, stop: np.asarray(self._rows[start:stop]),
            n_stored=n_stored,
            n_frames=self._n_frames,
            span=(first, max(first, last)),
        )


Frames = npt.NDArray[Any]
# Scale factor by unit. Largest values at 120 dB SPL: 10 in an input of "rms1=100dB" (the scale
# allows 32), 0.1 V of a hair cell (1 V), 40 sone/Cam (255).
FLOAT16_SCALES = {"input unit": 2.0**-11, "V": 2.0**-16, "sone/Cam": 2.0**-8}


def as_stored(streams: Iterable[StreamInfo], dtype: str) -> list[StreamInfo]:
    """Return the streams with the scale and the layout in which they are stored."""
    return [_as_stored(info, dtype) if info.layout == "frames" else info for info in streams]


def _as_stored(info: StreamInfo, dtype: str) -> StreamInfo:
    if dtype == "float16":
        return replace(info, scale_factor=FLOAT16_SCALES.get(info.unit, 1.0))
    # One frame a clip has nothing to share a scale with.
    return replace(info, layout=INT8) if dtype == INT8 and info.frame_rate_hz else info


class Caster:
    """Casts the frames of a job's streams.

    Args:
        dtype: Type of the output.
        streams: The streams as they are stored, see `as_stored`.
    """

    def __init__(self, dtype: npt.DTypeLike, streams: Iterable[StreamInfo] = ()) -> None:
        known = [*streams]
        # Streams of an int8 job that are not stored in blocks are float32.
        self.dtype = np.dtype(np.float32 if np.dtype(dtype) == INT8 else dtype)
        self._scales = {info.name: info.scale_factor for info in known}
        self._in_blocks = {info.name for info in known if info.layout == INT8}

    def in_blocks(self, name: str) -> bool:
        """Return True if the frames of a stream are stored in blocks that share a scale."""
        return name in self._in_blocks

    def __call__(self, name: str, frames: Frames) -> tuple[Frames, CastError]:
        """Return stored frames, and the error of the cast; a RowError if frames do not fit."""
        scale = self._scales.get(name, 1.0)
        check_range(name, frames, self.dtype, scale)
        if name in self._in_blocks:
            return quantised(frames), CastError()
        if self.dtype == np.float16:
            return halved(frames, 1.0 / scale)
        scaled = frames if scale == 1.0 else frames * frames.dtype.type(1.0 / scale)
        return scaled.astype(self.dtype, copy=False), CastError()


def check_range(name: str, frames: Frames, dtype: np.dtype[Any], scale: float) -> None:
    """Raise a RowError if features are not finite or do not fit."""
    # One pass over the values decides both; NaN and infinity spread through min and max.
    low, high = (float(frames.min()), float(frames.max())) if frames.size else (0.0, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise NonFiniteFeatureError(f"stream {name}: the model returned NaN or infinity")
    limit = float(np.finfo(dtype).max) * scale
    if max(-low, high) > limit:
        raise DtypeRangeError(
            f"stream {name}: expected values up to {limit:g} for {dtype}, got "
            f"{low if -low > high else high:g}; use output.dtype float32"
        )


def halved(frames: Frames, factor: float) -> tuple[Frames, CastError]:
    """Return the frames times a power of two in float16, and the error of the cast."""
    # Here, so that whoever casts nothing pays for no compiler.
    from amtcore.kernels.vector.half import narrow

    cast = np.empty(frames.shape, np.float16)
    if frames.dtype == np.float32:
        worst, worst_normal, nonzero, normal, kept = narrow(frames, cast, factor)
        return cast, CastError(worst, worst_normal, nonzero, nonzero - normal, nonzero - kept)
    wanted = frames * frames.dtype.type(factor)
    cast[...] = wanted
    return cast, cast_error(wanted, cast)


def cast_error(wanted: Frames, cast: Frames) -> CastError:
    """Return the error of `cast`, relative to `wanted`."""
    size = np.abs(wanted)
    kept, normal = cast != 0, size >= np.finfo(cast.dtype).smallest_normal
    # Nothing of a zero is lost: any divisor will do.
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
