"""What a job would do and cost, as measured here: nothing is written.

The speed is measured on a few seconds of noise through the job's own models, so the time holds for
this machine alone; decoding and writing come on top where they do not keep up. So does the start:
driver and workers load the models, one after the other, and Ray takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from earmill.pipeline.planning.estimate import Estimate, estimate
from earmill.pipeline.planning.plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec, validate_models

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amtcore.features.base import Extractor, StreamInfo

MEASURED_S = 4.0
CLIPS = 4
# From the driver's call of Ray to a worker process that can import, as measured on two cores.
RAY_START_S = 8.0
KERNELS_S = 1.5
OF_CORES = (
    "the time is that of this machine's cores; `python -m benchmarks.gpu` measures a GPU's speed"
)
_OF_STREAM = ("name", "model", "layout", "width", "frame_rate_hz")


@dataclass(frozen=True)
class JobCost:
    """What a job would do.

    Args:
        job: Its name. plan_id, spec_sha256: As they will be stored. output: Where.
        streams: Of every feature stream the description.
        times_real_time_here: Audio seconds per second of all models together, on all cores.
        estimate: Rows, hours, shards, bytes, objects.
        start_s: Until the first row is computed. wall_s: To the end, s.
        notes: What the source's listing was worth saying, and what the time is not that of.
    """

    job: str
    plan_id: str
    spec_sha256: str
    output: str
    streams: tuple[StreamInfo, ...]
    times_real_time_here: float
    estimate: Estimate
    start_s: float
    wall_s: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, flat, ready for JSON."""
        return {
            "job": self.job,
            "plan_id": self.plan_id,
            "spec_sha256": self.spec_sha256,
            "output": self.output,
            "streams": [{key: getattr(each, key) for key in _OF_STREAM} for each in self.streams],
            "times_real_time_here": self.times_real_time_here,
            **asdict(self.estimate),
            "start_s": self.start_s,
            "wall_s": self.wall_s,
            "notes": list(self.notes),
        }


def measure_cost(spec: JobSpec) -> JobCost:
    """List the source, build the models, run them for a few seconds.

    Raises:
        SpecError, SourceError: What the job itself would raise before any work.
    """
    began = time.perf_counter()
    extractors = validate_models(spec)
    load_s = time.perf_counter() - began
    warm_up(extractors)
    plan = make_plan(open_source(spec.source), spec)
    speed = times_real_time(extractors)
    streams = [info for extractor in extractors for info in extractor.streams]
    expected = estimate(plan, spec, streams, times_realtime=speed)
    # Kernels that had to be compiled just now are in their cache when the job comes.
    start_s = RAY_START_S + KERNELS_S + 2 * load_s
    return JobCost(
        job=spec.name,
        plan_id=plan.plan_id,
        spec_sha256=spec.sha256(),
        output=spec.output.uri,
        streams=tuple(streams),
        times_real_time_here=round(speed, 1),
        estimate=expected,
        start_s=round(start_s, 1),
        wall_s=round(start_s + (expected.seconds or 0.0), 1),
        notes=(*plan.notes, *([OF_CORES] if spec.run.device == "cuda" else [])),
    )


def warm_up(extractors: Sequence[Extractor]) -> None:
    """Load or compile the kernels, which the first call does."""
    for extractor in extractors:
        extractor.extract([noise(MEASURED_S / 10, extractor)])


def noise(seconds: float, extractor: Extractor) -> NDArray[np.float32]:
    """Quiet noise at a model's rate."""
    import numpy as np

    samples = np.random.default_rng(0).standard_normal(round(seconds * extractor.fs_hz))
    return (samples * 0.01).astype(np.float32)


def times_real_time(extractors: Sequence[Extractor]) -> float:
    """Audio seconds per second of all the models together, on all cores of this machine."""
    wall_s = 0.0
    for extractor in extractors:
        clip = noise(MEASURED_S, extractor)
        started = time.perf_counter()
        extractor.extract([clip] * CLIPS)
        wall_s += time.perf_counter() - started
    return CLIPS * MEASURED_S / wall_s
