"""Kernels loaded once and launched on a GPU, in torch's primary context and current stream.

A launch returns at once and keeps no tensor alive. A tensor of the current stream may be freed
after the launch: torch's allocator reuses its memory only for later work on that stream. For a
tensor of another stream the caller must use `Tensor.record_stream`.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from amtcore.errors import BackendError, ParameterError, WrongDeviceError
from amtcore.kernels.gpu.device import FORKED, Load, find_device
from amtcore.kernels.gpu.driver import CAPTURE_ADVICE, Driver, device_errors, load_library
from amtcore.kernels.gpu.launcher import THREADS, Kernel, Launcher

#: CUjit_option: log buffers of the driver's compiler, and their sizes.
_INFO_LOG, _INFO_BYTES, _ERROR_LOG, _ERROR_BYTES = 3, 4, 5, 6
_LOG_BYTES = 16384
_LOG_LINES = 3
#: CUresult codes of rejected PTX.
_NOT_TAKEN = {200, 209, 218, 221, 222, 223, 300}
_PARAMETER = re.compile(r"\.param\s+\.(\w+)")


@dataclass(frozen=True)
class Function:
    """A kernel on the device: CUfunction, count of 64-bit parameters, warps a multiprocessor."""

    handle: int
    parameters: int
    warps_per_sm: int


class Modules:
    """Kernels of one device; `is_capturing` tells if a CUDA graph is being captured."""

    def __init__(self, driver: Driver, is_capturing: Callable[[], bool]) -> None:
        self._driver, self._is_capturing = driver, is_capturing
        self._loaded: dict[Kernel, Function] = {}
        self._lock = threading.Lock()

    def function(self, kernel: Kernel) -> Function:
        """Return the kernel, loaded on the first call; the device's context must be current.

        Raises:
            BackendError: The driver rejects the PTX, or a graph is being captured.
        """
        found = self._loaded.get(kernel)
        if found is not None:
            return found
        with self._lock:
            if kernel not in self._loaded:
                self._loaded[kernel] = self._load(kernel)
            return self._loaded[kernel]

    def _load(self, kernel: Kernel) -> Function:
        parameters = count_parameters(kernel)
        if self._is_capturing():
            raise BackendError(f"loading kernel {kernel.name}: {CAPTURE_ADVICE}")
        module = self._module(kernel)
        handle = c_void_p()
        doing = f"loading kernel {kernel.name}"
        self._driver.call(
            "cuModuleGetFunction", byref(handle), module, kernel.name.encode(), doing=doing
        )
        # Load the code now: a driver may do so at the first launch only, which may be captured.
        if self._driver.has("cuFuncLoad"):
            self._driver.call("cuFuncLoad", handle, doing=doing)
        warps = c_int()
        self._driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            *(byref(warps), handle, THREADS, 0),
            doing=doing,
        )
        if warps.value < 1 or handle.value is None:
            raise BackendError(f"kernel {kernel.name} needs more than this GPU has; use the CPU")
        return Function(handle.value, parameters, warps.value)

    def _module(self, kernel: Kernel) -> c_void_p:
        info, errors = (ctypes.create_string_buffer(_LOG_BYTES) for _ in range(2))
        options = (c_uint * 4)(_INFO_LOG, _INFO_BYTES, _ERROR_LOG, _ERROR_BYTES)
        # Values of options: addresses of logs, and sizes as integers.
        values = (c_void_p * 4)(
            ctypes.addressof(info), _LOG_BYTES, ctypes.addressof(errors), _LOG_BYTES
        )
        module = c_void_p()
        text = c_char_p(kernel.ptx.encode())
        code = self._driver.code(
            "cuModuleLoadDataEx", byref(module), text, len(options), options, values
        )
        if code in _NOT_TAKEN:
            raise self._rejection(kernel, code, errors.value or info.value)
        if code:
            raise self._driver.error(code, f"loading kernel {kernel.name}")
        return module

    def _rejection(self, kernel: Kernel, code: int, log: bytes) -> BackendError:
        lines = [line.strip() for line in log.decode(errors="replace").splitlines()]
        said = " | ".join([line for line in lines if line][:_LOG_LINES]) or "no log"
        major, minor = self._driver.version()
        return BackendError(
            f"the driver rejects the PTX of kernel {kernel.name}: {self._driver.name_of(code)}: "
            f"{said}; the PTX is version {_directive(kernel, 'version')} for "
            f"{_directive(kernel, 'target')}, the driver knows CUDA {major}.{minor}: update the "
            "NVIDIA driver, or use the CPU"
        )


def count_parameters(kernel: Kernel) -> int:
    """Return the number of the entry's parameters, all of which the driver reads.

    Raises:
        BackendError: There is no such entry, or it has a parameter that is not 64 bits.
    """
    entry = re.search(rf"\.entry\s+{re.escape(kernel.name)}\s*(?:\(([^)]*)\))?\s", kernel.ptx)
    if entry is None:
        raise BackendError(f"the PTX of kernel {kernel.name} has no entry of this name")
    types = _PARAMETER.findall(entry.group(1) or "")
    if wrong := [each for each in types if each not in ("u64", "b64", "s64")]:
        raise BackendError(
            f"kernel {kernel.name}: expected parameters of 64 bits only, got {', '.join(wrong)}"
        )
    return len(types)


def _directive(kernel: Kernel, name: str) -> str:
    found = re.search(rf"^\.{name}\s+(\S+)", kernel.ptx, re.M)
    return found.group(1) if found else "unknown"


_MOST_WARPS = 2**31 - 1
_WORD_BYTES = 8


class CudaLauncher(Launcher):
    """Runs kernels on one GPU; any number of threads may use it. Raises like `find_device`."""

    name = "cuda"

    def __init__(
        self, device: torch.device | str | int = "cuda", *, load: Load = load_library
    ) -> None:
        self.device = find_device(device, load)
        self._driver = Driver(load())
        self._process = os.getpid()
        self._context = self._context_of_torch()
        self._multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._modules = Modules(self._driver, self._is_capturing)

    def resident_warps(self, kernel: Kernel) -> int:
        """Return the resident warps; the first call for a kernel loads it."""
        self._refuse_forks()
        with self._current():
            return self._modules.function(kernel).warps_per_sm * self._multiprocessors

    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        """Launch on `torch.cuda.current_stream(device)`.

        Raises:
            WrongDeviceError, ParameterError: An argument has a wrong device, type or layout.
            DeviceMemoryError, DeviceLostError: This or an earlier kernel failed.
            BackendError: The kernel was not loaded before a CUDA graph is captured.
        """
        self._refuse_forks()
        if not 1 <= warps <= _MOST_WARPS:
            raise ParameterError(f"expected 1 to {_MOST_WARPS} warps, got {warps}")
        words = pack(arguments, self.device)
        pointers = (c_void_p * len(words))(
            *(ctypes.addressof(words) + _WORD_BYTES * k for k in range(len(words)))
        )
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._current():
            function = self._modules.function(kernel)
            if function.parameters != len(words):
                raise ParameterError(
                    f"kernel {kernel.name}: expected {function.parameters} arguments, got "
                    f"{len(words)}"
                )
            grid, block, shared_bytes = (warps, 1, 1), (THREADS, 1, 1), 0
            self._driver.call(
                "cuLaunchKernel",
                *(function.handle, *grid, *block, shared_bytes, stream, pointers, None),
                doing=f"launching kernel {kernel.name}",
            )

    def _context_of_torch(self) -> int:
        doing = f"starting {self.device}"
        with torch.cuda.device(self.device), device_errors(doing):
            torch.zeros(1, device=self.device)  # the primary context exists from here on
            context = self._current_context()
        if not context:
            raise BackendError(f"{doing}: torch has made no CUDA context; please report it")
        return context

    def _current_context(self) -> int:
        context = c_void_p()
        self._driver.call("cuCtxGetCurrent", byref(context), doing=f"using {self.device}")
        return context.value or 0

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make torch's context current on this thread, within the context."""
        if self._current_context() == self._context:
            yield
            return
        doing = f"using {self.device}"
        self._driver.call("cuCtxPushCurrent_v2", self._context, doing=doing)
        try:
            yield
        finally:
            self._driver.code("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _is_capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def _refuse_forks(self) -> None:
        if os.getpid() != self._process:
            raise BackendError(FORKED)


def pack(arguments: Sequence[Tensor | int], device: torch.device) -> ctypes.Array[c_uint64]:
    """Convert each argument to a 64-bit word: an address or an integer, two's complement.

    Raises:
        WrongDeviceError: A tensor lies on another device.
        ParameterError: A tensor is not contiguous, or has a half type; an integer is too large.
    """
    words = [
        _address(k, each, device) if isinstance(each, Tensor) else _integer(k, each)
        for k, each in enumerate(arguments)
    ]
    return (c_uint64 * len(words))(*words)


def _address(k: int, tensor: Tensor, device: torch.device) -> int:
    if tensor.device != device:
        raise WrongDeviceError(
            f"argument {k} of a kernel: expected a tensor on {device}, got one on "
            f"{tensor.device}; move all tensors and the module to one device"
        )
    if not tensor.is_contiguous():
        raise ParameterError(
            f"argument {k} of a kernel: expected a contiguous tensor, got strides "
            f"{tensor.stride()} of shape {tuple(tensor.shape)}; call .contiguous() on it"
        )
    inexact = tensor.is_floating_point() or tensor.is_complex()
    if inexact and tensor.dtype not in (torch.float32, torch.float64):
        raise ParameterError(
            f"argument {k} of a kernel: expected float32 or float64, got {tensor.dtype}; convert "
            "it, or leave autocast"
        )
    return tensor.data_ptr()


def _integer(k: int, value: int) -> int:
    number = operator.index(value)
    if not -(2**63) <= number < 2**64:
        raise ParameterError(f"argument {k} of a kernel: {number} does not fit in 64 bits")
    return number % 2**64
