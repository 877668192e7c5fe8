"""Checks of a machine: processor, memory, versions, kernel cache, Ray, storage. Checks of models:
kernels against plain loops, the GPU against the CPU, speed."""

from __future__ import annotations

import os
import platform
import secrets
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.errors import EarmillError, OutputError, RunStopped
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.redact import redact
from earmill.pipeline.common.text import named_line, one_line
from earmill.pipeline.storage.retrying import store_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from amtcore.features.feature_model import Extractor
    from amtcore.kernels.backend import Backend


class State(StrEnum):
    OK = "ok"
    #: Missing, and not asked for.
    NO = "no"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    what: str
    state: State
    text: str


def checked(what: str, look: Callable[[], str]) -> Check:
    """Run a check; an exception becomes a failed check, so that the next check follows."""
    from amtcore.errors import AmtError

    try:
        return Check(what, State.OK, look())
    except (EarmillError, AmtError) as error:
        return Check(what, State.FAILED, one_line(error))
    except ModuleNotFoundError as error:
        return Check(what, State.NO, one_line(missing_package(error)))
    except Exception as error:
        return Check(what, State.FAILED, named_line(error, where=True))


#: Features that make the kernels' vectors fast, on x86 and Arm.
_FEATURES = ("avx2", "fma", "avx512f", "neon", "sve")
_PACKAGES = (
    *("earmill", "amtcore", "torch", "torchaudio", "numpy", "scipy", "numba", "llvmlite"),
    *("ray", "numcodecs", "pyarrow", "fsspec", "s3fs", "obstore", "av", "soundfile", "soxr"),
)


def machine_checks() -> Iterator[Check]:
    # Other programs slow down every speed that is measured below.
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    yield checked("processor", lambda: f"{processor()}{load}")
    yield checked("memory", _memory)
    yield checked("versions", _versions)
    yield checked("kernel cache", _kernel_cache)


def processor() -> str:
    """Return the processor with its vectors: a cloud's name may stand for several generations."""
    from earmill.pipeline.common.machine import cores, processor_name

    if find_spec("llvmlite") is None:
        return f"{processor_name()}, {cores()} cores"
    from llvmlite import binding

    has = binding.get_host_cpu_features()
    vectors = ", ".join(name for name in _FEATURES if has.get(name)) or "no vectors"
    return f"{processor_name()} ({binding.get_host_cpu_name()}; {vectors}), {cores()} cores"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"


def _versions() -> str:
    from earmill.pipeline.dataset.provenance import package_versions

    found = package_versions()
    with suppress(ModuleNotFoundError):
        import torch

        found = found | {"torch": str(torch.__version__)}  # names its version of CUDA
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return ", ".join([python, *(f"{name} {found.get(name, 'missing')}" for name in _PACKAGES)])


def _kernel_cache() -> str:
    from amtcore.kernels.vector.kernel_cache import own_folder, sources_digest

    sources_digest()  # raises if other users can write to the sources
    folder = own_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    shown = folder
    with suppress(ValueError, RuntimeError):  # no home, or the cache lies elsewhere
        shown = Path("~") / folder.relative_to(Path.home())
    if os.access(existing, os.W_OK):
        return f"{shown}, writable by nobody else"
    return f"{shown} cannot be written: every process compiles anew; set NUMBA_CACHE_DIR"


#: A worker process of Ray imports Python and Ray, no models.
RAY_TASK_WITHIN_S = 60.0


def ray_check() -> Check:
    """Start a Ray, or use the Ray of this process, and run a task."""
    return checked("Ray", _run_task)


def _run_task() -> str:
    from earmill.pipeline.driver.executors.ray import live_nodes, ray_session

    # RAY_ADDRESS may name a cluster elsewhere, so none is joined.
    with ray_session():
        import ray
        from ray.exceptions import GetTimeoutError

        answer = ray.remote(version).options(num_cpus=1).remote("earmill")
        try:
            worker_version = ray.get(answer, timeout=RAY_TASK_WITHIN_S)
        except GetTimeoutError as error:
            raise RunStopped(
                f"Ray starts, but ran no task within {RAY_TASK_WITHIN_S:.0f} s; look whether other "
                "programs take this machine's cores or memory"
            ) from error
        cpus = sum(node.cpus for node in live_nodes())
        return f"runs a task ({cpus} CPUs, earmill {worker_version} in its worker)"


def storage_check(uri: str, options: Mapping[str, Any]) -> Check:
    """Create, read back, create again, list and delete a small file below a URI."""
    return checked(f"storage {redact(uri)}", lambda: _use_storage(uri, options))


def _use_storage(uri: str, options: Mapping[str, Any]) -> str:
    from earmill.pipeline.storage.layout import Layout

    def expect(step: str, good: bool) -> None:
        if not good:
            raise OutputError(
                f"this store does not {step} a file that was just written; use a local folder, "
                "s3:// or gs://"
            )

    with store_errors(redact(uri)):
        layout = Layout.open(uri, options)
        layout.check_writable()
        folder = f"earmill-doctor-{secrets.token_hex(4)}"
        file, content = f"{folder}/probe", secrets.token_bytes(1024)
        try:
            layout.create_own(file, content)
            expect("read back", layout.read_bytes(file) == content)
            expect("refuse to overwrite", not layout.put_if_absent(file, b"second"))
            expect("list", layout.list(folder) == [file])
        finally:
            layout.delete(folder)
        expect("delete", layout.list(folder) == [])
    return "created, read back, not overwritten, listed, deleted"


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
