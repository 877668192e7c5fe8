"""Checks of models: kernels against plain loops, and the GPU against the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.jobs.doctor.checks import Check, State, checked
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.text import named_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from amtcore.features.base import Extractor

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
    for name, build in _models().items():
        yield checked(f"kernels of {name}", partial(_against_plain_loops, build))


def _models() -> Mapping[str, Callable[..., nn.Module]]:
    """Return functions that build small models, with few channels and short filters."""
    import amtcore

    few, short = (300.0, 1200.0), {"order": 64}
    return {
        "dau1997": lambda **dtype: amtcore.Dau1997(FS_HZ, *few, **dtype),
        "osses2021": lambda **dtype: amtcore.Osses2021(
            FS_HZ, *few, headphone_kwargs=short, middleear_kwargs=short, **dtype
        ),
        "king2019": lambda **dtype: amtcore.King2019(FS_HZ, basef=1000.0, **dtype),
        "paulick2024": lambda **dtype: amtcore.Paulick2024(
            FS_HZ, *few, 3, outerear_kwargs=short, **dtype
        ),
        "glasberg2002": lambda **dtype: amtcore.Glasberg2002(FS_HZ, **dtype),
        "moore2016": lambda **dtype: amtcore.Moore2016(**dtype),
        "lif": lambda **dtype: amtcore.LIFExodus((3,), 0.01, 0.005, **dtype),
    }


def _against_plain_loops(build: Callable[..., Any]) -> str:
    import torch

    errors = []
    for name, bound in BOUNDS.items():
        dtype = getattr(torch, name)
        kernel, loop = build(dtype=dtype), build(dtype=dtype)
        for stage in loop.modules():
            if hasattr(stage, "backend"):
                stage.backend = "reference"
        x = _signal(kernel).to(dtype)
        with torch.no_grad():
            expected = _outputs(loop(x))
            error = worst_error(_outputs(kernel(x)), expected, _FLOOR[name])
        if not error <= bound:
            raise UnequalError(
                f"{name} kernels differ from their plain loops by {error:.1e}, expected at most "
                f"{bound:.0e}; do not use this machine's features, and report this line with the "
                "processor's"
            )
        errors.append(f"{name} within {error:.0e}")
    return f"compiled, equal to their plain loops: {', '.join(errors)}"


def _signal(model: Any) -> Tensor:
    import torch

    import amtcore

    shapes: dict[type, tuple[int, ...]] = {
        amtcore.Moore2016: (1, 2, LOUDNESS_SAMPLES),
        amtcore.Glasberg2002: (1, LOUDNESS_SAMPLES),
        amtcore.LIFExodus: (1, SAMPLES, 3),
    }
    generator = torch.Generator().manual_seed(0)
    shape = shapes.get(type(model), (1, SAMPLES))
    return RMS * torch.randn(shape, generator=generator, dtype=torch.float64)


def _outputs(result: Any) -> list[Tensor]:
    """Return all tensors of a model's output."""
    from torch import Tensor

    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [leaf for part in parts for leaf in _outputs(part)]


def worst_error(got: list[Tensor], expected: list[Tensor], floor: float) -> float:
    """Return the largest relative error of a tensor; infinity if a shape differs, or a value is not
    finite."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or not bool(a.isfinite().all()):
            return float("inf")
        size = float(b.double().norm()) + floor * max(b.numel(), 1) ** 0.5
        worst = max(worst, float((a.double() - b.double()).norm()) / size)
    return worst


#: Seconds of clips; different lengths share a warp. The interpreter needs seconds for each clip.
SECONDS = {"cuda": (0.5, 0.05, 0.3, 0.2), "interpreted": (0.012, 0.02)}
#: Models with spectra or Hilbert envelopes, whose sums a library orders for each device.
WITH_TRANSFORMS = ("king2019", "glasberg2002", "moore2016")
_TRANSFORMS_BOUND = 1e-4


def gpu_checks(*, wanted: bool) -> Iterator[Check]:
    """Yield the checks of the GPU; a missing GPU fails only if `wanted`."""
    from amtcore.errors import BackendError
    from amtcore.features.registry import BUILT_IN
    from amtcore.kernels.backends.chosen import gpu_backend

    try:
        backend = gpu_backend().name
    except BackendError as error:
        yield Check(
            "GPU", State.FAILED if wanted else State.NO, str(error).removeprefix("no GPU: ")
        )
        return
    yield checked("GPU", lambda: _facts(backend))
    yield checked("PTX", lambda: _probe(backend))
    for name in BUILT_IN:
        yield _model_check(name, backend)


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


def _model_check(name: str, backend: str) -> Check:
    from amtcore.features.build import build_extractor

    what = f"{name} on the GPU"
    try:
        there = build_extractor(name, backend=backend)
    except Exception as error:
        return Check(what, State.FAILED, named_line(error))
    if there.backend.name == "cpu":
        return Check(what, State.NO, "stays on the CPU, whatever the device")
    return checked(what, lambda: _against_cpu(name, build_extractor(name), there))


def _against_cpu(name: str, here: Extractor, there: Extractor) -> str:
    clips = [noise(here, seconds, seed) for seed, seconds in enumerate(SECONDS[there.backend.name])]
    pairs = [
        (as_array(got[stream.name]), as_array(expected[stream.name]))
        for got, expected in zip(there.extract(clips), here.extract(clips), strict=True)
        for stream in here.streams
    ]
    if all(np.array_equal(got, expected) for got, expected in pairs):
        return f"equal to the CPU bit for bit in {sum(b.size for _, b in pairs):,} values"
    error = max(_error(got, expected) for got, expected in pairs)
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


def as_array(values: Any) -> NDArray[Any]:
    """Return frames of any device as an array."""
    from torch import Tensor

    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the relative error; infinity for another shape or values that are not finite."""
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    size = float(np.linalg.norm(expected.astype(np.float64)))
    difference = float(np.linalg.norm(got.astype(np.float64) - expected))
    return difference / size if size else difference
