"""Functions of libcuda by ctypes, and the conversion of CUDA errors to our exceptions.

Every pointer is a `void *` to ctypes, so arguments are `byref(..)`, arrays or integers. A function
returns a CUresult, 0 for success.

A kernel runs after its launch has returned, so a later call reports its failure. A kernel that
fails also breaks the CUDA context: only a new process can use the device again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch

from amtcore.errors import BackendError, DeviceLostError, DeviceMemoryError

LIBRARY = "libcuda.so.1"

Functions = Mapping[str, Callable[..., int]]

#: C types of the arguments, from cuda.h.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuModuleLoadDataEx": (c_void_p, c_char_p, c_uint, c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (c_void_p, c_void_p, c_int, c_size_t),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}
#: Not in every driver that torch runs with: CUDA 12.4 and newer.
OPTIONAL: dict[str, tuple[Any, ...]] = {"cuFuncLoad": (c_void_p,)}


@functools.cache
def load_library() -> Functions:
    """Return the functions by name; raise `OSError` if there is no driver."""
    return functions_of(ctypes.CDLL(LIBRARY))


def functions_of(library: ctypes.CDLL) -> Functions:
    """Return the functions of a loaded library, with their signatures."""
    functions: dict[str, Callable[..., int]] = {}
    for name, signature in (SIGNATURES | OPTIONAL).items():
        function = getattr(library, name, None)
        if function is None and name in OPTIONAL:
            continue
        if function is None:
            raise OSError(f"{LIBRARY} has no {name}: it is no NVIDIA driver, or a very old one")
        function.argtypes, function.restype = signature, c_int
        functions[name] = function
    return functions


OUT_OF_MEMORY = 2
#: CUresult (and equal cudaError) codes of a lost context or device.
LOST = {
    4: "CUDA_ERROR_DEINITIALIZED",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    226: "CUDA_ERROR_CONTAINED",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    999: "CUDA_ERROR_UNKNOWN",
}
_HEALTH = "look at nvidia-smi -q and the kernel log for the device's health"
_HINTS = {
    46: "another process may hold the GPU for itself (nvidia-smi -q -d COMPUTE)",
    **dict.fromkeys((214, 220, 226), _HEALTH),
}
_HINT = "CUDA_LAUNCH_BLOCKING=1 tells which kernel it was"
_CAPTURE = range(900, 909)
#: Allocation errors in messages of torch's libraries.
_NO_ALLOCATION = ("CUFFT_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
CAPTURE_ADVICE = (
    "a CUDA graph is being captured, and kernels cannot be loaded meanwhile; run the same call "
    "once before the capture"
)


class Driver:
    """Calls to the functions of `load_library`; an error code raises an exception with advice."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def has(self, function: str) -> bool:
        """Return True if this driver is new enough to have the function."""
        return function in self._functions

    def code(self, function: str, *arguments: Any) -> int:
        """Call a function and return the CUresult."""
        return self._functions[function](*arguments)

    def call(self, function: str, *arguments: Any, doing: str) -> None:
        """Call a function; an error message begins with `doing`."""
        code = self.code(function, *arguments)
        if code:
            raise self.error(code, doing)

    def error(self, code: int, doing: str) -> BackendError:
        """Return the exception for a CUresult."""
        if code in _CAPTURE:
            return BackendError(f"{doing}: {self.name_of(code)}: {CAPTURE_ADVICE}")
        if code == OUT_OF_MEMORY or code in LOST:
            return device_error(code, doing)
        said = self._text("cuGetErrorString", code) or "no description"
        return BackendError(
            f"{doing}: the driver says {self.name_of(code)} ({said}); please report it with "
            "the versions of driver and torch"
        )

    def name_of(self, code: int) -> str:
        """Return the name of a CUresult, CUDA_ERROR_..."""
        return self._text("cuGetErrorName", code) or f"CUDA error {code}"

    def version(self) -> tuple[int, int]:
        """Return the newest CUDA version that the driver supports; (0, 0) if unknown."""
        number = ctypes.c_int()
        self.code("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def _text(self, function: str, code: int) -> str:
        text = ctypes.c_char_p()
        if self.code(function, code, byref(text)) or text.value is None:
            return ""
        return text.value.decode(errors="replace")


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Convert torch's errors of a full or lost device to ours; messages begin with `doing`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise device_error(OUT_OF_MEMORY, doing) from error
    except BackendError:
        raise
    except RuntimeError as error:
        code = getattr(error, "error_code", None)
        if code == OUT_OF_MEMORY or any(mark in str(error) for mark in _NO_ALLOCATION):
            raise device_error(OUT_OF_MEMORY, doing) from error
        if code in LOST:
            raise device_error(code, doing) from error
        raise


def device_error(code: int, doing: str) -> BackendError:
    """Return the exception for a full or a lost device, by its code."""
    if code == OUT_OF_MEMORY:
        return DeviceMemoryError(
            f"{doing}: the GPU has too little free memory; use smaller batches, or stop other "
            "programs on it (nvidia-smi lists them)"
        )
    return DeviceLostError(
        f"{doing}: {LOST[code]}, in this or an earlier kernel; this process cannot use the GPU "
        f"any more: start a new one; {_HINTS.get(code, _HINT)}"
    )
