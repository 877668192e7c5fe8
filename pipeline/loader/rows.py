"""A clip with its features, the interface of a set of rows, and their text forms."""

from __future__ import annotations

import html
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.text import cut, one_line
from earmill.pipeline.formats.moments import StreamStatistics
from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows

# Begin and end of a span of a clip, s; an end of infinity is the end of the clip.
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


class Described(ABC):
    """A row or a batch with a short `repr`, and a table for notebooks."""

    __slots__ = ()

    @abstractmethod
    def texts(self) -> tuple[str, str, Mapping[str, str], str, Mapping[str, str]]:
        """Return title, length, shape of each stream, label, and columns of the source."""

    def __repr__(self) -> str:
        """Return `<title: length; stream shape, ...; label value; extra: name, name>`."""
        title, length, streams, label, extra = self.texts()
        shapes = ", ".join(f"{short(name)} {text}" for name, text in streams.items())
        names = ", ".join(map(short, extra))
        parts = [length, shapes, label and f"label {label}", names and f"extra: {names}"]
        return f"<{title}: {'; '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        title, length, streams, label, extra = self.texts()
        rows = [*streams.items(), *([("label", label)] if label else [])]
        rows += [(f"extra {name}", text) for name, text in extra.items()]
        return table(", ".join(filter(None, (title, length))), ("", ""), rows)


@dataclass(frozen=True, slots=True, repr=False)
class Row(Described):
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

    def texts(self) -> tuple[str, str, Mapping[str, str], str, Mapping[str, str]]:
        start = f", from {self.start_s:.6g} s" if self.start_s else ""
        return (
            f"Row {self.index} {short(self.row_id)!r}",
            f"{self.seconds:.6g} s{start}",
            {name: values_text(values) for name, values in self.features.items()},
            "" if self.label is None else short(self.label),
            {name: short(value) for name, value in self.extra.items()},
        )

    def map(self, f: Callable[[Any], Any]) -> Row:
        """Return the row with `f` applied to the features of each stream."""
        return replace(self, features={name: f(value) for name, value in self.features.items()})


class FeatureRows(ABC):
    """The interface of a feature set: a sequence of `Row`, and the blocks of a shuffled order.

    Class `Features` describes the attributes, properties and methods. Attribute `mixture` has the
    rows of each set in an epoch, if sets are mixed by weight.
    """

    streams: Mapping[str, StreamInfo]
    dtypes: Mapping[str, np.dtype]
    mixture: tuple[int, ...] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int: ...
    @property
    @abstractmethod
    def fingerprint(self) -> str: ...
    @property
    @abstractmethod
    def table(self) -> pa.Table: ...
    @property
    @abstractmethod
    def statistics(self) -> dict[str, StreamStatistics]: ...
    @property
    @abstractmethod
    def is_local(self) -> bool: ...
    @abstractmethod
    def block_rows(self) -> np.ndarray: ...
    @abstractmethod
    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[Span | None] | None = None
    ) -> None: ...
    @abstractmethod
    def index_of(self, row_id: str) -> int: ...
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_row(self, index: int, span_s: Span | None = None, *, copy: bool = True) -> Row:
        """Read a row, or a span in s of it. Without `copy`, frames may be views of blocks."""

    @property
    def dtype(self) -> np.dtype:
        """The type of frames; the widest if streams differ, as `dtype="stored"` allows."""
        return np.result_type(*self.dtypes.values())

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch in the order of shuffled blocks, and each row's pass."""
        rows = order.block_order(self.block_rows(), shuffle=shuffle, seed=seed, epoch=epoch)
        return rows, np.full(len(rows), epoch, np.int64)

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Return a row by number; negative numbers count from the end."""
        return self.read_row(self._position(index))

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def by_id(self, row_id: str) -> Row:
        """Return the row of an id; raises as `index_of`."""
        return self[self.index_of(row_id)]

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a row that overlap [start_s, stop_s); only these are fetched.

        Frame k stands for the time from k / frame_rate to (k + 1) / frame_rate, so neighbouring
        slices cut at frame times share no frame. `stop_s` past the end, or None, means the end.
        """
        return self.read_row(self._position(index), (start_s, inf if stop_s is None else stop_s))

    def _position(self, index: SupportsIndex) -> int:
        """Return a row number from 0; negative numbers count from the end."""
        if isinstance(index, str):
            raise TypeError(f"rows are numbered from 0, got {index!r}; use ds.by_id for row ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a feature set with {len(self)} rows")
        return number % len(self)

    def _repr_html_(self) -> str:
        header = ("stream", "model", "columns", "frames a second", "unit")
        rows = (
            (name, info.model, info.width, f"{info.frame_rate_hz:g}", info.unit)
            for name, info in self.streams.items()
        )
        return table(f"{type(self).__name__}: {len(self)} rows", header, rows)
