"""What a plan will cost before it runs: rows, hours, shards, bytes, objects, time.

Frames, chunk sizes and objects per shard follow from the stream descriptions and from the sinks'
own constants. Bytes are those of the raw feature values: compression makes them fewer, row scalars
add some hundred bytes a row. Policy `each` counts as one channel: no header is opened for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from earmill.pipeline.formats.stream_schema import is_events, stored_dtype, stored_width
from earmill.pipeline.formats.zarr.write import CHUNKS_PER_OBJECT, chunk_frames, column_axes
from earmill.pipeline.planning.plan import Plan, Shard, item_seconds

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.spec.job import JobSpec

# A shard's row table and its commit record; dataset.json, plan, index, README, croissant once.
OBJECTS_PER_SHARD = 2
OBJECTS_PER_DATASET = 5
# A coordinate array: its metadata and its one chunk.
ZARR_OBJECTS_OF_AN_AXIS = 2
# Of a stream in a Zarr store: group, four arrays' metadata, and three one-object index arrays.
ZARR_OBJECTS_PER_STREAM = 1 + 4 + 3
# Of a stream of events also the steps of each clip.
ZARR_OBJECTS_OF_STEPS = 2
# As measured for speech at 75 dB SPL with the default neurons; it depends on the sound.
EVENTS_PER_CHANNEL_S = 85.0
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Estimate:
    """Expected size of a job.

    Args:
        rows: Rows of the plan.
        hours: Audio hours.
        shards: Shards.
        bytes_in: Bytes of all files whose size is known.
        bytes_out: Raw feature bytes by format.
        objects: Files or objects written.
        skipped: Files of the source that are no rows, by extension.
        seconds: Wall seconds at the given speed; None without one.
    """

    rows: int
    hours: float
    shards: int
    bytes_in: int
    bytes_out: dict[str, int]
    objects: int
    seconds: float | None
    skipped: dict[str, int]


def estimate(
    plan: Plan, spec: JobSpec, streams: Sequence[StreamInfo], *, times_realtime: float | None = None
) -> Estimate:
    """Add up a plan.

    Args:
        plan: The plan.
        spec: Its job.
        streams: All feature streams of the job.
        times_realtime: Audio seconds processed in a second, e.g. from a benchmark.
    """
    if times_realtime is not None and not times_realtime > 0:
        raise ValueError(f"expected a speed above 0 times real time, got {times_realtime}")
    audio_s = sum(shard.seconds for shard in plan.shards)
    dtype = spec.output.dtype
    size = sum(
        frames(shard, s) * stored_width(s) * np.dtype(stored_dtype(s, dtype)).itemsize
        for shard in plan.shards
        for s in streams
    )
    per_shard = (_objects(shard, spec, streams) for shard in plan.shards)
    sizes = {item.uri: item.size or 0 for item in plan.items()}
    return Estimate(
        rows=plan.rows,
        hours=audio_s / SECONDS_PER_HOUR,
        shards=len(plan.shards),
        bytes_in=sum(sizes.values()),
        bytes_out={fmt: size for fmt in spec.output.formats},
        objects=OBJECTS_PER_DATASET + sum(per_shard),
        seconds=None if times_realtime is None else audio_s / times_realtime,
        skipped=dict(plan.skipped),
    )


def frames(shard: Shard, stream: StreamInfo) -> int:
    """Whole frames a stream has over a shard; a stream of clips has one a row.

    For a stream of events: as if every channel fired `EVENTS_PER_CHANNEL_S` times a second.
    """
    if stream.frame_rate_hz == 0:
        return len(shard.items)
    rate = EVENTS_PER_CHANNEL_S * stream.width if is_events(stream) else stream.frame_rate_hz
    return sum(math.floor(item_seconds(item) * rate) for item in shard.items)


def _objects(shard: Shard, spec: JobSpec, streams: Sequence[StreamInfo]) -> int:
    count = OBJECTS_PER_SHARD
    if "parquet" in spec.output.formats:
        count += 1
    if "zarr" in spec.output.formats:
        per_stream = (_value_objects(shard, spec, stream) for stream in streams)
        count += 1 + sum(ZARR_OBJECTS_PER_STREAM + values for values in per_stream)
        count += ZARR_OBJECTS_OF_STEPS * sum(map(is_events, streams))
        count += ZARR_OBJECTS_OF_AN_AXIS * sum(len(column_axes(stream)) for stream in streams)
    return count


def _value_objects(shard: Shard, spec: JobSpec, stream: StreamInfo) -> int:
    chunks = math.ceil(
        frames(shard, stream)
        / chunk_frames(stored_width(stream), stored_dtype(stream, spec.output.dtype))
    )
    return math.ceil(chunks / CHUNKS_PER_OBJECT)
