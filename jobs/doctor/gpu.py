"""The GPU: found, PTX loaded, and every model on it against the kernels of the processor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.jobs.doctor.check import Check, State, checked
from earmill.jobs.doctor.kernels import UnequalError
from earmill.pipeline.common.text import named_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amtcore.features.base import Extractor

#: Clips of several lengths, so that a warp takes more than one; the interpreter needs seconds each.
SECONDS = {"cuda": (0.5, 0.05, 0.3, 0.2), "interpreted": (0.012, 0.02)}
#: Spectra and Hilbert envelopes are a library's transforms, in its own order on every device.
WITH_TRANSFORMS = ("king2019", "glasberg2002", "moore2016")
_TRANSFORMS_BOUND = 1e-4


def gpu_checks(*, wanted: bool) -> Iterator[Check]:
    """Nothing more where there is none, which fails only if it is wanted."""
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
    from amtcore.kernels.warp.driver import CudaLauncher
    from amtcore.kernels.warp.driver.probe import probe
    from amtcore.kernels.warp.interpreter import InterpretedLauncher
    from amtcore.kernels.warp.launching import Launcher

    launcher: Launcher = InterpretedLauncher() if backend == "interpreted" else CudaLauncher()
    probe(launcher)
    return f"loaded and launched: {launcher.name} adds two vectors"


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
    """Noise at a model's rate, for each of its ears."""
    samples = (max(extractor.input_channels), round(seconds * extractor.fs_hz))
    wave = np.random.default_rng(seed).standard_normal(samples).astype(np.float32)
    return np.float32(0.05) * (wave if samples[0] > 1 else wave[0])


def as_array(values: Any) -> NDArray[Any]:
    """Frames, whichever device they come from."""
    from torch import Tensor

    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative; infinite for another shape or what is not finite."""
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    size = float(np.linalg.norm(expected.astype(np.float64)))
    difference = float(np.linalg.norm(got.astype(np.float64) - expected))
    return difference / size if size else difference
