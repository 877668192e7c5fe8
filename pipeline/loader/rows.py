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

# Begin and end of a span of a clip, s.
Span = tuple[float, float]


def short(value: object) -> str:
    """Return a value as one line of bounded length, without control characters."""
    return cut(one_line(str(value)))


def values_text(values: Any) -> str:
    """Return shape and type of the features of a stream: an array, a tensor, or events."""
    if hasattr(values, "n_channels"):
        return f"{len(values.frame)} events, {values.n_frames} steps, {values.n_channels} neurons"
    shape = ", ".join(str(n) for n in values.shape)
    return f"({shape}) {str(values.dtype).removeprefix('torch.')}"


def line(kind: str, name: str, parts: Iterable[str]) -> str:
    """Return `<kind name: part; part>`."""
    return f"<{kind} {name}: {'; '.join(part for part in parts if part)}>"


def streams_text(streams: Mapping[str, str]) -> str:
    """Join the names of streams and their descriptions."""
    return ", ".join(f"{short(name)} {text}" for name, text in streams.items())


def names_text(what: str, names: Iterable[str]) -> str:
    """Return `what: name, name`; empty text if there are no names."""
    found = ", ".join(map(short, names))
    return f"{what}: {found}" if found else ""


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the HTML of a titled table; every text is escaped."""
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
    """Return the HTML of the streams of a set."""
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
        extra: Columns of the source.
        features: By stream (n_frames, width), or `SpikeEvents` for a stream of events.
        first_frame: By stream the first frame of the features in the clip; 0 except in a slice.
        start_s: Requested start of the slice, s; 0 in a whole clip.
        set: Number of the set, if several sets are read as one.
        label: Value of the label column of a torch dataset.
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
        """Return one line: length, shape of each stream, names of the source's columns."""
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
        """Return the row with `f` applied to the features of each stream."""
        return replace(self, features={name: f(value) for name, value in self.features.items()})


class FeatureRows(Protocol):
    """The interface of a set of rows: rows by number, and the blocks of a shuffled order."""

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
        """Changes when the set changes."""

    @property
    def table(self) -> pa.Table:
        """One line for each row, in order."""

    @property
    def is_local(self) -> bool:
        """True if the set lies on this machine or in a mounted file system."""

    @property
    def mixture(self) -> tuple[int, ...] | None:
        """Rows of each set in an epoch, if sets are mixed by weight; else None."""

    def block_rows(self) -> np.ndarray:
        """Return the rows per row group, in order; rows of a group are cheap to read together."""

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and each row's pass."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        """Return a row by number."""

    def prefetch(self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None) -> None:
        """Name the rows, or spans of rows, that are read next, in order; this changes no result."""

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a span of a row."""

    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span of it; with `copy=False` frames may be a `FrameView`."""
