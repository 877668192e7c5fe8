"""Estimate of a job before it runs: rows, hours, shards, bytes, objects, time. Nothing is written.

The number of frames follows from the stream descriptions, the number of objects from the formats.
Bytes are raw feature values: compression makes them fewer, and row scalars add some hundred bytes
for each row. Policy `each` counts as one channel, because no header is opened.

Times follow from measured or built-in speeds (`planning.speeds`), for the cores of this machine.
The speed of models alone leaves out decoding and writing, which may be slower. `operations.sample`
measures rows instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.audio.channels import BINAURAL
from earmill.pipeline.common.machine import cores
from earmill.pipeline.common.text import Shown, audio, bytes_text, duration
from earmill.pipeline.formats.registry import format_of, stored_streams
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import item_seconds, parts_of
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.planning.speeds import (
    JOB,
    REFERENCE,
    TIMING,
    Speed,
    find_speed,
    keep_timing,
    reference,
    seconds_of_a_second,
    warm_up,
)
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import describe_models, validate_models

# Of a shard: row table, commit record. Of a dataset: dataset.json, plan, index, snapshot, README,
# croissant, provenance, current.json.
OBJECTS_PER_SHARD = 2
OBJECTS_PER_DATASET = 8
SECONDS_PER_HOUR = 3600.0
# Seconds from the call to a warm worker with compiled kernels, measured on two cores.
START_S = 9.0
# Half the width of a range. By Student's t for five shards, 96 % of costs are within it.
STANDARD_ERRORS = 3.0
OF_CORES = (
    "the time is that of this machine's cores; `python -m benchmarks.gpu` measures a GPU's speed"
)
_OF_STREAM = ("name", "model", "layout", "width", "frame_rate_hz")


@dataclass(frozen=True)
class Estimate:
    """Expected size of a job."""

    rows: int
    hours: float  # Hours of audio.
    shards: int
    bytes_in: int  # Bytes of all files whose size is known.
    bytes_out: dict[str, int]  # Raw feature bytes by format.
    objects: int  # Files or objects written.
    seconds: float | None  # Wall seconds at the given speed; None without one.
    skipped: dict[str, int]  # Files of the source that are no rows, by extension.


@dataclass(frozen=True)
class Range:
    """An expected figure, and its likely lower and upper bound."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> Range:
        """Return the range in another unit."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def plus(self, exact: float) -> Range:
        """Return the range with a known figure added."""
        return Range(self.low + exact, self.expected + exact, self.high + exact)


@dataclass(frozen=True)
class Sampled:
    """Expected cost of a job by a sample of its rows; see `operations.sample`."""

    time_s: Range  # Wall seconds from the call to the end, on this machine.
    cpu_s: Range  # CPU seconds of the workers.
    stored_bytes: Range  # Bytes of all files that commits name.
    rows: int  # Rows of the sample.
    bad: dict[str, int]  # Rows in quarantine by reason.
    seed: int  # Seed that drew the rows.
    workers: int  # Workers that the time holds for.
    threads: int  # Threads of each worker.
    took_s: float  # Wall seconds that the sample took.


# Function that samples a plan, given the seconds from the call to a warm worker.
Sampler = Callable[[Plan, float], Sampled]


@dataclass(frozen=True, repr=False)
class JobCost(Shown):
    """The figures of `earmill plan` about a job.

    Args:
        job: Name of the job.
        plan_id: Plan id that will be stored.
        spec_sha256: Hash of the job that will be stored.
        output: URI of the features.
        streams: Description of every feature stream.
        times_real_time_here: Audio seconds per second of all models together, on the cores that the
            job would use here; None if the speed of a model is not known.
        speed_from: Origin of that figure: `job`, `timing` or `reference` (see `planning.speeds`).
        estimate: Rows, hours, shards, bytes, objects.
        start_s: Seconds until the first row is computed.
        wall_s: Seconds to the end; None if a speed is not known.
        notes: Remarks on the source's listing, and the origin of the time.
        sample: Figures from a sample of the rows; None without a sample.
    """

    job: str
    plan_id: str
    spec_sha256: str
    output: str
    streams: tuple[StreamInfo, ...]
    times_real_time_here: float | None
    speed_from: str | None
    estimate: Estimate
    start_s: float
    wall_s: float | None
    notes: tuple[str, ...]
    sample: Sampled | None = None

    def shown(self) -> dict[str, str]:
        """Return the figures of `earmill plan`, in words."""
        expected = self.estimate
        stored = (f"{bytes_text(n)} {fmt}" for fmt, n in expected.bytes_out.items())
        return {
            "job": self.job,
            "rows": f"{expected.rows:,}",
            "audio": f"about {audio(expected.hours * 3600)}",
            "shards": f"{expected.shards:,}",
            "in": bytes_text(expected.bytes_in),
            "out": f"{', '.join(stored)} before compression",
            "time": "unknown" if self.wall_s is None else f"about {duration(self.wall_s)} here",
            "output": self.output,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return flat plain values for JSON."""
        return {
            "job": self.job,
            "plan_id": self.plan_id,
            "spec_sha256": self.spec_sha256,
            "output": self.output,
            "streams": [{key: getattr(each, key) for key in _OF_STREAM} for each in self.streams],
            "times_real_time_here": self.times_real_time_here,
            "speed_from": self.speed_from,
            **asdict(self.estimate),
            "start_s": self.start_s,
            "wall_s": self.wall_s,
            "notes": list(self.notes),
            "sample": None if self.sample is None else asdict(self.sample),
        }


def job_cost(spec: JobSpec, *, measure: bool = False, sampler: Sampler | None = None) -> JobCost:
    """List the source and estimate the job; errors are errors that the job itself would raise.

    Args:
        spec: The job.
        measure: Time the job's models on a few seconds of noise, and keep the result. Else no model
            is imported, unless an entry of the job is new to this machine.
        sampler: Function that samples the plan, see `operations.sample`; None for no sample.
    """
    models = describe_models(spec)
    check_stream_names(stream for model in models for stream in model.streams)
    speed: Speed | None
    if measure:
        extractors = validate_models(spec)
        warm_up(extractors)
        binaural = spec.audio.channels == BINAURAL
        _, core_s = seconds_of_a_second(extractors, binaural=binaural)
        speed = keep_timing(spec, core_s)
    else:
        speed = find_speed(spec, models)
    plan = make_plan(planned_source(spec), spec)
    streams = [stream for model in models for stream in model.streams]
    # Cores of this machine that the job's workers would use.
    threads, workers = spec.run.threads_per_worker, spec.run.workers or 1
    used = cores() if threads is None else min(cores(), threads * workers)
    times = None if speed is None else used / speed.core_s
    expected = estimate(plan, spec, streams, times_realtime=times)
    start_s = START_S if speed is None or speed.start_s is None else speed.start_s
    sample = None if sampler is None else sampler(plan, start_s)
    return JobCost(
        job=spec.name,
        plan_id=plan.plan_id,
        spec_sha256=spec.sha256(),
        output=spec.output.uri,
        streams=tuple(streams),
        times_real_time_here=None if times is None else round(times, 1),
        speed_from=None if speed is None else speed.origin,
        estimate=expected,
        start_s=start_s,
        wall_s=None if expected.seconds is None else round(start_s + expected.seconds, 1),
        notes=(*plan.notes, *(() if sample else _of_time(spec, speed))),
        sample=sample,
    )


def estimate(
    plan: Plan, spec: JobSpec, streams: Sequence[StreamInfo], *, times_realtime: float | None = None
) -> Estimate:
    """Estimate a plan of a job; `times_realtime` are audio seconds processed in a second."""
    if times_realtime is not None and not times_realtime > 0:
        raise ValueError(f"expected a speed above 0 times real time, got {times_realtime}")
    audio_s = sum(shard.seconds for shard in plan.shards)
    computed_s = sum(shard.seconds for shard in plan.computed)
    dtype, formats = spec.output.dtype, spec.output.formats
    streams = stored_streams(streams, dtype, formats)
    stored = []  # frames or events of each stream, by shard
    for shard in plan.shards:
        seconds = [item_seconds(item) for item in shard.items]
        stored.append({s.name: sum(map(layout_of(s).stored_rows_in, seconds)) for s in streams})
    objects = OBJECTS_PER_DATASET + len(parts_of(plan.parts)) + OBJECTS_PER_SHARD * len(stored)
    bytes_out = {}
    for name in formats:
        fmt = format_of(name)
        objects += sum(fmt.objects(counts, streams, dtype) for counts in stored)
        layouts = [fmt.layout_of(info) for info in streams]
        bytes_out[name] = sum(
            counts[each.name] * each.row_bytes(dtype) for each in layouts for counts in stored
        )
    bytes_by_uri: dict[int, int] = {}  # a file with several rows counts once
    for item in plan.items():
        bytes_by_uri.setdefault(hash(item.uri), item.size or 0)
    return Estimate(
        rows=plan.rows,
        hours=audio_s / SECONDS_PER_HOUR,
        shards=len(plan.shards),
        bytes_in=sum(bytes_by_uri.values()),
        bytes_out=bytes_out,
        objects=objects,
        seconds=None if times_realtime is None else computed_s / times_realtime,
        skipped=dict(plan.skipped),
    )


def ratio_range(
    costs: Sequence[tuple[float, float]], *, left: float = 1.0, least: float = 0.0
) -> Range:
    """Return the cost of a second of audio, by shards of which some were measured.

    The expected value is the sum of costs over the sum of seconds. The range is three standard
    errors of this ratio to either side.

    Args:
        costs: Cost and seconds of audio of each measured shard.
        left: Share of the rows that was not measured, 0 to 1.
        least: Least half width of the range, as a share of the expected value.
    """
    n, seconds = len(costs), sum(s for _, s in costs)
    rate = sum(cost for cost, _ in costs) / seconds
    # One shard gives no variance.
    error = rate / STANDARD_ERRORS
    if n > 1:
        squares = sum((cost - rate * s) ** 2 for cost, s in costs)
        error = math.sqrt(squares * n / (n - 1)) / seconds
    wide = max(least * rate, STANDARD_ERRORS * error * math.sqrt(left))
    return Range(max(0.0, rate - wide), rate, rate + wide)


def _of_time(spec: JobSpec, speed: Speed | None) -> tuple[str, ...]:
    of_cores = (OF_CORES,) if spec.run.device == "cuda" else ()
    ask = "`earmill plan --measure` times this job's"
    if speed is None:
        note = f"no time: a model has no reference and was not timed here; {ask} models"
        return note, *of_cores
    note = {
        JOB: "the time is that of the last job with these models on this machine",
        TIMING: "the time is that of the models alone, as they were timed on this machine",
        REFERENCE: "the time is a reference, of the models alone with default parameters on cores "
        f"of {reference()['processor']}: nothing was measured here; {ask} models",
    }[speed.origin]
    return note, *of_cores
