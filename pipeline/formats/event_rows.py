"""The stored rows of events (frame, channel, count): what is wrong with some, and those of a span.

Rows ascend in time, so the ones of a span are found by bisection: each look costs one read of one
row, which the block cache of the shard makes one read of a block. A span in the middle of a long
clip thus fetches a logarithm of its blocks and the ones that hold the span.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import Piece
from earmill.pipeline.formats.half import whole
from earmill.pipeline.formats.spill import Values, pieces

if TYPE_CHECKING:
    from amtcore.features.spike_events import SpikeEvents

EVENT_COLUMNS = ("frame", "channel", "count")
EVENT_DTYPE = "int32"

# The pieces of stored rows [first, last) of a clip, (n, columns).
Read = Callable[[int, int], Iterable[Piece]]


def read_events(
    read: Read, *, n_events: int, n_steps: int, n_channels: int, span: tuple[int, int]
) -> SpikeEvents:
    """The events of steps [first, last) of a clip.

    Args:
        read: Gives the pieces of stored rows of the clip, (n, 3).
        n_events: Stored rows of the clip.
        n_steps: Steps of the clip.
        n_channels: Neurons.
        span: First step, and the one behind the last.
    """
    # Here, so that the reader costs nothing more where no stream holds events.
    from amtcore.features.spike_events import SpikeEvents
    from amtcore.kernels.vector.event_columns import split

    rows = (0, n_events) if span == (0, n_steps) else _rows_of(read, n_events, span)
    (frame, channel, count), (first, last, lowest, highest) = split(_table(read, *rows))
    # Counts are put where the events say: outside the span they would land on others, or nowhere.
    inside = span[0] <= first and last < span[1] and lowest >= 0 and highest < n_channels
    if len(frame) and not inside:
        raise CommitError(
            f"expected events of steps {span[0]} to {span[1] - 1} in {n_channels} channels, the "
            "file holds others: run `earmill verify`"
        )
    return SpikeEvents(frame, channel, count, span[0], span[1] - span[0], n_channels)


def _table(read: Read, first: int, last: int) -> np.ndarray:
    """Stored rows [first, last)."""
    return whole(read(first, last), (last - first, len(EVENT_COLUMNS)), np.dtype(EVENT_DTYPE))


def _rows_of(read: Read, n_events: int, span: tuple[int, int]) -> tuple[int, int]:
    """Stored rows [first, last) whose step is in the span."""

    def step_of(row: int) -> int:
        return int(_table(read, row, row + 1)[0, 0])

    first = bisect_left(range(n_events), span[0], key=step_of)
    return first, bisect_left(range(n_events), span[1], lo=first, key=step_of)


def events_problem(events: Values, steps: int, channels: int) -> str | None:
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
