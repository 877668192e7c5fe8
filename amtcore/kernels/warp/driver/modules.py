"""From PTX to a function on the device: loaded once, and kept as long as the process lives."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass

from amtcore.errors import BackendError
from amtcore.kernels.warp.driver.failures import CAPTURE_ADVICE, Driver
from amtcore.kernels.warp.launching import THREADS, Kernel

#: CUjit_option: where the driver's compiler writes, and how much.
_INFO_LOG, _INFO_BYTES, _ERROR_LOG, _ERROR_BYTES = 3, 4, 5, 6
_LOG_BYTES = 16384
_LOG_LINES = 3
#: CUresult of a text that the driver's compiler does not take.
_NOT_TAKEN = {200, 209, 218, 221, 222, 223, 300}
_PARAMETER = re.compile(r"\.param\s+\.(\w+)")


@dataclass(frozen=True)
class Function:
    """A kernel on the device.

    Args:
        handle: CUfunction.
        parameters: How many 64-bit parameters it has.
        warps_per_sm: How many blocks of one warp a multiprocessor holds at once.
    """

    handle: int
    parameters: int
    warps_per_sm: int


class Modules:
    """Kernels of one device.

    Args:
        driver: Of the process.
        is_capturing: Whether the current stream is being captured into a graph.
    """

    def __init__(self, driver: Driver, is_capturing: Callable[[], bool]) -> None:
        self._driver, self._is_capturing = driver, is_capturing
        self._loaded: dict[Kernel, Function] = {}
        self._lock = threading.Lock()

    def function(self, kernel: Kernel) -> Function:
        """The kernel, loaded by the first who asks; the device's context is current.

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
        # Drivers may put the code on the device at its first launch only, which may be captured.
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
        # An option's value is in the pointer itself, or the pointer is the value.
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
    """How many parameters the entry has: the driver reads as many, whatever it is given.

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
