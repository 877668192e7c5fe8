"""Random crops of clips for training: the same time span of all streams.

A crop begins on a frame of the slowest stream. Streams whose rates are multiples of its rate always
give the same number of frames; other streams may give one more or less. The begin is a function of
(seed, pass, row). A clip that is shorter than the crop is read whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.formats.stream_layout import FRAME_EPSILON, layout_of
from earmill.pipeline.loader.epoch_order import Rows, check_number, unit
from earmill.pipeline.loader.rows import FeatureRows, Span

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Crop:
    """A time span of each clip.

    Args:
        seconds: Length, s, above 0.
        start_s: Begin in every clip, s; earlier if the clip would end before the crop does.
            None draws a begin for each row in each epoch.
    """

    seconds: float
    start_s: float | None = None

    def __post_init__(self) -> None:
        given = {"seconds": self.seconds, "start_s": 0 if self.start_s is None else self.start_s}
        for name, value in given.items():
            if not 0 <= check_number(f"Crop: {name}", value, "a number of seconds") < math.inf:
                raise ValueError(f"Crop: {name} must be seconds from 0, got {value!r}")
        if self.seconds == 0:
            raise ValueError("Crop: seconds must be above 0, got 0")


class Cropper:
    """Crops of the rows of one feature set."""

    def __init__(self, crop: Crop, features: FeatureRows, seed: int) -> None:
        rates = [info.frame_rate_hz for info in features.streams.values() if info.frame_rate_hz]
        if not rates:
            raise ValueError(
                f"expected a stream with frames in time to crop, got {list(features.streams)}; "
                "leave out crop="
            )
        self.seconds, self._start_s = crop.seconds, crop.start_s
        self._seed, self._rate_hz = seed, min(rates)
        self._n_frames = self.frames_at(self._rate_hz)
        table = features.table
        # A clip that is no longer in its slowest stream may be longer in another stream.
        self._fits = np.ones(len(table), np.bool_)
        for info in features.streams.values():
            frames = np.asarray(table.column(layout_of(info).length_column).to_numpy())
            if info.frame_rate_hz:
                self._fits &= frames <= self.frames_at(info.frame_rate_hz)
            if info.frame_rate_hz == self._rate_hz:
                self._frames = frames

    def frames_at(self, rate_hz: float) -> int:
        """Return the frames of a crop in a stream of this rate."""
        return max(1, math.ceil(self.seconds * rate_hz - FRAME_EPSILON))

    def most_frames_at(self, rate_hz: float) -> int:
        """Return the maximum frames: one more if crops do not begin on frames of the stream."""
        return self.frames_at(rate_hz) + (rate_hz % self._rate_hz != 0)

    def spans_s(self, rows: Rows, passes: Rows) -> list[Span | None]:
        """Return begin and end of the crop of each row, s; None reads the whole clip."""
        latest = np.maximum(self._frames[rows] - self._n_frames, 0)
        if self._start_s is None:
            drawn = uniform(self._seed, rows, passes)
            frame = np.minimum(drawn * (latest + 1), latest).astype(np.int64)
        else:
            wanted = math.floor(self._start_s * self._rate_hz + FRAME_EPSILON)
            frame = np.minimum(wanted, latest)
        starts = (frame / self._rate_hz).tolist()
        return [
            None if fits else (start, start + self.seconds)
            for start, fits in zip(starts, self._fits[rows].tolist(), strict=True)
        ]


def uniform(seed: int, rows: Rows, passes: Rows) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, pass, row), exact on every machine: SplitMix64 of
    Steele, Lea and Flood 2014 (doi:10.1145/2660193.2660195)."""
    state = _mixed(np.full(len(rows), seed, np.uint64))
    for part in (passes, rows):
        state = _mixed(state + (part.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return unit(state)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
