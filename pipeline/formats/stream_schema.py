"""How a stream lies on disk: frames in the job's dtype, events as (frame, channel, count) in int32.

A stream of events has a row of three integers for each step in which a neuron fired, ascending; the
step is counted from the start of the clip. As silence leaves no event, the number of steps of each
clip is stored beside them. Every writer and reader asks here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.spill import Values, pieces

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.formats.rows import FeatureRow

EVENTS = "events"
EVENT_COLUMNS = ("frame", "channel", "count")
EVENT_DTYPE = "int32"


def is_events(info: StreamInfo | Mapping[str, Any]) -> bool:
    """Whether a stream is stored as events."""
    layout = info.get("layout") if isinstance(info, Mapping) else info.layout
    return layout == EVENTS


def rate_text(info: Mapping[str, Any]) -> str:
    """`at 100 Hz`, or `once a clip` for a stream of whole clips, whose rate is 0."""
    rate_hz = info["frame_rate_hz"]
    return f"at {rate_hz:g} Hz" if rate_hz else "once a clip"


def stored_width(info: StreamInfo | Mapping[str, Any]) -> int:
    """Columns of a stream on disk."""
    if is_events(info):
        return len(EVENT_COLUMNS)
    return int(info["width"] if isinstance(info, Mapping) else info.width)


def stored_dtype(info: StreamInfo | Mapping[str, Any], dtype: str) -> str:
    """Type of a stream on disk.

    Args:
        dtype: That of the job, for frames.
    """
    return EVENT_DTYPE if is_events(info) else dtype


def place_columns(info: StreamInfo | Mapping[str, Any]) -> tuple[str, ...]:
    """Columns of a table of rows that say where a stream's rows lie and how long they are."""
    name = info["name"] if isinstance(info, Mapping) else info.name
    steps = (steps_column(name),) if is_events(info) else ()
    return (f"{name}_start", f"{name}_n_frames", *steps)


def steps_column(name: str) -> str:
    """Column of a table of rows with the steps of each clip."""
    return f"{name}_n_steps"


def steps_of(rows: Sequence[FeatureRow], info: StreamInfo) -> np.ndarray:
    """Steps of each row's clip, int64; empty for a stream of frames."""
    steps = [row.steps[info.name] for row in rows] if is_events(info) else []
    return np.array(steps, dtype=np.int64)


def check_stream(row: FeatureRow, info: StreamInfo, dtype: str) -> None:
    """Refuse values that do not fit their stream.

    Raises:
        CommitError: It names the row, the stream and what is wrong.
    """
    values = row.streams[info.name]
    width, dtype = stored_width(info), stored_dtype(info, dtype)
    if values.ndim != 2 or values.shape[1] != width or values.dtype.name != dtype:
        kind = "events" if is_events(info) else "frames"
        raise CommitError(
            f"row {row.row_id!r}, stream {info.name}: expected ({kind}, {width}) {dtype}, "
            f"got {values.shape} {values.dtype}"
        )
    if is_events(info):
        wrong = _events_problem(values, row.steps[info.name], info.width)
        if wrong:
            raise CommitError(f"row {row.row_id!r}, stream {info.name}: {wrong}")


def _events_problem(events: Values, steps: int, channels: int) -> str | None:
    """What is wrong with the events of a clip of so many steps; None where they are right."""
    done, last = 0, np.empty((0, len(EVENT_COLUMNS)), np.int32)
    for piece in pieces(events):
        found = _piece_problem(piece, done, steps, channels) or _order_problem(
            np.concatenate([last, piece]), channels
        )
        if found:
            return found
        done, last = done + len(piece), piece[-1:]
    return None


def _piece_problem(events: np.ndarray, done: int, steps: int, channels: int) -> str | None:
    """What is wrong with single events, `done` of which came before these."""
    for column, limit in ((0, steps), (1, channels)):
        values = events[:, column]
        outside = np.flatnonzero((values < 0) | (values >= limit))
        if len(outside):
            return (
                f"expected a {EVENT_COLUMNS[column]} from 0 to {limit - 1}, got "
                f"{values[outside[0]]} in event {done + outside[0]}"
            )
    few = np.flatnonzero(events[:, 2] < 1)
    if len(few):
        return f"expected counts of 1 or more, got {events[few[0], 2]} in event {done + few[0]}"
    return None


def _order_problem(events: np.ndarray, channels: int) -> str | None:
    place = events[:, 0].astype(np.int64) * channels + events[:, 1]
    back = np.flatnonzero(np.diff(place) <= 0)
    if len(back):
        pair = [tuple(event[:2].tolist()) for event in events[back[0] : back[0] + 2]]
        return f"expected ascending (frame, channel), got {pair[0]} before {pair[1]}"
    return None
