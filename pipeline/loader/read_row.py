"""One clip as a feature set gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from earmill.pipeline.loader import display


@dataclass(frozen=True, slots=True, repr=False)
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
        label: The column of the source that a torch dataset was told to be the label.
    """

    index: int
    row_id: str
    seconds: float
    extra: Mapping[str, Any]
    features: Mapping[str, Any]
    first_frame: Mapping[str, int]
    start_s: float = 0.0
    set: int = 0
    label: Any = None

    def __repr__(self) -> str:
        """One line: length, shape of each stream, names of the source's columns."""
        streams = {name: display.values_text(values) for name, values in self.features.items()}
        parts = [
            f"{self.seconds:.6g} s" + (f", from {self.start_s:.6g} s" if self.start_s else ""),
            display.streams_text(streams),
            "" if self.label is None else f"label {display.short(self.label)}",
            display.names_text("extra", self.extra),
        ]
        return display.line("Row", f"{self.index} {display.short(self.row_id)!r}", parts)

    def _repr_html_(self) -> str:
        """A table of the streams and of the source's columns, for notebooks."""
        rows: list[tuple[object, object]] = [
            (name, display.values_text(values)) for name, values in self.features.items()
        ]
        rows += [(f"extra {name}", value) for name, value in self.extra.items()]
        title = f"Row {self.index}: {display.short(self.row_id)}, {self.seconds:.6g} s"
        return display.table(title, ("", ""), rows)

    def map(self, f: Callable[[Any], Any]) -> Row:
        """The same row with `f` applied to each stream's features."""
        return replace(self, features={name: f(value) for name, value in self.features.items()})
