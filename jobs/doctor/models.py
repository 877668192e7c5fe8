"""Checks of models: kernels against plain loops, the GPU against the CPU, and their speed."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.jobs.doctor.checks import Check, State, checked
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.text import named_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from amtcore.features.feature_model import Extractor
    from amtcore.kernels.backend import Backend

FS_HZ = 16000.0
#: A plain loop takes milliseconds per sample.
SAMPLES = 200
#: Signals of the loudness models must fill their longest window.
LOUDNESS_SAMPLES = 2400
RMS = 0.1
#: Largest relative error of an output, because the order of sums differs and onsets magnify that;
#: magnitude below which an output is rounding noise.
BOUNDS = {"float64": (1e-10, 1e-12), "float32": (1e-4, 1e-6)}


class UnequalError(EarmillError, AssertionError):
    """Two computations of the same numbers differ."""


def kernel_checks() -> Iterator[Check]:
    """Yield one check a model; together they run every family of kernels."""
    import amtcore

    # Models are small: few channels and short filters.
    few, short = (300.0, 1200.0), {"order": 64}
    mono, long = (1, SAMPLES), (1, LOUDNESS_SAMPLES)
    models: Mapping[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
        "dau1997": (mono, partial(amtcore.Dau1997, FS_HZ, *few)),
        "osses2021": (
            mono,
            partial(amtcore.Osses2021, FS_HZ, *few, headphone_kwargs=short, middleear_kwargs=short),
        ),
        "king2019": (mono, partial(amtcore.King2019, FS_HZ, basef=1000.0)),
        "paulick2024": (mono, partial(amtcore.Paulick2024, FS_HZ, *few, 3, outerear_kwargs=short)),
        "glasberg2002": (long, partial(amtcore.Glasberg2002, FS_HZ)),
        "moore2016": ((1, 2, LOUDNESS_SAMPLES), amtcore.Moore2016),
        "lif": ((1, SAMPLES, 3), partial(amtcore.LIFExodus, (3,), 0.01, 0.005)),
    }
    for name, (shape, build) in models.items():
        yield checked(f"kernels of {name}", partial(_against_plain_loops, shape, build))


def _against_plain_loops(shape: tuple[int, ...], build: Callable[..., Any]) -> str:
    import torch

    generator = torch.Generator().manual_seed(0)
    signal = RMS * torch.randn(shape, generator=generator, dtype=torch.float64)
    errors = []
    for name, (bound, floor) in BOUNDS.items():
        dtype = getattr(torch, name)
        kernel, loop, x = build(dtype=dtype), build(dtype=dtype), signal.to(dtype)
        for stage in loop.modules():
            if hasattr(stage, "backend"):
                stage.backend = "reference"
        with torch.no_grad():
            error = worst_error(_outputs(kernel(x)), _outputs(loop(x)), floor)
        if not error <= bound:
            raise UnequalError(
                f"{name} kernels differ from their plain loops by {error:.1e}, expected at most "
                f"{bound:.0e}; do not use this machine's features, and report this line with the "
                "processor's"
            )
        errors.append(f"{name} within {error:.0e}")
    return f"compiled, equal to their plain loops: {', '.join(errors)}"


def _outputs(result: Any) -> list[Tensor]:
    from torch import Tensor

    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [leaf for part in parts for leaf in _outputs(part)]


def as_array(values: Any) -> NDArray[Any]:
    from torch import Tensor

    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def worst_error(got: Sequence[Any], expected: Sequence[Any], floor: float) -> float:
    """Return the largest relative error of an array (absolute for an array of zeros); infinity if a
    shape differs, or a value is not finite."""
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
    from amtcore.kernels.devices import gpu_backend

    try:
        backend = gpu_backend()
    except BackendError as error:
        state = State.FAILED if wanted else State.NO
        yield Check("GPU", state, str(error).removeprefix("no GPU: "))
        return
    yield checked("GPU", partial(_gpu_facts, backend.name))
    yield checked("PTX", partial(_launch, backend))
    for name in BUILT_IN:
        what = f"{name} on the GPU"
        try:
            there = build_extractor(name, backend=backend.name)
        except Exception as error:
            yield Check(what, State.FAILED, named_line(error))
            continue
        if there.backend.name == "cpu":
            yield Check(what, State.NO, "stays on the CPU, whatever the device")
        else:
            yield checked(what, partial(_against_cpu, name, build_extractor(name), there))


def _gpu_facts(backend: str) -> str:
    if backend == "interpreted":
        return "none: AMTCORE_GPU puts the interpreter of PTX in its place"
    from amtcore.kernels.gpu.device import device_facts

    return str(device_facts())


def _launch(backend: Backend) -> str:
    from amtcore.kernels.gpu.backend import GpuBackend

    assert isinstance(backend, GpuBackend)
    backend.check()
    return f"loaded and launched: {backend.name} adds two vectors"


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
    samples = (max(extractor.input_channels), round(seconds * extractor.fs_hz))
    wave = np.random.default_rng(seed).standard_normal(samples).astype(np.float32)
    return np.float32(0.05) * (wave if samples[0] > 1 else wave[0])


#: Clips of a launch that fills a GPU; fewer if its memory is too small.
CLIPS = 1500
CLIP_S = 4.0
#: Clips of a call on the CPU.
CPU_CLIPS = 4
_REPEATS = 2


def speed_checks(*, gpu: bool) -> Iterator[Check]:
    """Measure seconds of audio per second of each model, on all cores and on the GPU. Samples and
    features are copied to and from the GPU."""
    from amtcore.features.registry import BUILT_IN, build_extractor

    def measure(name: str) -> str:
        extractor = build_extractor(name)
        sounds = [np.atleast_2d(noise(extractor, CLIP_S, 0))[0]] * CPU_CLIPS
        seconds = best_of(partial(extractor.extract, sounds), 1)
        text = f"{CPU_CLIPS * CLIP_S / seconds:,.0f} x real time on the CPU"
        if gpu and (there := build_extractor(name, backend="cuda")).backend.name != "cpu":
            rate, clips = gpu_rate(there)
            text += f", {rate:,.0f} on the GPU ({clips} clips)"
        return text

    for name in BUILT_IN:
        yield checked(f"speed of {name}", partial(measure, name))


def gpu_answers(checks: list[Check]) -> bool:
    """Return True if a real GPU runs kernels; the interpreter's speed means nothing."""
    good = {check.what: check.text for check in checks if check.state is State.OK}
    return "PTX" in good and not good.get("GPU", "none").startswith("none")


def gpu_rate(extractor: Extractor) -> tuple[float, int]:
    """Return seconds of audio per second, and the clips of a launch that fit the memory."""
    clip = noise(extractor, CLIP_S, 0)
    seconds, clips = as_large_as_fits(
        lambda count: best_of(partial(extractor.extract, [clip] * count), _REPEATS), CLIPS
    )
    return clips * CLIP_S / seconds, clips


def as_large_as_fits(measure: Callable[[int], float], count: int) -> tuple[float, int]:
    """Measure `count` clips, or half as many until they fit the GPU's memory; return the count."""
    from amtcore.errors import DeviceMemoryError
    from amtcore.kernels.gpu.driver import device_errors

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
    return min(timeit.repeat(run, number=1, repeat=repeats))
