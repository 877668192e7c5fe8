"""`earmill plan`: what a job would do and cost; writes nothing.

The speed is measured here and now, on a few seconds of noise through the job's own models, so the
time holds for this machine alone; decoding and writing come on top where they do not keep up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jobs.commands.options import AsJson, JobFile, Overrides

if TYPE_CHECKING:
    from amtcore.extract import Extractor

MEASURED_S = 4.0
CLIPS = 4


def plan(job: JobFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show what a job would do: rows, hours, shards, bytes, time. Writes nothing."""
    from pipeline.estimate import estimate
    from pipeline.plan import make_plan
    from pipeline.sources import open_source
    from pipeline.spec import JobSpec, validate_models

    spec = JobSpec.load(job, overrides=set_ or ())
    extractors = validate_models(spec)
    made = make_plan(open_source(spec.source), spec)
    speed = times_real_time(extractors)
    streams = [info for extractor in extractors for info in extractor.streams]
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
        **asdict(estimate(made, spec, streams, times_realtime=speed)),
    }
    print(json.dumps(result)) if as_json else _print(result)


def times_real_time(extractors: Sequence[Extractor]) -> float:
    """Audio seconds per second of all the models together, on all cores of this machine."""
    import numpy as np

    rng = np.random.default_rng(0)
    wall_s = 0.0
    for extractor in extractors:
        noise = rng.standard_normal(round(MEASURED_S * extractor.fs_hz)).astype(np.float32) * 0.01
        # The first call compiles or loads the kernels.
        extractor.extract([noise[: len(noise) // 10]])
        started = time.perf_counter()
        extractor.extract([noise] * CLIPS)
        wall_s += time.perf_counter() - started
    return CLIPS * MEASURED_S / wall_s


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jobs.progress import audio, bytes_text

    table = Table(title=f"plan {result['plan_id']} of {result['job']}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    by_format = result["bytes_out"]
    rows = {
        "rows": f"{result['rows']:,}",
        "audio": f"{result['hours']:,.2f} h",
        "shards": f"{result['shards']:,}",
        "bytes in": bytes_text(result["bytes_in"]),
        "bytes out": ", ".join(f"{bytes_text(n)} {fmt}" for fmt, n in by_format.items())
        + " before compression",
        "objects": f"{result['objects']:,}",
        "time": f"about {audio(result['seconds'])} here "
        f"(models at {result['times_real_time_here']:,.0f} x real time)",
        "output": result["output"],
    }
    for name, text in rows.items():
        table.add_row(name, text)
    for s in result["streams"]:
        columns = "neurons" if s["layout"] == "events" else "columns"
        shape = f"{s['width']} {columns} at {s['frame_rate_hz']:g} Hz, {s['model']}"
        table.add_row(f"stream {s['name']}", shape)
    Console(highlight=False).print(table)
