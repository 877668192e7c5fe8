"""What a GPU is: name, size, clock, and the driver that runs it."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

import torch

from amtcore.kernels.warp.driver.available import Load, find_device
from amtcore.kernels.warp.driver.failures import Driver
from amtcore.kernels.warp.driver.library import load_library

#: CUdevice_attribute, in kHz.
_CLOCK_RATE = 13
#: Warp instructions that a multiprocessor of sm_80 and newer can start in a cycle.
_SCHEDULERS = 4


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    Args:
        name: As its maker calls it.
        capability: Compute capability, (9, 0) for an H100.
        memory_bytes: Of the device.
        multiprocessors: How many.
        clock_hz: The highest clock of the multiprocessors.
        driver_cuda: The newest CUDA that the driver knows.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    clock_hz: float
    driver_cuda: tuple[int, int]

    @property
    def warp_instructions_per_s(self) -> float:
        """What the device can start, with every scheduler busy in every cycle."""
        return self.clock_hz * self.multiprocessors * _SCHEDULERS

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
    """Ask torch and the driver; raises as `find_device` does."""
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
