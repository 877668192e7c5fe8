"""Frames into the output dtype: checked, scaled where float16 needs it, and the error counted.

float16 holds 11 bits from 6.1e-5 to 65504; below that it loses bits, and below 3e-8 everything.
Hair cells in units of their input lie around 1e-4 at 65 dB SPL and at 1e-9 in pauses. Such streams
are stored divided by a power of two, `StreamInfo.scale_factor`, which costs no bit; readers
multiply by it. It follows from the stream's unit alone, so that every attempt writes equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from earmill.pipeline.common.errors import DtypeRangeError, NonFiniteFeatureError
from earmill.pipeline.formats.int8_rows import INT8, quantised

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

Frames = npt.NDArray[Any]
# Unit to scale factor, by what the unit can reach at 120 dB SPL and more: 10 in an input of
# "rms1=100dB" (held: 32), 0.1 V of a hair cell (1 V), 40 sone/Cam (255).
FLOAT16_SCALES = {"input unit": 2.0**-11, "V": 2.0**-16, "sone/Cam": 2.0**-8}


def as_stored(streams: Iterable[StreamInfo], dtype: str) -> list[StreamInfo]:
    """The streams with the scale and the layout they are stored with."""
    return [_as_stored(info, dtype) if info.layout == "frames" else info for info in streams]


def _as_stored(info: StreamInfo, dtype: str) -> StreamInfo:
    if dtype == "float16":
        return replace(info, scale_factor=FLOAT16_SCALES.get(info.unit, 1.0))
    # One frame a clip has nothing to share a scale with.
    return replace(info, layout=INT8) if dtype == INT8 and info.frame_rate_hz else info


@dataclass(frozen=True)
class CastError:
    """What the cast of a stream did to its values.

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
        """As plain values."""
        return asdict(self)


def total(parts: Iterable[Mapping[str, CastError]]) -> dict[str, CastError]:
    """Errors of several rows or stretches together, by stream."""
    whole: dict[str, CastError] = {}
    for part in parts:
        for name, error in part.items():
            whole[name] = whole.get(name, CastError()) + error
    return whole


class Caster:
    """Casts the frames of a job's streams.

    Args:
        dtype: Of the output. streams: As they are stored, see `as_stored`.
    """

    def __init__(self, dtype: npt.DTypeLike, streams: Iterable[StreamInfo] = ()) -> None:
        known = [*streams]
        # What is left of a job in int8 once blocks have their scales.
        self.dtype = np.dtype(np.float32 if np.dtype(dtype) == INT8 else dtype)
        self._scales = {info.name: info.scale_factor for info in known}
        self._in_blocks = {info.name for info in known if info.layout == INT8}

    def in_blocks(self, name: str) -> bool:
        """Whether frames of a stream share a scale with those around them, in whole blocks."""
        return name in self._in_blocks

    def __call__(self, name: str, frames: Frames) -> tuple[Frames, CastError]:
        """Frames as they are stored, and what that cost; a RowError where it cannot be."""
        scale = self._scales.get(name, 1.0)
        check_range(name, frames, self.dtype, scale)
        if name in self._in_blocks:
            return quantised(frames), CastError()
        if self.dtype == np.float16:
            return halved(frames, 1.0 / scale)
        scaled = frames if scale == 1.0 else frames * frames.dtype.type(1.0 / scale)
        return scaled.astype(self.dtype, copy=False), CastError()


def check_range(name: str, frames: Frames, dtype: np.dtype[Any], scale: float) -> None:
    """A RowError where features are not finite or do not fit."""
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
    """The frames times a power of two in float16, and what that cost."""
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
    """How far `cast` lies from `wanted`, relative to it."""
    size = np.abs(wanted)
    kept, normal = cast != 0, size >= np.finfo(cast.dtype).smallest_normal
    # Nothing of a zero is lost: any divisor will do.
    relative = np.abs(cast.astype(wanted.dtype) - wanted)
    relative /= np.maximum(size, np.finfo(wanted.dtype).tiny)
    # What is normal is kept, and what is kept is there.
    nonzero = int(np.count_nonzero(size))
    return CastError(
        worst=float(relative.max(initial=0.0, where=kept)),
        worst_normal=float(relative.max(initial=0.0, where=normal)),
        nonzero=nonzero,
        below=nonzero - int(np.count_nonzero(normal)),
        zeroed=nonzero - int(np.count_nonzero(kept)),
    )
