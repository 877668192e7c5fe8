"""What a job would do and cost: nothing is written, and nothing is computed unless asked for.

Times follow from what jobs or timings on this machine have left (see `planning.speeds`), and hold
for its cores alone. Where only the models are known, decoding and writing come on top where they do
not keep up. So does the start: driver and workers load the models, one after the other, and Ray
takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.audio.channels import BINAURAL
from earmill.pipeline.common.figures import audio, bytes_text, duration
from earmill.pipeline.common.machine import cores
from earmill.pipeline.common.shown import Shown
from earmill.pipeline.formats.row_table import check_stream_names
from earmill.pipeline.planning.estimate import Estimate, estimate
from earmill.pipeline.planning.plan import Plan, make_plan
from earmill.pipeline.planning.sampled_cost import SampledCost
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.planning.speeds import (
    JOB,
    REFERENCE,
    TIMING,
    Speed,
    find_speed,
    keep_timing,
    reference,
)
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import Description, describe_models, validate_models
from earmill.pipeline.spec.run import RunSpec

# From the call to a warm worker, with compiled kernels, as measured on two cores.
START_S = 9.0
OF_CORES = (
    "the time is that of this machine's cores; `python -m benchmarks.gpu` measures a GPU's speed"
)
# Tries rows of a plan: its job, sizes by arithmetic, the models, and the start as it is known.
Sampler = Callable[[Plan, Estimate, Sequence[Description], float], SampledCost]
_OF_STREAM = ("name", "model", "layout", "width", "frame_rate_hz")


@dataclass(frozen=True, repr=False)
class JobCost(Shown):
    """What a job would do.

    Args:
        job: Its name. plan_id, spec_sha256: As they will be stored. output: Where.
        streams: Of every feature stream the description.
        times_real_time_here: Audio seconds per second of all models together, on the cores that the
            job would use here; None where nothing is known of a model.
        speed_from: Where that is from: `job`, `timing` or `reference` (see `planning.speeds`).
        estimate: Rows, hours, shards, bytes, objects.
        start_s: Until the first row is computed. wall_s: To the end, s; None as above.
        notes: What the source's listing was worth saying, and where the time is from.
        sample: What a sample of the rows says; None where none was tried.
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
    sample: SampledCost | None = None

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
        """Plain values, flat, ready for JSON."""
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
            "sample": None if self.sample is None else self.sample.to_dict(),
        }


def job_cost(spec: JobSpec, *, measure: bool = False, sampler: Sampler | None = None) -> JobCost:
    """List the source and add up.

    Args:
        measure: Time the job's models on a few seconds of noise, and keep the result; else nothing
            is imported that computes, unless an entry of the job is new to this machine.
        sampler: Tries rows of the plan, see `driver.sample_job`; None for none.
    Raises:
        SpecError, SourceError: What the job itself would raise before any work.
    """
    models = describe_models(spec)
    check_stream_names(stream for model in models for stream in model.streams)
    speed = _timed(spec) if measure else find_speed(spec, models)
    plan = make_plan(planned_source(spec), spec)
    streams = [stream for model in models for stream in model.streams]
    times = None if speed is None else _threads(spec.run) / speed.core_s
    expected = estimate(plan, spec, streams, times_realtime=times)
    start_s = START_S if speed is None or speed.start_s is None else speed.start_s
    sample = None if sampler is None else sampler(plan, expected, models, start_s)
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
        notes=(*plan.notes, *([] if sample else _of_time(spec, speed))),
        sample=sample,
    )


def _of_time(spec: JobSpec, speed: Speed | None) -> list[str]:
    """What is to be known of a time that nothing was tried for."""
    return [_origin(speed), *([OF_CORES] if spec.run.device == "cuda" else [])]


def _timed(spec: JobSpec) -> Speed:
    from earmill.pipeline.planning.timing import seconds_of_a_second, warm_up

    extractors = validate_models(spec)
    warm_up(extractors)
    binaural = spec.audio.channels == BINAURAL
    _, core_s = seconds_of_a_second(extractors, binaural=binaural)
    return keep_timing(spec, core_s)


def _threads(run: RunSpec) -> int:
    """Cores of this machine that the job's workers would use."""
    if run.threads_per_worker is None:
        return cores()
    return min(cores(), run.threads_per_worker * (run.workers or 1))


def _origin(speed: Speed | None) -> str:
    """Where the time is from, one line."""
    ask = "`earmill plan --measure` times this job's"
    if speed is None:
        return f"no time: a model has no reference and was not timed here; {ask} models"
    return {
        JOB: "the time is that of the last job with these models on this machine",
        TIMING: "the time is that of the models alone, as they were timed on this machine",
        REFERENCE: "the time is a reference, of the models alone with default parameters on cores "
        f"of {reference()['processor']}: nothing was measured here; {ask} models",
    }[speed.origin]
