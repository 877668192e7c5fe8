"""Checks of models: kernels against plain loops, the GPU against the CPU, and their speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.jobs.doctor.checks import Check, State, checked, machine_line
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.machine import processor_name
from earmill.pipeline.common.text import named_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from amtcore.features.feature_model import Extractor

FS_HZ = 16000.0
#: A plain loop takes milliseconds per sample.
SAMPLES = 200
#: Signals of the loudness models must fill their longest window.
LOUDNESS_SAMPLES = 2400
RMS = 0.1
#: Largest relative error of an output; the order of sums differs, and onsets magnify that.
BOUNDS = {"float64": 1e-10, "float32": 1e-4}
#: Magnitude below which an output is rounding noise.
_FLOOR = {"float64": 1e-12, "float32": 1e-6}


class UnequalError(EarmillError, AssertionError):
    """Two computations of the same numbers differ."""


def kernel_checks() -> Iterator[Check]:
    """Yield one check a model; together they run every family of kernels."""
    import amtcore

    # Models are small: few channels and short filters.
    few, short = (300.0, 1200.0), {"order": 64}
    mono, long = (1, SAMPLES), (1, LOUDNESS_SAMPLES)
    models: Mapping[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
        "dau1997": (mono, lambda **dtype: amtcore.Dau1997(FS_HZ, *few, **dtype)),
        "osses2021": (
            mono,
            lambda **dtype: amtcore.Osses2021(
                FS_HZ, *few, headphone_kwargs=short, middleear_kwargs=short, **dtype
            ),
        ),
        "king2019": (mono, lambda **dtype: amtcore.King2019(FS_HZ, basef=1000.0, **dtype)),
        "paulick2024": (
            mono,
            lambda **dtype: amtcore.Paulick2024(FS_HZ, *few, 3, outerear_kwargs=short, **dtype),
        ),
        "glasberg2002": (long, lambda **dtype: amtcore.Glasberg2002(FS_HZ, **dtype)),
        "moore2016": ((1, 2, LOUDNESS_SAMPLES), lambda **dtype: amtcore.Moore2016(**dtype)),
        "lif": ((1, SAMPLES, 3), lambda **dtype: amtcore.LIFExodus((3,), 0.01, 0.005, **dtype)),
    }
    for name, (shape, build) in models.items():
        yield checked(f"kernels of {name}", partial(_against_plain_loops, shape, build))


def _against_plain_loops(shape: tuple[int, ...], build: Callable[..., Any]) -> str:
    import torch

    generator = torch.Generator().manual_seed(0)
    signal = RMS * torch.randn(shape, generator=generator, dtype=torch.float64)
    errors = []
    for name, bound in BOUNDS.items():
        dtype = getattr(torch, name)
        kernel, loop, x = build(dtype=dtype), build(dtype=dtype), signal.to(dtype)
        for stage in loop.modules():
            if hasattr(stage, "backend"):
                stage.backend = "reference"
        with torch.no_grad():
            error = worst_error(_outputs(kernel(x)), _outputs(loop(x)), _FLOOR[name])
        if not error <= bound:
            raise UnequalError(
                f"{name} kernels differ from their plain loops by {error:.1e}, expected at most "
                f"{bound:.0e}; do not use this machine's features, and report this line with the "
                "processor's"
            )
        errors.append(f"{name} within {error:.0e}")
    return f"compiled, equal to their plain loops: {', '.join(errors)}"


def _outputs(result: Any) -> list[Tensor]:
    """Return all tensors of a model's output."""
    from torch import Tensor

    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [leaf for part in parts for leaf in _outputs(part)]


def as_array(values: Any) -> NDArray[Any]:
    """Return frames of any device as an array."""
    from torch import Tensor

    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def worst_error(got: Sequence[Any], expected: Sequence[Any], floor: float) -> float:
    """Return the largest relative error of an array; infinity if a shape differs, or a value is not
    finite. An array of zeros has the absolute error instead."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        a, b = as_array(one).astype(np.float64), as_array(other).astype(np.float64)
        if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return float("inf")
        size = float(np.linalg.norm(b)) + floor * max(b.size, 1) ** 0.5
        worst = max(worst, float(np.linalg.norm(a - b)) / (size or 1.0))
    return worst


#: Seconds of clips; different lengths share a warp. The interpreter needs seconds for each clip.
SECONDS = {"cuda": (0.5, 0.05, 0.3, 0.2), "interpreted": (0.012, 0.02)}
#: Models with spectra or Hilbert envelopes, whose sums a library orders for each device.
WITH_TRANSFORMS = ("king2019", "glasberg2002", "moore2016")
_TRANSFORMS_BOUND = 1e-4


def gpu_checks(*, wanted: bool) -> Iterator[Check]:
    """Yield the checks of the GPU; a missing GPU fails only if `wanted`."""
    from amtcore.errors import BackendError
    from amtcore.features.registry import BUILT_IN, build_extractor
    from amtcore.kernels.backends.chosen import gpu_backend

    try:
        backend = gpu_backend().name
    except BackendError as error:
        state = State.FAILED if wanted else State.NO
        yield Check("GPU", state, str(error).removeprefix("no GPU: "))
        return
    yield checked("GPU", lambda: _facts(backend))
    yield checked("PTX", lambda: _probe(backend))
    for name in BUILT_IN:
        what = f"{name} on the GPU"
        try:
            there = build_extractor(name, backend=backend)
        except Exception as error:
            yield Check(what, State.FAILED, named_line(error))
            continue
        if there.backend.name == "cpu":
            yield Check(what, State.NO, "stays on the CPU, whatever the device")
        else:
            yield checked(what, partial(_against_cpu, name, build_extractor(name), there))


def _facts(backend: str) -> str:
    if backend == "interpreted":
        return "none: AMTCORE_GPU puts the interpreter of PTX in its place"
    from amtcore.kernels.warp.driver.device_facts import device_facts

    return str(device_facts())


def _probe(backend: str) -> str:
    from amtcore.kernels.backends.chosen import get_backend
    from amtcore.kernels.backends.warp import WarpBackend
    from amtcore.kernels.warp.driver.probe import probe

    found = get_backend(backend)
    assert isinstance(found, WarpBackend)
    probe(found.launcher)
    return f"loaded and launched: {found.name} adds two vectors"


def _against_cpu(name: str, here: Extractor, there: Extractor) -> str:
    clips = [noise(here, seconds, seed) for seed, seconds in enumerate(SECONDS[there.backend.name])]
    pairs = [
        (as_array(gpu[stream.name]), as_array(cpu[stream.name]))
        for gpu, cpu in zip(there.extract(clips), here.extract(clips), strict=True)
        for stream in here.streams
    ]
    if all(np.array_equal(gpu, cpu) for gpu, cpu in pairs):
        return f"equal to the CPU bit for bit in {sum(cpu.size for _, cpu in pairs):,} values"
    got, expected = zip(*pairs, strict=True)
    error = worst_error(got, expected, 0.0)
    if name in WITH_TRANSFORMS and error <= _TRANSFORMS_BOUND:
        return f"within {error:.0e} of the CPU, where transforms are another library's"
    raise UnequalError(
        f"differs from the CPU by {error:.1e}, expected the same numbers; use device cpu, and "
        "report this line with the GPU's"
    )


def noise(extractor: Extractor, seconds: float, seed: int) -> NDArray[np.float32]:
    """Return noise at a model's rate for each of its ears."""
    samples = (max(extractor.input_channels), round(seconds * extractor.fs_hz))
    wave = np.random.default_rng(seed).standard_normal(samples).astype(np.float32)
    return np.float32(0.05) * (wave if samples[0] > 1 else wave[0])


#: Clips of a launch that fills a GPU; fewer if its memory is too small.
CLIPS = 1500
CLIP_S = 4.0
_REPEATS = 2


@dataclass(frozen=True)
class Speed:
    """Speed of a model in seconds of audio per second."""

    model: str
    cpu: float  # on all cores
    gpu: float | None = None  # with samples and features copied; None without a GPU
    clips: int = 0  # of a launch on the GPU

    def __str__(self) -> str:
        on_gpu = f", {self.gpu:,.0f} on the GPU ({self.clips} clips)" if self.gpu else ""
        return f"{self.cpu:,.0f} x real time on the CPU{on_gpu}"


def speed_checks(speeds: list[Speed], *, gpu: bool) -> Iterator[Check]:
    """Measure each model and append its speed to `speeds`."""
    from amtcore.features.registry import BUILT_IN

    def measure(name: str) -> str:
        speeds.append(_measured(name, gpu))
        return str(speeds[-1])

    for name in BUILT_IN:
        yield checked(f"speed of {name}", partial(measure, name))
    if gpu:
        yield checked("cycles of dau1997", _cycles)


def gpu_answers(checks: list[Check]) -> bool:
    """Return True if a real GPU runs kernels; the interpreter's speed means nothing."""
    good = {check.what: check.text for check in checks if check.state is State.OK}
    return "PTX" in good and not good.get("GPU", "none").startswith("none")


def _measured(name: str, gpu: bool) -> Speed:
    from amtcore.features.registry import build_extractor
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

    from amtcore.features.registry import build_extractor
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
        rows = []
        for speed in speeds:
            gpu_cells = ("", "") if speed.gpu is None else (f"{speed.gpu:.0f}", str(speed.clips))
            rows.append((speed.model, f"{speed.cpu:.0f}", *gpu_cells))
        parts += [
            "Seconds of audio per second, pooled to default streams, samples and features copied.",
            table(("model", "CPU", "GPU", "clips in a launch"), rows),
        ]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
