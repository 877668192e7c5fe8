"""Times real time of every model, on the processor and on the GPU, and cycles a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from earmill.jobs.doctor.check import Check, State, checked
from earmill.jobs.doctor.gpu import noise

if TYPE_CHECKING:
    from amtcore.features.base import Extractor

#: A launch that fills a GPU; fewer where its memory does not hold so many.
CLIPS = 1500
CLIP_S = 4.0
_REPEATS = 2


@dataclass(frozen=True)
class Speed:
    """How fast a model is, in seconds of audio per second.

    Args:
        model: Its name.
        cpu: On all cores of the processor.
        gpu: On the GPU, with samples and features copied; None without one.
        clips: In a launch there.
    """

    model: str
    cpu: float
    gpu: float | None = None
    clips: int = 0

    def __str__(self) -> str:
        on_gpu = f", {self.gpu:,.0f} on the GPU ({self.clips} clips)" if self.gpu else ""
        return f"{self.cpu:,.0f} x real time on the CPU{on_gpu}"


def speed_checks(speeds: list[Speed], *, gpu: bool) -> Iterator[Check]:
    """Measure each model; what was measured is appended to `speeds`."""
    from amtcore.features.registry import BUILT_IN

    for name in BUILT_IN:

        def measure(name: str = name) -> str:
            speeds.append(_measured(name, gpu))
            return str(speeds[-1])

        yield checked(f"speed of {name}", measure)
    if gpu:
        yield checked("cycles of dau1997", _cycles)


def gpu_answers(checks: list[Check]) -> bool:
    """Whether a real GPU was found and runs kernels: the interpreter's speed says nothing."""
    good = {check.what: check.text for check in checks if check.state is State.OK}
    return "PTX" in good and not good.get("GPU", "none").startswith("none")


def _measured(name: str, gpu: bool) -> Speed:
    from amtcore.features.build import build_extractor
    from earmill.pipeline.planning.cost import times_real_time, warm_up

    extractor = build_extractor(name)
    warm_up([extractor])
    cpu = times_real_time([extractor])
    if not gpu:
        return Speed(name, cpu)
    rate, clips = gpu_rate(build_extractor(name, backend="cuda"))
    return Speed(name, cpu, rate, clips)


def gpu_rate(extractor: Extractor, clips: int = CLIPS, clip_s: float = CLIP_S) -> tuple[float, int]:
    """Seconds of audio per second, and the clips in a launch that memory allowed."""
    from amtcore.errors import DeviceMemoryError
    from amtcore.kernels.warp.driver.failures import device_errors

    clip = noise(extractor, clip_s, 0)
    while True:
        try:
            with device_errors(f"extracting {clips} clips"):
                seconds = best_of(partial(extractor.extract, [clip] * clips), _REPEATS)
        except DeviceMemoryError:
            if clips == 1:
                raise
            clips //= 2
        else:
            return clips * clip_s / seconds, clips


def best_of(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, after one that loads kernels."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _cycles() -> str:
    """Of pooled Dau1997, whose 31 channels are one warp; samples lie on the device."""
    import torch

    from amtcore.features.build import build_extractor
    from amtcore.kernels.warp.driver.device_facts import device_facts

    facts, extractor = device_facts(), build_extractor("dau1997", backend="cuda")
    clip: Any = torch.from_numpy(noise(extractor, CLIP_S, 0)).cuda()

    def seconds(clips: int) -> float:
        return best_of(lambda: extractor.extract([clip] * clips), _REPEATS)

    alone = seconds(1) * facts.clock_hz / len(clip)
    filled = seconds(CLIPS) * facts.warp_instructions_per_s / (CLIPS * len(clip))
    return (
        f"{alone:,.0f} a sample for one warp alone, {filled:,.0f} a sample and warp in {CLIPS}, "
        "counted at the highest clock over all schedulers"
    )
