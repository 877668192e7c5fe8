"""Which backend computes: by the device of a tensor, or by name.

`AMTCORE_GPU=interpreted` in the environment puts the interpreter in the place of a GPU's driver.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

import torch
from torch import Tensor

from amtcore.errors import BackendError
from amtcore.kernels.backend import Backend
from amtcore.kernels.cpu.backend import CpuBackend
from amtcore.kernels.gpu.backend import GpuBackend

#: Names of the backends.
BACKENDS = ("cpu", "cuda", "interpreted")
#: Entry point group of `Launcher` classes that replace a GPU's driver.
LAUNCHERS = "amtcore.launchers"
_VARIABLE = "AMTCORE_GPU"

_cpu = CpuBackend()
_of_cpu_tensors: Backend = _cpu


def backend_of(x: Tensor) -> Backend:
    """Return the backend of the device of a tensor."""
    return _cuda(x.device) if x.is_cuda else _of_cpu_tensors


def get_backend(name: str) -> Backend:
    """Return a backend by its name.

    Raises:
        BackendError: The name is unknown, or there is no usable GPU.
    """
    if name == "cpu":
        return _cpu
    if name == "cuda":
        return gpu_backend()
    if name == "interpreted":
        return _interpreted()
    raise BackendError(f"expected a backend of {', '.join(BACKENDS)}, got {name!r}")


def gpu_backend() -> Backend:
    """Return the backend of the GPU, or the interpreter if the environment asks for it.

    Raises:
        BackendError: There is no usable GPU; the message has the reason and what to do.
    """
    stand_in = os.environ.get(_VARIABLE, "")
    if stand_in not in ("", "interpreted"):
        raise BackendError(f"expected {_VARIABLE} unset or 'interpreted', got {stand_in!r}")
    return _interpreted() if stand_in else _cuda(torch.device("cuda"))


@contextmanager
def use_backend(name: str) -> Iterator[Backend]:
    """Compute on CPU tensors with this backend, in the whole process, within the context.

    Without this context only extraction can use "interpreted".
    """
    global _of_cpu_tensors
    outer, backend = _of_cpu_tensors, get_backend(name)
    if backend.device.type != "cpu":
        raise BackendError(f"{name!r} computes on {backend.device} tensors, not on the CPU's")
    _of_cpu_tensors = backend
    try:
        yield backend
    finally:
        _of_cpu_tensors = outer


@functools.cache
def _interpreted() -> Backend:
    found = entry_points(group=LAUNCHERS, name="interpreted")
    if not found:
        raise BackendError(
            "the backend 'interpreted' is a distribution of its own: pip install "
            "amtcore-interpreter, or leave AMTCORE_GPU unset"
        )
    return GpuBackend(next(iter(found)).load()())


@functools.cache
def _on_gpu(index: int) -> Backend:
    from amtcore.kernels.gpu.cuda_launcher import CudaLauncher

    return GpuBackend(CudaLauncher(torch.device("cuda", index)))


def _cuda(device: torch.device) -> Backend:
    if device.index is None and torch.cuda.is_available():
        return _on_gpu(torch.cuda.current_device())
    return _on_gpu(device.index or 0)
