"""Speed of every model, and the doctor's section for benchmarks/RESULTS.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from earmill.jobs.doctor.checks import Check, State, checked, machine_line
from earmill.jobs.doctor.models import noise
from earmill.pipeline.common.machine import processor_name

if TYPE_CHECKING:
    from torch import Tensor

    from amtcore.features.base import Extractor

#: Clips of a launch that fills a GPU; fewer if its memory is too small.
CLIPS = 1500
CLIP_S = 4.0
_REPEATS = 2


@dataclass(frozen=True)
class Speed:
    """Speed of a model in seconds of audio per second.

    Args:
        model: Name of the model.
        cpu: Speed on all cores of the CPU.
        gpu: Speed on the GPU, with samples and features copied; None without a GPU.
        clips: Clips of a launch on the GPU.
    """

    model: str
    cpu: float
    gpu: float | None = None
    clips: int = 0

    def __str__(self) -> str:
        on_gpu = f", {self.gpu:,.0f} on the GPU ({self.clips} clips)" if self.gpu else ""
        return f"{self.cpu:,.0f} x real time on the CPU{on_gpu}"


def speed_checks(speeds: list[Speed], *, gpu: bool) -> Iterator[Check]:
    """Measure each model and append its speed to `speeds`."""
    from amtcore.features.registry import BUILT_IN

    for name in BUILT_IN:

        def measure(name: str = name) -> str:
            speeds.append(_measured(name, gpu))
            return str(speeds[-1])

        yield checked(f"speed of {name}", measure)
    if gpu:
        yield checked("cycles of dau1997", _cycles)


def gpu_answers(checks: list[Check]) -> bool:
    """Return True if a real GPU runs kernels; the interpreter's speed means nothing."""
    good = {check.what: check.text for check in checks if check.state is State.OK}
    return "PTX" in good and not good.get("GPU", "none").startswith("none")


def _measured(name: str, gpu: bool) -> Speed:
    from amtcore.features.build import build_extractor
    from earmill.pipeline.planning.speeds import seconds_of_a_second, warm_up

    extractor = build_extractor(name)
    warm_up([extractor])
    cpu = 1.0 / seconds_of_a_second([extractor])[0]
    if not gpu:
        return Speed(name, cpu)
    there = build_extractor(name, backend="cuda")
    if there.backend.name == "cpu":
        return Speed(name, cpu)
    return Speed(name, cpu, *gpu_rate(there))


def gpu_rate(extractor: Extractor, clips: int = CLIPS, clip_s: float = CLIP_S) -> tuple[float, int]:
    """Return seconds of audio per second, and the clips of a launch that fit the memory."""
    clip = noise(extractor, clip_s, 0)
    seconds, clips = as_large_as_fits(
        lambda count: best_of(partial(extractor.extract, [clip] * count), _REPEATS), clips
    )
    return clips * clip_s / seconds, clips


def as_large_as_fits(measure: Callable[[int], float], count: int) -> tuple[float, int]:
    """Measure `count` clips, or half as many until they fit the GPU's memory; return the count."""
    from amtcore.errors import DeviceMemoryError
    from amtcore.kernels.warp.driver.failures import device_errors

    while True:
        try:
            with device_errors(f"extracting {count} clips"):
                return measure(count), count
        except DeviceMemoryError:
            if count == 1:
                raise
            count //= 2


def best_of(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest run, after a run that loads the kernels."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _cycles() -> str:
    import torch

    from amtcore.features.build import build_extractor
    from amtcore.kernels.warp.driver.device_facts import device_facts

    facts, extractor = device_facts(), build_extractor("dau1997", backend="cuda")
    clip = torch.from_numpy(noise(extractor, CLIP_S, 0)).cuda()
    return cycles_of(extractor, clip, facts.clock_hz, facts.warp_instructions_per_s)


def cycles_of(extractor: Extractor, clip: Tensor, clock_hz: float, slots_hz: float) -> str:
    """Return the cycles per sample of a model whose channels fit one warp, as in pooled Dau1997.

    Args:
        extractor: The model on the GPU.
        clip: A clip on the device, so that only features are copied.
        clock_hz: Clock of the multiprocessors.
        slots_hz: Warp instructions that the whole device can start per second.
    """

    def seconds(count: int) -> float:
        clips: Any = [clip] * count
        return best_of(lambda: extractor.extract(clips), _REPEATS)

    alone = seconds(1) * clock_hz / len(clip)
    per_clip, count = as_large_as_fits(lambda count: seconds(count) / count, CLIPS)
    return (
        f"a sample takes {alone:,.0f} cycles for one warp alone, and "
        f"{per_clip * slots_hz / len(clip):,.0f} instructions' time a warp with {count} clips, at "
        "the highest clock with all schedulers busy"
    )


def markdown(command: str, checks: Sequence[Check], speeds: Sequence[Speed]) -> str:
    """Return heading, machine, checks, and speeds if they were measured, as Markdown."""
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
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
