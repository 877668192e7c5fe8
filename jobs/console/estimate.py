"""The estimate of a job as a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from earmill.jobs.console.terminal import print_facts


def rounded_up(seconds: float) -> str:
    """Round a duration up to two digits: 22 s, 1.7 min, 13 min, 2.5 h."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        n = seconds / size
        if n < 99 or unit == "h":
            step = 0.1 if n < 10 and unit != "s" else 1.0
            return f"{max(1.0 * step, math.ceil(round(n / step, 6)) * step):.3g} {unit}"
    raise AssertionError("hours hold any duration")


def print_estimate(result: dict[str, Any]) -> None:
    """Print `JobCost.to_dict()` as a table."""
    from earmill.pipeline.common.text import audio, bytes_text
    from earmill.pipeline.formats.stream_layout import layout_of

    bytes_out = ", ".join(f"{bytes_text(n)} {fmt}" for fmt, n in result["bytes_out"].items())
    rows = {
        "rows": f"{result['rows']:,}",
        "audio": f"about {audio(result['hours'] * 3600)}",
        "shards": f"{result['shards']:,}",
        "bytes in": bytes_text(result["bytes_in"]),
        "bytes out": f"{bytes_out} before compression",
        "objects": f"{result['objects']:,}",
        "output": result["output"],
    }
    if result["sample"]:
        rows |= _sample_rows(result["sample"])
    facts = [*rows.items(), *(("note", note) for note in result["notes"])]
    for s in result["streams"]:
        layout = layout_of(s)
        shape = f"{s['width']} {layout.columns_are} {layout.rate_text}, {s['model']}"
        facts.append((f"stream {s['name']}", shape))
    print_facts(f"plan {result['plan_id']} of {result['job']}", facts)


def _sample_rows(sample: dict[str, Any]) -> dict[str, str]:
    """Return the rows of the table that describe a sample."""
    from earmill.pipeline.common.text import bytes_text, duration, quantity

    def text(name: str, unit: Callable[[float], str]) -> str:
        low, expected, high = (unit(sample[name][end]) for end in ("low", "expected", "high"))
        return expected if low == high else f"{expected} ({low} to {high})"

    workers = f"{quantity(sample['workers'], 'worker')} of {quantity(sample['threads'], 'thread')}"
    bad = ", ".join(f"{count:,} {reason}" for reason, count in sample["bad"].items())
    return {
        "time": f"{text('time_s', rounded_up)} here, with {workers}",
        "CPU": text("cpu_s", duration),
        "stored": text("stored_bytes", bytes_text),
        "sample": f"{quantity(sample['rows'], 'row')} in {rounded_up(sample['took_s'])}, seed "
        f"{sample['seed']}; in quarantine: {bad or 'none'}",
    }
