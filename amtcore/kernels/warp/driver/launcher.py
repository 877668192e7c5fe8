"""Launches kernels on a GPU: torch's primary context, torch's current stream, torch's tensors.

A launch returns at once and synchronises nothing. It keeps no tensor alive: torch's allocator gives
memory that was freed only to work that comes later on the same stream, so what is allocated on the
current stream may be dropped as soon as `launch` has returned. A tensor of another stream is its
caller's to guard (`Tensor.record_stream`).
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_uint64, c_void_p

import torch
from torch import Tensor

from amtcore.errors import BackendError, ParameterError, WrongDeviceError
from amtcore.kernels.warp.driver.available import FORKED, Load, find_device
from amtcore.kernels.warp.driver.failures import Driver, device_errors
from amtcore.kernels.warp.driver.library import load_library
from amtcore.kernels.warp.driver.modules import Modules
from amtcore.kernels.warp.launching import THREADS, Kernel, Launcher

_MOST_WARPS = 2**31 - 1
_WORD_BYTES = 8


class CudaLauncher(Launcher):
    """Runs kernels on one GPU; any number of threads may use it.

    Args:
        device: "cuda" is torch's current device.
        load: Finds the driver's functions.
    Raises:
        BackendError: There is no such GPU, or it is older than sm_80; the message says why.
    """

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
        """As of the base class; a call before the first launch loads the kernel."""
        self._refuse_forks()
        with self._current():
            return self._modules.function(kernel).warps_per_sm * self._multiprocessors

    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        """As of the base class, on `torch.cuda.current_stream(device)`.

        Raises:
            WrongDeviceError, ParameterError: An argument is not what a kernel here takes.
            DeviceMemoryError, DeviceLostError: Of this, or of an earlier kernel.
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
        """Torch's context for this thread, which may be new, or busy on another device."""
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
    """One 64-bit word for each argument: an address or an integer, two's complement.

    Raises:
        WrongDeviceError: A tensor lies elsewhere.
        ParameterError: A tensor has gaps or a type that no kernel has; an integer of more than 64
            bits.
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
