"""Estimate of a job before it runs: rows, hours, shards, bytes, objects. Nothing is written.

The number of frames follows from the stream descriptions, the number of objects from the formats.
Bytes are raw feature values: compression makes them fewer, and row scalars add some hundred bytes
for each row. Policy `each` counts as one channel, because no header is opened. Time, CPU time and
stored bytes are not estimated: `operations.sample` measures them on random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.text import Shown, audio, bytes_text, duration
from earmill.pipeline.formats.format import format_of, stored_streams
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.planning.make_plan import facts_of_job, make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import item_seconds, parts_of
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import check_references_used, describe_models

# A shard has a row table and a commit record. A dataset has dataset.json, plan, index, snapshot,
# README, croissant, provenance and current.json.
OBJECTS_PER_SHARD = 2
OBJECTS_PER_DATASET = 8
SECONDS_PER_HOUR = 3600.0
_STREAM_KEYS = ("name", "model", "layout", "width", "frame_rate_hz")


@dataclass(frozen=True)
class Estimate:
    """Expected size of a job."""

    rows: int
    hours: float  # Hours of audio.
    shards: int
    bytes_in: int  # Bytes of all files whose size is known.
    bytes_out: dict[str, int]  # Raw feature bytes by format.
    objects: int  # Files or objects written.
    skipped: dict[str, int]  # Files of the source that are no rows, by extension.


@dataclass(frozen=True)
class Range:
    """An expected figure, and its likely lower and upper bound."""

    low: float
    expected: float
    high: float


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


@dataclass(frozen=True, repr=False)
class JobCost(Shown):
    """The figures of `earmill plan` about a job.

    Args:
        job: Name of the job.
        plan_id: Plan id that will be stored.
        spec_sha256: Hash of the job that will be stored.
        output: URI of the features.
        streams: Description of every feature stream.
        estimate: Rows, hours, shards, bytes, objects.
        notes: Remarks on the source's listing.
        sample: Figures from a sample of the rows; None without a sample.
    """

    job: str
    plan_id: str
    spec_sha256: str
    output: str
    streams: tuple[StreamInfo, ...]
    estimate: Estimate
    notes: tuple[str, ...]
    sample: Sampled | None = None

    def shown(self) -> dict[str, str]:
        """Return the figures of `earmill plan`, in words."""
        expected = self.estimate
        stored = (f"{bytes_text(n)} {fmt}" for fmt, n in expected.bytes_out.items())
        time_s = None if self.sample is None else self.sample.time_s.expected
        return {
            "job": self.job,
            "rows": f"{expected.rows:,}",
            "audio": f"about {audio(expected.hours * 3600)}",
            "shards": f"{expected.shards:,}",
            "in": bytes_text(expected.bytes_in),
            "out": f"{', '.join(stored)} before compression",
            **({} if time_s is None else {"time": f"about {duration(time_s)} here"}),
            "output": self.output,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return flat plain values for JSON."""
        plain: dict[str, Any] = asdict(self)
        plain["streams"] = [{key: one[key] for key in _STREAM_KEYS} for one in plain["streams"]]
        sizes: dict[str, Any] = plain.pop("estimate")
        return plain | sizes | {"notes": list(self.notes)}


def job_cost(spec: JobSpec, sampler: Callable[[Plan], Sampled] | None = None) -> JobCost:
    """List the source and estimate the job; raises the errors that the job itself would raise.
    `sampler` samples the plan, see `operations.sample`; None for no sample. No model is imported,
    unless an entry of the job is new to this machine."""
    models = describe_models(spec)
    check_references_used(spec, models)
    streams = [stream for model in models for stream in model.streams]
    check_stream_names(streams, facts_of_job(spec))
    plan = make_plan(planned_source(spec), spec)
    return JobCost(
        job=spec.name,
        plan_id=plan.plan_id,
        spec_sha256=spec.sha256(),
        output=spec.output.uri,
        streams=tuple(streams),
        estimate=estimate(plan, spec, streams),
        notes=tuple(plan.notes),
        sample=None if sampler is None else sampler(plan),
    )


def estimate(plan: Plan, spec: JobSpec, streams: Sequence[StreamInfo]) -> Estimate:
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
        hours=sum(shard.seconds for shard in plan.shards) / SECONDS_PER_HOUR,
        shards=len(plan.shards),
        bytes_in=sum(bytes_by_uri.values()),
        bytes_out=bytes_out,
        objects=objects,
        skipped=dict(plan.skipped),
    )
