"""Checks of a machine: processor, memory, versions, kernel cache, Ray and storage."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from earmill.pipeline.common.errors import EarmillError, OutputError, RunStopped
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.redact import redact
from earmill.pipeline.common.text import named_line, one_line
from earmill.pipeline.storage.retrying import store_errors


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
