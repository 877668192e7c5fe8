"""The GPU of this process: search, reasons why there is none, and its facts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

import torch

from amtcore.errors import BackendError
from amtcore.kernels.gpu.driver import Driver, Functions, load_library

#: Compute capability of the PTX: sm_80.
OLDEST = (8, 0)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
FORKED = (
    "this process was forked from one that uses the GPU, and CUDA does not survive that; start "
    "processes with the 'spawn' method, or use the GPU in one of them only"
)

Load = Callable[[], Functions]


def find_device(device: torch.device | str | int, load: Load = load_library) -> torch.device:
    """Return the GPU with its number; "cuda" is torch's current GPU.

    Raises:
        BackendError: There is no such GPU, or it is older than sm_80.
    """
    wanted = torch.device(device)
    if wanted.type != "cuda":
        raise BackendError(f"expected a CUDA device, got {str(wanted)!r}; give 'cuda' or 'cuda:0'")
    if reason := why_no_gpu(load):
        raise BackendError(f"no GPU: {reason}; or use the CPU (device 'cpu')")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    count = torch.cuda.device_count()
    if index >= count:
        raise BackendError(
            f"expected a device below cuda:{count}, as this process sees {count}, got cuda:{index}"
        )
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < OLDEST:
        raise BackendError(
            f"cuda:{index} is a {torch.cuda.get_device_name(index)} of compute capability "
            f"{major}.{minor}; the kernels need {OLDEST[0]}.{OLDEST[1]} (Ampere) or newer: use "
            "another GPU or the CPU"
        )
    return torch.device("cuda", index)


def why_no_gpu(load: Load = load_library) -> str:
    """Return why torch finds no GPU and what to do; "" if it finds one."""
    # First, because answers of CUDA are not valid after a fork.
    if torch.cuda._is_in_bad_fork():
        return FORKED
    if torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA; install a build with it"
    try:
        driver = Driver(load())
    except OSError as error:
        return f"{error}; install the NVIDIA driver, or start the container with GPUs"
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}, which hides every GPU; unset it"
    (major, minor), needed = driver.version(), torch.version.cuda or "0.0"
    if major < int(needed.split(".")[0]):
        return (
            f"the NVIDIA driver is too old: it knows CUDA {major}.{minor}, torch "
            f"{torch.__version__} needs {needed}; update the driver, or install a torch for the "
            "older CUDA"
        )
    if code := driver.code("cuInit", 0):
        return (
            f"cuInit says {driver.name_of(code)}; check that nvidia-smi works here and that "
            "/dev/nvidia* can be read"
        )
    count = ctypes.c_int()
    driver.code("cuDeviceGetCount", byref(count))
    if not count.value:
        return f"the driver finds no device; check nvidia-smi and {_VISIBLE}"
    complaint = "nothing"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        complaint = " ".join(str(error).split())
    return f"the driver finds {count.value}, but torch says: {complaint}"


#: CUdevice_attribute, in kHz.
_CLOCK_RATE = 13


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    The compute capability is (9, 0) for an H100. The clock is the highest of the multiprocessors,
    and `driver_cuda` the newest CUDA version that the driver supports.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    clock_hz: float
    driver_cuda: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"{self.name}, sm_{self.capability[0]}{self.capability[1]}, "
            f"{self.memory_bytes / 2**30:.0f} GiB, {self.multiprocessors} multiprocessors at "
            f"{self.clock_hz / 1e9:.2f} GHz, driver for CUDA "
            f"{self.driver_cuda[0]}.{self.driver_cuda[1]}"
        )


def device_facts(
    device: torch.device | str | int = "cuda", load: Load = load_library
) -> DeviceFacts:
    """Return the facts of a GPU; raise like `find_device`."""
    found = find_device(device, load)
    properties = torch.cuda.get_device_properties(found)
    driver = Driver(load())
    handle, clock_khz = ctypes.c_int(), ctypes.c_int()
    doing = f"asking {found} for its clock"
    driver.call("cuDeviceGet", byref(handle), found.index, doing=doing)
    driver.call("cuDeviceGetAttribute", byref(clock_khz), _CLOCK_RATE, handle, doing=doing)
    return DeviceFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        clock_hz=1e3 * clock_khz.value,
        driver_cuda=driver.version(),
    )
