"""What the doctor found as a section of benchmarks/RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence

from earmill.jobs.doctor.check import Check, State
from earmill.jobs.doctor.machine import machine_line
from earmill.jobs.doctor.speed import Speed
from earmill.pipeline.common.machine import processor_name


def markdown(command: str, checks: Sequence[Check], speeds: Sequence[Speed]) -> str:
    """A heading, the machine, every check, and the speeds if they were measured."""
    has_row = {f"speed of {speed.model}" for speed in speeds}
    shown = [c for c in checks if not c.names_a_place and c.what not in has_row]
    gpu = next((c.text for c in shown if c.what == "GPU" and c.state is State.OK), None)
    parts = [
        f"## Doctor: {(gpu or processor_name()).partition(',')[0]}",
        f"`{command}` on {machine_line()}",
        table(("check", "", "found"), [(c.what, c.state, c.text) for c in shown]),
    ]
    if speeds:
        parts += [
            "Seconds of audio per second, pooled to default streams, samples and features copied.",
            table(("model", "CPU", "GPU", "clips in a launch"), [_row(each) for each in speeds]),
        ]
    return "\n\n".join(parts)


def _row(speed: Speed) -> tuple[str, ...]:
    gpu = ("", "") if speed.gpu is None else (f"{speed.gpu:.0f}", str(speed.clips))
    return speed.model, f"{speed.cpu:.0f}", *gpu


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
