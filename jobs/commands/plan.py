"""`earmill plan`: what a job would do and cost; writes nothing.

The speed is measured here and now, on a few seconds of noise through the job's own models, so the
time holds for this machine alone; decoding and writing come on top where they do not keep up. So
does the start: driver and workers load the models, one after the other, and Ray takes its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jobs.commands.options import AsJson, JobFile, Overrides
from jobs.terminal import console, say_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amtcore.extract import Extractor

MEASURED_S = 4.0
CLIPS = 4
# From the driver's call of Ray to a worker process that can import, as measured on two cores.
RAY_START_S = 8.0
KERNELS_S = 1.5


def plan(job: JobFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show what a job would do: rows, hours, shards, bytes, time. Writes nothing."""
    from pipeline.estimate import estimate
    from pipeline.plan import make_plan
    from pipeline.sources import open_source
    from pipeline.spec import JobSpec, validate_models

    spec = JobSpec.load(job, overrides=set_ or ())
    began = time.perf_counter()
    extractors = validate_models(spec)
    load_s = time.perf_counter() - began
    warm_up(extractors)
    made = make_plan(open_source(spec.source), spec)
    speed = times_real_time(extractors)
    streams = [info for extractor in extractors for info in extractor.streams]
    expected = estimate(made, spec, streams, times_realtime=speed)
    # Kernels that had to be compiled just now are in their cache when the job comes.
    start_s = RAY_START_S + KERNELS_S + 2 * load_s
    result = {
        "job": spec.name,
        "plan_id": made.plan_id,
        "spec_sha256": spec.sha256(),
        "output": spec.output.uri,
        "streams": [
            {key: getattr(s, key) for key in ("name", "model", "layout", "width", "frame_rate_hz")}
            for s in streams
        ],
        "times_real_time_here": round(speed, 1),
        **asdict(expected),
        "start_s": round(start_s, 1),
        "wall_s": round(start_s + (expected.seconds or 0.0), 1),
        "notes": list(made.notes),
    }
    say_json(result) if as_json else _print(result)


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


def rounded_up(seconds: float) -> str:
    """A duration to two digits, and never less than it is: 22 s, 1.7 min, 13 min, 2.5 h."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        n = seconds / size
        if n < 99 or unit == "h":
            step = 0.1 if n < 10 and unit != "s" else 1.0
            return f"{max(1.0 * step, math.ceil(round(n / step, 6)) * step):.3g} {unit}"
    raise AssertionError("hours hold any duration")


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from jobs.progress import audio, bytes_text
    from pipeline.sinks.stored import rate_text

    table = Table(title=f"plan {result['plan_id']} of {result['job']}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    by_format = result["bytes_out"]
    rows = {
        "rows": f"{result['rows']:,}",
        "audio": f"about {audio(result['hours'] * 3600)}",
        "shards": f"{result['shards']:,}",
        "bytes in": bytes_text(result["bytes_in"]),
        "bytes out": ", ".join(f"{bytes_text(n)} {fmt}" for fmt, n in by_format.items())
        + " before compression",
        "objects": f"{result['objects']:,}",
        "time": f"about {rounded_up(result['wall_s'])} here: {rounded_up(result['start_s'])} to "
        f"start, then models at {result['times_real_time_here']:,.0f} x real time",
        "output": result["output"],
    }
    for name, text in rows.items():
        table.add_row(name, text)
    for note in result["notes"]:
        table.add_row("note", note)
    for s in result["streams"]:
        columns = "neurons" if s["layout"] == "events" else "columns"
        shape = f"{s['width']} {columns} {rate_text(s)}, {s['model']}"
        table.add_row(f"stream {s['name']}", shape)
    console().print(table)
