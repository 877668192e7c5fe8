"""One clip as a feature set gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One clip with its features.

    Args:
        index: Position in the dataset.
        row_id: Unique name.
        seconds: Duration of the whole clip, also in a slice.
        extra: The source's own columns.
        features: Stream name to (n_frames, width), or to `SpikeEvents` for a stream
            of events.
        first_frame: Stream name to where the features start in the clip; not 0 only in a slice.
        start_s: Where the slice was asked to start, s; 0 in a whole clip.
        set: Number of the set that the row is from, where several are read as one.
    """

    index: int
    row_id: str
    seconds: float
    extra: Mapping[str, Any]
    features: Mapping[str, Any] = field(repr=False)
    first_frame: Mapping[str, int]
    start_s: float = 0.0
    set: int = 0

    def map(self, f: Callable[[Any], Any]) -> Row:
        """The same row with `f` applied to each stream's features."""
        return replace(self, features={name: f(value) for name, value in self.features.items()})
