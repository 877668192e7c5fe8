"""Events of a clip out of its stored rows (frame, channel, count), whole or of a span of steps.

Stored rows ascend in time, so the ones of a span are found by bisection: each look costs one read
of one row, which the block cache of the shard makes one read of a block. A span in the middle of a
long clip thus fetches a logarithm of its blocks and the ones that hold the span.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from earmill.pipeline.common.errors import CommitError

if TYPE_CHECKING:
    from amtcore.features.spike_events import SpikeEvents


def read_events(
    read: Callable[[int, int], np.ndarray],
    *,
    n_events: int,
    n_steps: int,
    n_channels: int,
    span: tuple[int, int],
) -> SpikeEvents:
    """The events of steps [first, last) of a clip.

    Args:
        read: Stored rows [first, last) of the clip, (n, 3).
        n_events: Stored rows of the clip.
        n_steps: Steps of the clip.
        n_channels: Neurons.
        span: First step, and the one behind the last.
    """
    # Here, so that the reader costs nothing more where no stream holds events.
    from amtcore.features.spike_events import SpikeEvents

    rows = (0, n_events) if span == (0, n_steps) else _rows_of(read, n_events, span)
    events = read(*rows)
    # Counts are put where the events say: outside the span they would land on others, or nowhere.
    low, high = (span[0], 0), (span[1], n_channels)
    if len(events) and ((events[:, :2] < low).any() or (events[:, :2] >= high).any()):
        raise CommitError(
            f"expected events of steps {span[0]} to {span[1] - 1} in {n_channels} channels, the "
            "file holds others: run `earmill verify`"
        )
    return SpikeEvents.from_columns(events, span[0], span[1] - span[0], n_channels)


def _rows_of(
    read: Callable[[int, int], np.ndarray], n_events: int, span: tuple[int, int]
) -> tuple[int, int]:
    """Stored rows [first, last) whose step is in the span."""

    def step_of(row: int) -> int:
        return int(read(row, row + 1)[0, 0])

    first = bisect_left(range(n_events), span[0], key=step_of)
    return first, bisect_left(range(n_events), span[1], lo=first, key=step_of)
