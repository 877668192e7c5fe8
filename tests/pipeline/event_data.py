"""Real feature sets with a stream of spikes beside frames, and what every clip's counts are.

Counts follow from the row id, differ in every row, and are silent in some: a clip without a single
event has steps all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.rows import FeatureRow
from tests.pipeline.reader_data import Writer, make_row, stream

STEP_HZ = 200.0
N_NEURONS = 6
SPIKES = StreamInfo(
    name="spikes",
    model="dau1997",
    unit="spikes",
    width=N_NEURONS,
    frame_rate_hz=STEP_HZ,
    pool="mean",
    axes=("time", "channel"),
    channel_offsets=(0, 2, 4, 6),
    fc_hz=(100.0, 200.0, 300.0),
    mfc_hz=(),
    layout="events",
)
FRAMES = stream("modulation", (1, 3, 3), 100.0)
STREAMS = (FRAMES, SPIKES)
# Clips of so many seconds; the second is silent, the last has no whole step.
SECONDS = (0.5, 1.0, 0.02, 7.3, 0.004)
SILENT = 1


def counts(row: int, seconds: float) -> np.ndarray:
    """(step, neuron) of a row."""
    steps = int(seconds * STEP_HZ + 1e-6)
    if row == SILENT:
        return np.zeros((steps, N_NEURONS), np.int32)
    drawn = np.random.default_rng([row, 5]).poisson(0.2, (steps, N_NEURONS))
    return drawn.astype(np.int32)


def spike_row(row: int, seconds: float) -> FeatureRow:
    """Row number `row` of a set, with frames and events."""
    dense = counts(row, seconds)
    framed = make_row(row, seconds, (FRAMES,))
    events = SpikeEvents.from_dense(dense).to_columns()
    return replace(
        framed, streams={**framed.streams, "spikes": events}, steps={"spikes": len(dense)}
    )


def spike_rows() -> list[FeatureRow]:
    """The rows of a set."""
    return [spike_row(row, seconds) for row, seconds in enumerate(SECONDS)]


def write_spikes(
    uri: Any, rows: Sequence[FeatureRow] | None = None, *, finalised: bool = False
) -> Writer:
    """A set of two shards in both formats, one bad row in the second."""
    writer = Writer(uri, streams=STREAMS)
    rows = spike_rows() if rows is None else rows
    writer.shard(0, rows[:3])
    writer.shard(1, rows[3:], ["broken.wav"])
    if finalised:
        writer.finalise()
    return writer
