"""What a model made of a clip, on its way into a row: checked, cast, joined.

A stream is an array of frames, or the events of a clip (`amtcore.spikes.SpikeEvents`). Frames are
cast to the output dtype once they are known to fit; events become a table of whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import DtypeRangeError, NonFiniteFeatureError

Frames = npt.NDArray[Any]
# Stream name to frames, or to the events of a stretch.
Made = Mapping[str, Any]


def checked(name: str, made: Any, dtype: np.dtype[Any]) -> Any:
    """A stretch of a stream, ready to be kept: frames in the output dtype, events as they are."""
    return checked_cast(name, made, dtype) if isinstance(made, np.ndarray) else made


def joined(parts: Sequence[Any]) -> Any:
    """The stretches of a stream as one."""
    first = parts[0]
    return np.concatenate(parts) if isinstance(first, np.ndarray) else first.concatenate(parts)


def stored(made: Made, dtype: np.dtype[Any]) -> tuple[dict[str, Frames], dict[str, int]]:
    """Streams as `FeatureRow.streams` has them, and the steps of those that are events."""
    streams: dict[str, Frames] = {}
    steps: dict[str, int] = {}
    for name, values in made.items():
        if isinstance(values, np.ndarray):
            streams[name] = checked_cast(name, values, dtype)
            continue
        try:
            streams[name] = values.to_columns()
        except ValueError as error:
            raise DtypeRangeError(f"stream {name}: {error}") from error
        steps[name] = values.n_frames
    return streams, steps


def checked_cast(name: str, frames: Frames, dtype: np.dtype[Any]) -> Frames:
    """Features in the output dtype; a RowError where they are not finite or do not fit."""
    # One pass over the values decides both; NaN and infinity spread through min and max.
    low, high = (float(frames.min()), float(frames.max())) if frames.size else (0.0, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise NonFiniteFeatureError(f"stream {name}: the model returned NaN or infinity")
    limit = float(np.finfo(dtype).max)
    if max(-low, high) > limit:
        raise DtypeRangeError(
            f"stream {name}: expected values up to {limit:g} for {dtype}, got "
            f"{low if -low > high else high:g}; use output.dtype float32"
        )
    return frames.astype(dtype, copy=False)
