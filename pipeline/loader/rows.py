"""A clip with its features, the interface of a set of rows, and their text forms."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.text import cut, one_line
from earmill.pipeline.loader.epoch_order import Rows

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


def short(value: object) -> str:
    """A value as one line of bounded length, without control characters."""
    return cut(one_line(str(value)))


def values_text(values: Any) -> str:
    """Shape and type of the features of a stream: of an array, a tensor, or events."""
    if hasattr(values, "n_channels"):
        return f"{len(values.frame)} events, {values.n_frames} steps, {values.n_channels} neurons"
    shape = ", ".join(str(n) for n in values.shape)
    return f"({shape}) {str(values.dtype).removeprefix('torch.')}"


def line(kind: str, name: str, parts: Iterable[str]) -> str:
    """`<kind name: part, part>`."""
    return f"<{kind} {name}: {'; '.join(part for part in parts if part)}>"


def streams_text(streams: Mapping[str, str]) -> str:
    """Join the names of streams and their descriptions."""
    return ", ".join(f"{short(name)} {text}" for name, text in streams.items())


def names_text(what: str, names: Iterable[str]) -> str:
    """`what: name, name`; empty where there are none."""
    found = ", ".join(map(short, names))
    return f"{what}: {found}" if found else ""


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """HTML of a titled table; every text is escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(short(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def set_table(title: str, streams: Mapping[str, StreamInfo]) -> str:
    """HTML of the streams of a set."""
    header = ("stream", "model", "columns", "frames a second", "unit")
    rows = (
        (name, info.model, info.width, f"{info.frame_rate_hz:g}", info.unit)
        for name, info in streams.items()
    )
    return table(title, header, rows)


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
        streams = {name: values_text(values) for name, values in self.features.items()}
        parts = [
            f"{self.seconds:.6g} s" + (f", from {self.start_s:.6g} s" if self.start_s else ""),
            streams_text(streams),
            "" if self.label is None else f"label {short(self.label)}",
            names_text("extra", self.extra),
        ]
        return line("Row", f"{self.index} {short(self.row_id)!r}", parts)

    def _repr_html_(self) -> str:
        """A table of the streams and of the source's columns, for notebooks."""
        rows: list[tuple[object, object]] = [
            (name, values_text(values)) for name, values in self.features.items()
        ]
        rows += [(f"extra {name}", value) for name, value in self.extra.items()]
        title = f"Row {self.index}: {short(self.row_id)}, {self.seconds:.6g} s"
        return table(title, ("", ""), rows)

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
