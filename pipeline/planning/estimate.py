"""What a plan will cost before it runs: rows, hours, shards, bytes, objects, time.

Frames follow from the stream descriptions; how many objects hold them, each format says. Bytes are
those of the raw feature values: compression makes them fewer, row scalars add some hundred bytes a
row. Policy `each` counts as one channel: no header is opened for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earmill.pipeline.formats.registry import format_of, stored_streams
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.planning.parts import parts_of
from earmill.pipeline.planning.plan import Plan, Shard, item_seconds

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo
    from earmill.pipeline.spec.job import JobSpec

# A shard's row table and its commit record; once dataset.json, plan, index, snapshot, README,
# croissant, provenance, current.json.
OBJECTS_PER_SHARD = 2
OBJECTS_PER_DATASET = 8
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
    computed_s = sum(shard.seconds for shard in plan.computed)
    dtype, formats = spec.output.dtype, spec.output.formats
    streams = stored_streams(streams, dtype, formats)
    counts = {s.name: sum(stored_rows(shard, s) for shard in plan.shards) for s in streams}
    per_shard = (_objects(shard, spec, streams) for shard in plan.shards)
    return Estimate(
        rows=plan.rows,
        hours=audio_s / SECONDS_PER_HOUR,
        shards=len(plan.shards),
        bytes_in=_bytes_in(plan),
        bytes_out={name: _bytes_out(name, streams, counts, dtype) for name in formats},
        objects=OBJECTS_PER_DATASET + len(parts_of(plan.parts)) + sum(per_shard),
        seconds=None if times_realtime is None else computed_s / times_realtime,
        skipped=dict(plan.skipped),
    )


def _bytes_out(
    fmt: str, streams: Sequence[StreamInfo], counts: Mapping[str, int], dtype: str
) -> int:
    """Return the uncompressed bytes of all streams in a format, given their stored rows."""
    layouts = [format_of(fmt).layout_of(info) for info in streams]
    return sum(counts[each.name] * each.row_bytes(dtype) for each in layouts)


def _bytes_in(plan: Plan) -> int:
    """Bytes of the files that the rows are in, each counted once."""
    seen: set[int] = set()
    total = 0
    for item in plan.items():
        name = hash(item.uri)
        if name not in seen:
            seen.add(name)
            total += item.size or 0
    return total


def stored_rows(shard: Shard, stream: StreamInfo) -> int:
    """Frames or events that a stream has over a shard."""
    layout = layout_of(stream)
    return sum(layout.stored_rows_in(item_seconds(item)) for item in shard.items)


def _objects(shard: Shard, spec: JobSpec, streams: Sequence[StreamInfo]) -> int:
    held = {stream.name: stored_rows(shard, stream) for stream in streams}
    formats = map(format_of, spec.output.formats)
    return OBJECTS_PER_SHARD + sum(fmt.objects(held, streams, spec.output.dtype) for fmt in formats)
