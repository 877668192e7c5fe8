"""One clip with its features, and what every set of rows offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.loader import display
from earmill.pipeline.loader.epoch_order import Rows

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


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


class FeatureRows(Protocol):
    """Rows by number, and what a shuffled order of them is made of."""

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream."""

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""

    @property
    def fingerprint(self) -> str:
        """Changes when the set does."""

    @property
    def table(self) -> pa.Table:
        """One line a row, in the order of the rows."""

    @property
    def is_local(self) -> bool:
        """Whether all of it lies in files of this machine, or in what it has mounted."""

    @property
    def mixture(self) -> tuple[int, ...] | None:
        """Rows of each set in an epoch, where sets are mixed by weight; else None."""

    def block_rows(self) -> np.ndarray:
        """Rows per row group, in order: what is cheap to read together."""

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Rows of an epoch in the order of shuffled blocks, and the pass of its set for each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        """Row by number."""

    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[tuple[float, float] | None] | None = None
    ) -> None:
        """Say which rows, or stretches of them, are read next, the first of them now; it changes no
        result."""

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """The frames of a row in a stretch of time."""

    def read_row(
        self, index: int, span_s: tuple[float, float] | None = None, *, copy: bool = True
    ) -> Row:
        """Read a row, or a stretch of it; with `copy=False` frames may be a `FrameView`."""
