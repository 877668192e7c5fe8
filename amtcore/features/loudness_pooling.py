"""Pooling of a loudness model's frames, and one row of numbers per clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from amtcore.features.feature_model import Frames
from amtcore.features.stream_info import StreamInfo
from amtcore.models.loudness import Loudness
from amtcore.scales import PhonTable

SHORT, LONG = "short_term_loudness", "long_term_loudness"
SPECIFIC, SUMMARY = "specific_loudness", "loudness_summary"
#: Numbers of a clip: maxima, and short-term loudness exceeded in 5, 10 and 50 percent of time.
SUMMARY_COLUMNS = ("stl_max", "ltl_max", "n5", "n10", "n50")
EXCEEDED_PERCENT = (5.0, 10.0, 50.0)
_STATISTICS: dict[str, Callable[[Frames], Frames]] = {
    "mean": lambda part: part.mean(0),
    "rms": lambda part: np.sqrt(np.square(part).mean(0)),
    "max": lambda part: part.max(0),
    "subsample": lambda part: part[0],
}


@dataclass(frozen=True)
class StreamPlan:
    """One stream of a loudness model.

    Args:
        info: Description of the stream.
        ratio: Model frames per frame as an exact fraction; None is one row a clip.
        phon: Table to convert sone to phon; None leaves sone.
    """

    info: StreamInfo
    ratio: tuple[int, int] | None
    phon: PhonTable | None

    @property
    def source_width(self) -> int:
        """Columns of `source`."""
        return 2 if self.info.name == SUMMARY else self.info.width

    def n_frames(self, outputs: int) -> int:
        """Return the number of whole frames of `outputs` model frames."""
        if self.ratio is None:
            return min(outputs, 1)
        return outputs * self.ratio[1] // self.ratio[0]

    def source(self, loudness: Loudness) -> Tensor:
        """Return the model's (batch, frame, column); both traces for numbers of a clip."""
        if self.info.name == SPECIFIC:
            return loudness.specific
        if self.info.name == SUMMARY:
            return torch.stack((loudness.short, loudness.long), -1)
        return (loudness.short if self.info.name == SHORT else loudness.long).unsqueeze(-1)

    def pooler(self, pooled: bool = False) -> ClipNumbers | Pooler:
        """Return the last step of the stream for one signal; `pooled` frames are only converted."""
        if self.ratio is None:
            return ClipNumbers(self)
        return Pooler(self, (1, 1) if pooled else self.ratio)

    def finished(self, frames: Frames) -> Frames:
        """Convert frames to the stream's unit."""
        if self.phon is None:
            return frames
        return self.phon.phon(torch.from_numpy(np.ascontiguousarray(frames))).numpy()


class Pooler:
    """Pools the model frames of one clip, in order, to frames of one stream."""

    def __init__(self, plan: StreamPlan, ratio: tuple[int, int]) -> None:
        self._plan, self._ratio = plan, ratio
        self._waiting: list[Frames] = []
        self._first = self._made = 0  # model frame at the head of the waiting, frames made

    def push(self, outputs: Frames, last: bool) -> Frames:
        """Return the frames that these model frames complete."""
        samples, frames = self._ratio
        if samples == frames:
            return self._plan.finished(outputs)
        rows = np.concatenate([*self._waiting, outputs])
        statistic = _STATISTICS[self._plan.info.pool]
        pooled, begin = [], -(-self._made * samples // frames) - self._first
        while (end := -(-(self._made + 1) * samples // frames) - self._first) <= len(rows):
            pooled.append(statistic(rows[begin:end]))
            self._made, begin = self._made + 1, end
        self._waiting, self._first = [rows[begin:]], self._first + begin
        made = np.array(pooled, rows.dtype).reshape(-1, rows.shape[1])
        return self._plan.finished(made)


class ClipNumbers:
    """Reduces both traces of one clip, in order, to one row of numbers."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._short = bytearray()  # grows in place; many small arrays would fragment the memory
        self._long_max = 0.0

    def push(self, outputs: Frames, last: bool) -> Frames:
        """Return the row after the last model frames, and no row before."""
        self._short += outputs[:, 0].tobytes()
        self._long_max = float(np.maximum(self._long_max, outputs[:, 1].max(initial=0.0)))
        if not (last and self._short):
            return np.empty((0, self._plan.info.width), outputs.dtype)
        short = np.frombuffer(self._short, outputs.dtype)
        exceeded = np.quantile(short, [1.0 - percent / 100.0 for percent in EXCEEDED_PERCENT])
        row = np.array([[short.max(), self._long_max, *exceeded]], outputs.dtype)
        return self._plan.finished(row)
