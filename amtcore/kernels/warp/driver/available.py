"""Whether kernels can run on a GPU of this process, and the one line that says why not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref

import torch

from amtcore.errors import BackendError
from amtcore.kernels.warp.driver.failures import Driver
from amtcore.kernels.warp.driver.library import Functions, load_library

#: Compute capability of the PTX: sm_80.
OLDEST = (8, 0)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
FORKED = (
    "this process was forked from one that uses the GPU, and CUDA does not survive that; start "
    "processes with the 'spawn' method, or use the GPU in one of them only"
)

Load = Callable[[], Functions]


def find_device(device: torch.device | str | int, load: Load = load_library) -> torch.device:
    """The GPU that is meant, with its number.

    Args:
        device: "cuda" is torch's current one.
        load: Finds the driver's functions.
    Raises:
        BackendError: There is none, not this one, or it is older than sm_80.
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
    """Why torch finds no GPU, and what to do about it; "" where it finds one."""
    # First, as after a fork nothing else that is asked can be believed.
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
    return _why_driver_finds_none(driver)


def _why_driver_finds_none(driver: Driver) -> str:
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}, which hides every GPU; unset it"
    known, needed = driver.version(), _cuda_of_torch()
    if known[0] < needed[0]:
        return (
            f"the NVIDIA driver is too old: it knows CUDA {known[0]}.{known[1]}, torch "
            f"{torch.__version__} needs {needed[0]}.{needed[1]}; update the driver, or install a "
            "torch for the older CUDA"
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
    return f"the driver finds {count.value}, but torch says: {_complaint_of_torch()}"


def _cuda_of_torch() -> tuple[int, int]:
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


def _complaint_of_torch() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "nothing"
