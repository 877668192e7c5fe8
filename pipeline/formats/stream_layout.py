"""Layouts of a stream on disk: frames in the job's dtype, in int8 with scales, or int32 events.

Frames that float16 cannot hold are divided by a scale ("scaled"). A format whose readers apply no
scale, as Parquet, has the values of such a stream in float32 instead. Datasets of earlier releases
have layout "frames" with a scale: there every format holds the divided numbers.

A stream of events has a row of three integers for each step in which a neuron fired. Rows ascend;
steps count from the start of the clip. The number of steps of each clip is stored too, as is the
number of frames in int8 (see `formats.values`). Bisection finds the rows of a span of events.

A stream with one row a clip is in float32, and its named values are columns of the table of rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import FrameView, Piece, join_frames
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import (
    BLOCK_FRAMES,
    BLOCK_ROWS,
    CLIP,
    INT8,
    SCALE_ROWS,
    Frames,
    converted,
    dequantised,
    pieces,
    sliced,
    stored_rows,
)

EVENT_COLUMNS = ("frame", "channel", "count")
EVENT_DTYPE = "int32"
# Layout of frames that are stored divided by a scale, where a format's readers know scales.
SCALED = "scaled"
# Measured for speech at 75 dB SPL with the default neurons; other sounds give other rates.
EVENTS_PER_CHANNEL_S = 85.0
# Seconds times frames per second lands this close to a whole frame by rounding alone.
FRAME_EPSILON = 1e-6

# The pieces of stored rows [first, last) of a clip, (n, columns).
Read = Callable[[int, int], Iterable[Piece]]
Span = tuple[int, int]  # First frame, and the frame after the last.


@dataclass(frozen=True)
class StreamLayout:
    """The stored form of a stream of frames, and how it is read; get one from `layout_of`. A stored
    row is a frame or an event; (n, `stored_width`) of them make up a clip."""

    name: str
    model: str = ""
    unit: str = ""
    width: int = 0
    frame_rate_hz: float = 0.0
    scale_factor: float = 1.0
    columns: Sequence[str] = ()

    #: Type of its stored rows in every job; empty if the dtype of the job decides.
    only_dtype: ClassVar[str] = ""
    #: Names of the stored rows and of the columns.
    stored_rows: ClassVar[str] = "frames"
    columns_are: ClassVar[str] = "columns"
    #: The dimension along which the centre frequencies of a store lie.
    axis: ClassVar[str] = "column"
    #: Numbers of each clip that are stored beside the start and number of its stored rows.
    row_counts: ClassVar[tuple[str, ...]] = ()
    #: Type of its values in croissant.json.
    croissant_type: ClassVar[str] = "sc:Float"
    #: Note for the dataset's card; empty for plain tables of numbers.
    card_note: ClassVar[str] = ""

    @property
    def stored_width(self) -> int:
        return int(self.width)

    def stored_dtype(self, dtype: str) -> str:
        # A frame by itself, as of a whole clip, is smaller in float32 than with a scale.
        return self.only_dtype or ("float32" if dtype == INT8 else dtype)

    def stored_rows_in(self, seconds: float) -> int:
        """Estimate how many stored rows a clip will have."""
        return math.floor(seconds * self.frame_rate_hz) if self.frame_rate_hz else 1

    def frame_blocks(self, row: FeatureRow, size: int) -> Iterator[Frames]:
        """Return the frames of a row in blocks of `size` frames, without the stream's scale."""
        return sliced(row.streams[self.name], size)

    def read(
        self, read: Read, *, n_stored: int, n_frames: int, span: Span, dtype: np.dtype, copy: bool
    ) -> Any:
        """Read the frames of a span of a clip, in their unit; exact in float32. Argument `read`
        reads pieces of stored rows [first, last) of the clip. The number `n_frames` counts as
        `length_column` does. Without `copy` frames may be a `FrameView`."""
        shape = span[1] - span[0], self.stored_width
        return (join_frames if copy else FrameView)(read(*span), shape, dtype, self.scale_factor)

    def _table(self, read: Read, first: int, last: int) -> np.ndarray:
        """Return stored rows of int8 or events as one array; a single piece is not copied."""
        found, shape = [*read(first, last)], (last - first, self.stored_width)
        if len(found) == 1 and found[0][1].shape == shape:
            return found[0][1]
        return join_frames(found, shape, np.dtype(self.stored_dtype(INT8)))

    def value_attrs(self) -> dict[str, Any]:
        """Return the attributes of a store's array of stored numbers."""
        attrs: dict[str, Any] = {"long_name": f"{self.model} {self.name}", "units": self.unit}
        if self.scale_factor != 1.0:
            attrs["scale_factor"] = self.scale_factor
        return attrs

    def time_attrs(self) -> dict[str, Any]:
        """Return attributes that tell the time of a frame: xarray has no axis that starts anew.
        Stored rows that are not frames have no times."""
        if self.row_counts or not self.frame_rate_hz:
            return {}
        return {
            "frame_rate_hz": self.frame_rate_hz,
            "time": "the k-th frame of a row begins k / frame_rate_hz seconds after the clip does",
        }

    def problem(self, row: FeatureRow) -> str | None:
        """Describe a fault of a clip's stored rows beyond their shape, or return None."""
        return None

    def counts_of(self, rows: Sequence[FeatureRow]) -> tuple[np.ndarray, ...]:
        return tuple(
            np.array([row.steps[self.name] for row in rows], np.int64) for _ in self.row_counts
        )

    def in_values(self) -> StreamLayout:
        """Return the layout of this stream in a format whose readers apply no scale."""
        return self

    def to_values(self, rows: np.ndarray) -> np.ndarray:
        """Multiply stored rows by their scale, for a format whose readers apply no scale."""
        return rows

    def from_values(self, values: np.ndarray) -> np.ndarray:
        """Divide values by the scale: the inverse of `to_values`."""
        return values

    def exact_dtype(self, dtype: str) -> str:
        """Return the smallest type that holds the values exactly, given the job's dtype."""
        stored = self.stored_dtype(dtype)
        return "float32" if self.scale_factor != 1.0 or stored == INT8 else stored

    def number_attrs(self) -> dict[str, str]:
        """Return field metadata on how numbers become values; empty if they are values."""
        return {} if self.scale_factor == 1.0 else {"scale_factor": repr(self.scale_factor)}

    def row_bytes(self, dtype: str) -> int:
        """Bytes of one stored row, given the dtype of the job."""
        return self.stored_width * np.dtype(self.stored_dtype(dtype)).itemsize

    @property
    def place_columns(self) -> tuple[str, ...]:
        """Columns of a table of rows that say where stored rows lie and how long clips are."""
        return tuple(f"{self.name}_{count}" for count in ("start", "n_frames", *self.row_counts))

    @property
    def value_columns(self) -> tuple[str, ...]:
        """Columns of a table of rows that hold the values themselves, one for each column."""
        return ()

    @property
    def length_column(self) -> str:
        """Column of a table of rows with the frames of each clip: what a slice counts in."""
        return self.place_columns[-1]

    @property
    def field_text(self) -> str:
        """A description of a stored row, if unit and rate do not describe it."""
        return ""

    @property
    def rate_text(self) -> str:
        """`at 100 Hz`, or `once a clip` for a stream of whole clips, whose rate is 0."""
        return f"at {self.frame_rate_hz:g} Hz" if self.frame_rate_hz else "once a clip"

    def check(self, row: FeatureRow, dtype: str) -> None:
        values, stored = row.streams[self.name], np.dtype(self.stored_dtype(dtype))
        if values.ndim == 2 and values.shape[1] == self.stored_width and values.dtype == stored:
            wrong = self.problem(row)
        else:
            shape = f"({self.stored_rows}, {self.stored_width}) {stored}"
            wrong = f"expected {shape}, got {values.shape} {values.dtype}"
        if wrong:
            raise CommitError(f"row {row.row_id!r}, stream {self.name}: {wrong}")

    def frame_range(self, n_frames: int, start_s: float, stop_s: float) -> Span:
        """Return frames [first, last) that overlap [start_s, stop_s); all frames at a rate of 0."""
        rate_hz = self.frame_rate_hz
        if rate_hz == 0:
            return 0, n_frames
        first = math.floor(start_s * rate_hz + FRAME_EPSILON)
        last = min(n_frames, math.ceil(min(stop_s * rate_hz, n_frames) - FRAME_EPSILON))
        return min(first, n_frames), max(min(first, n_frames), last)


class ClipLayout(StreamLayout):
    """One row a clip, in float32. Named values, and one by itself, are columns of the table of rows
    as well; a row of hundreds of bands is not."""

    only_dtype = "float32"
    card_note = "One row a clip: {streams}. The table of rows has their values too."

    @property
    def value_columns(self) -> tuple[str, ...]:
        names = self.columns or ["value"] * (self.width == 1)
        return tuple(f"{self.name}_{column}" for column in names)

    def problem(self, row: FeatureRow) -> str | None:
        count = len(row.streams[self.name])
        return None if count == 1 else f"expected one row a clip, got {count}"


class ScaledLayout(StreamLayout):
    """Frames in float16, divided by a power of two; in a format without scales float32 values."""

    def in_values(self) -> StreamLayout:
        return ValueLayout(**vars(self) | {"scale_factor": 1.0})

    def to_values(self, rows: np.ndarray) -> np.ndarray:
        return converted(rows, np.dtype(np.float32), self.scale_factor)

    def from_values(self, values: np.ndarray) -> np.ndarray:
        # A damaged file may hold numbers beyond float16; the checksum detects them.
        with np.errstate(over="ignore", invalid="ignore"):
            return (values * np.float32(1.0 / self.scale_factor)).astype(np.float16)


class ValueLayout(StreamLayout):
    """The values of scaled frames, in float32."""

    only_dtype = "float32"


class Int8Layout(StreamLayout):
    """Frames in int8: stored rows are numbers and scales, and the frames of each clip are known."""

    only_dtype, stored_rows = INT8, "int8 rows"
    row_counts = ("n_steps",)
    card_note = (
        "In int8 with a scale for each column of a block: {streams}. Stored rows are blocks of 2 "
        f"rows of scales and up to {BLOCK_FRAMES} of frames; `<stream>_n_frames` counts all rows "
        "of a clip, `<stream>_n_steps` its frames. A scale is a bfloat16, low byte in the first "
        "row, high byte in the second; a value is int8 times scale. `open_features` gives float32."
    )

    @property
    def field_text(self) -> str:
        return f"int8 with 2 rows of scales before every {BLOCK_FRAMES} frames"

    def stored_rows_in(self, seconds: float) -> int:
        return stored_rows(super().stored_rows_in(seconds))

    def problem(self, row: FeatureRow) -> str | None:
        n_stored, n_frames = len(row.streams[self.name]), row.steps[self.name]
        wanted = stored_rows(n_frames)
        if n_stored == wanted:
            return None
        return f"expected {wanted} rows in int8 for {n_frames} frames, got {n_stored}"

    def frame_blocks(self, row: FeatureRow, size: int) -> Iterator[Frames]:
        return map(dequantised, sliced(row.streams[self.name], stored_rows(size)))

    def read(
        self, read: Read, *, n_stored: int, n_frames: int, span: Span, dtype: np.dtype, copy: bool
    ) -> np.ndarray:
        if n_stored != stored_rows(n_frames):
            raise CommitError(
                f"expected {stored_rows(n_frames)} rows in int8 for {n_frames} frames, the index "
                f"says {n_stored}; run `earmill verify`"
            )
        first, last = span
        begin, end = first // BLOCK_FRAMES, -(-last // BLOCK_FRAMES)
        low, high = begin * BLOCK_ROWS, min(n_stored, end * BLOCK_ROWS)
        frames, start = dequantised(self._table(read, low, max(low, high))), begin * BLOCK_FRAMES
        if len(frames) != last - first:
            # A copy, which may be written to and does not keep all frames in memory.
            frames = frames[first - start : last - start].copy()
        return frames.astype(dtype, copy=False)

    def number_attrs(self) -> dict[str, str]:
        return {
            "int8_scales": f"blocks of {SCALE_ROWS} rows of scales and up to {BLOCK_FRAMES} rows "
            "of frames; a scale is a bfloat16, low byte in the first row, high byte in the second; "
            "a value is int8 times the scale of its column"
        }

    def value_attrs(self) -> dict[str, Any]:
        return {"long_name": f"{self.model} {self.name}, {self.field_text}"}


class EventLayout(StreamLayout):
    """Events: a stored row for each step in which a neuron fired, and the steps of each clip."""

    only_dtype, stored_rows = EVENT_DTYPE, "events"
    columns_are, axis = "neurons", "channel"
    row_counts = ("n_steps",)
    croissant_type = "sc:Integer"
    card_note = (
        f"Sparse, {EVENT_DTYPE} rows ({', '.join(EVENT_COLUMNS)}) instead of frames: {{streams}}. "
        "Their columns are neurons, a frame is a step since the start of the clip; "
        "`<stream>_n_steps` counts the steps of a clip."
    )

    @property
    def stored_width(self) -> int:
        return len(EVENT_COLUMNS)

    @property
    def field_text(self) -> str:
        return f"events ({', '.join(EVENT_COLUMNS)}) of {self.width} neurons"

    def stored_rows_in(self, seconds: float) -> int:
        """Estimate the events if every channel fires `EVENTS_PER_CHANNEL_S` times a second."""
        return math.floor(seconds * (EVENTS_PER_CHANNEL_S * self.width))

    def problem(self, row: FeatureRow) -> str | None:
        done, last = 0, np.empty((0, len(EVENT_COLUMNS)), np.int32)
        for events in pieces(row.streams[self.name]):
            for column, limit in ((0, row.steps[self.name]), (1, self.width)):
                values = events[:, column]
                outside = np.flatnonzero((values < 0) | (values >= limit))
                if len(outside):
                    return (
                        f"expected a {EVENT_COLUMNS[column]} from 0 to {limit - 1}, got "
                        f"{values[outside[0]]} in event {done + outside[0]}"
                    )
            few = np.flatnonzero(events[:, 2] < 1)
            if len(few):
                got = f"{events[few[0], 2]} in event {done + few[0]}"
                return f"expected counts of 1 or more, got {got}"
            joined = np.concatenate([last, events])
            place = joined[:, 0].astype(np.int64) * self.width + joined[:, 1]
            back = np.flatnonzero(np.diff(place) <= 0)
            if len(back):
                pair = [tuple(event[:2].tolist()) for event in joined[back[0] : back[0] + 2]]
                return f"expected ascending (frame, channel), got {pair[0]} before {pair[1]}"
            done, last = done + len(events), events[-1:]
        return None

    def read(
        self, read: Read, *, n_stored: int, n_frames: int, span: Span, dtype: np.dtype, copy: bool
    ) -> Any:
        # Imported here, because only streams of events need it.
        from amtcore.features.spike_events import SpikeEvents

        def step_of(row: int) -> int:
            return int(self._table(read, row, row + 1)[0, 0])

        first, last = 0, n_stored
        if span != (0, n_frames):
            first = bisect_left(range(n_stored), span[0], key=step_of)
            last = bisect_left(range(n_stored), span[1], lo=first, key=step_of)
        events = self._table(read, first, last)
        # One pass over the table for each column; SpikeEvents owns its arrays.
        frame = events[:, 0].astype(np.int64)
        channel, count = events[:, 1].copy(), events[:, 2].copy()
        # An event outside the span would be counted at another place, or nowhere.
        if len(events) and not (
            span[0] <= frame.min()
            and frame.max() < span[1]
            and channel.min() >= 0
            and channel.max() < self.width
        ):
            raise CommitError(
                f"expected events of steps {span[0]} to {span[1] - 1} in {self.width} channels, "
                "the file holds others: run `earmill verify`"
            )
        return SpikeEvents(frame, channel, count, span[0], span[1] - span[0], self.width)

    def value_attrs(self) -> dict[str, Any]:
        return {"long_name": f"{self.model} {self.name} events", "columns": list(EVENT_COLUMNS)}


LAYOUTS: dict[str, type[StreamLayout]] = {
    "frames": StreamLayout,
    CLIP: ClipLayout,
    SCALED: ScaledLayout,
    INT8: Int8Layout,
    "events": EventLayout,
}
_FACTS = tuple(field.name for field in fields(StreamLayout))


def described(info: StreamInfo, *, has_scales: bool) -> StreamInfo:
    """Return the description of a stream for the files of a format with or without scales."""
    scale = info.scale_factor if has_scales else 1.0
    return replace(info, layout="frames", scale_factor=scale) if info.layout == SCALED else info


def layout_of(info: StreamInfo | Mapping[str, Any]) -> StreamLayout:
    """Return the layout of a stream, given its description or its entry in dataset.json.

    Raises:
        ValueError: A layout that this release does not know.
    """
    facts = info if isinstance(info, Mapping) else vars(info)
    wanted = facts.get("layout", "frames")
    if wanted not in LAYOUTS:
        raise ValueError(
            f"expected a layout out of {list(LAYOUTS)} for stream {facts['name']!r}, got "
            f"{wanted!r}; use the release that wrote it"
        )
    return LAYOUTS[wanted](**{name: facts[name] for name in _FACTS if name in facts})
