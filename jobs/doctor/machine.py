"""Processor, memory, versions, and where compiled kernels are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from earmill.jobs.doctor.check import Check, checked

#: What the kernels' vectors need to be fast on x86; other processors have names of their own.
_FEATURES = ("avx2", "fma", "avx512f", "neon", "sve")
_PACKAGES = (
    *("earmill", "torch", "torchaudio", "numpy", "scipy", "numba", "llvmlite"),
    *("ray", "numcodecs", "pyarrow", "fsspec", "s3fs", "av", "soundfile", "soxr"),
)


def machine_checks() -> Iterator[Check]:
    """What the machine is; nothing here is compared with anything."""
    yield checked("processor", _processor)
    yield checked("memory", _memory)
    yield checked("versions", _versions)
    yield checked("kernel cache", _kernel_cache, names_a_place=True)


def machine_line() -> str:
    """Processor, cores and the versions that decide speed, as benchmarks name a machine."""
    import platform

    return (
        f"{_named_processor()}; Python {platform.python_version()}, "
        f"torch {_version('torch')}, numba {_version('numba')}"
    )


def _processor() -> str:
    # What else runs here is in every speed that is measured below.
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{_named_processor()}{load}"


def _named_processor() -> str:
    """Clouds give one name to processors of several generations: vectors tell them apart."""
    from llvmlite import binding

    from earmill.pipeline.common.machine import cores, processor_name

    has = binding.get_host_cpu_features()
    features = [name for name in _FEATURES if has.get(name)]
    cpu = binding.get_host_cpu_name()
    vectors = ", ".join(features) or "no vectors"
    return f"{processor_name()} ({cpu}; {vectors}), {cores()} cores"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"


def _versions() -> str:
    import platform

    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return ", ".join([python, *(f"{name} {_version(name)}" for name in _PACKAGES)])


def _version(package: str) -> str:
    if package == "torch":
        import torch

        return str(torch.__version__)  # with the CUDA it is built for
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _kernel_cache() -> str:
    from amtcore.kernels.vector.source_digest import sources_digest
    from amtcore.kernels.warp.ptx_cache import cache_folder

    sources_digest()  # raises where others can write to it
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(existing, os.W_OK):
        return f"{_short(folder)}, writable by nobody else"
    return f"{_short(folder)} cannot be written: every process compiles anew; set NUMBA_CACHE_DIR"


def _short(folder: Path) -> str:
    try:
        return str(Path("~") / folder.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(folder)
