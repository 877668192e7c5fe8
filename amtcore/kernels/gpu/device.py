"""The GPU of this process: search, reasons why there is none, its facts, and a probe kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

import torch

from amtcore.errors import BackendError
from amtcore.kernels.gpu.driver import Driver, Functions, load_library
from amtcore.kernels.gpu.launcher import THREADS, Kernel, Launcher

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


#: CUdevice_attribute, in kHz.
_CLOCK_RATE = 13
#: Warp instructions that a multiprocessor of sm_80 and newer can start in a cycle.
_SCHEDULERS = 4


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    Args:
        name: Name of the product.
        capability: Compute capability, (9, 0) for an H100.
        memory_bytes: Size of the memory.
        multiprocessors: Number of multiprocessors.
        clock_hz: Highest clock of the multiprocessors.
        driver_cuda: Newest CUDA version that the driver supports.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    clock_hz: float
    driver_cuda: tuple[int, int]

    @property
    def warp_instructions_per_s(self) -> float:
        """Upper bound of the instruction rate, with every scheduler busy in every cycle."""
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


#: out[k] = x[k] + y[k] for k < n, one number in each thread.
PROBE = Kernel(
    "probe",
    """\
.version 7.0
.target sm_80
.address_size 64

.visible .entry probe(
	.param .u64 probe_param_0,
	.param .u64 probe_param_1,
	.param .u64 probe_param_2,
	.param .u64 probe_param_3
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<4>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<10>;

	ld.param.u64 %rd1, [probe_param_0];
	ld.param.u64 %rd2, [probe_param_1];
	ld.param.u64 %rd3, [probe_param_2];
	ld.param.u64 %rd4, [probe_param_3];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.s32 %r3, %r1, 32, %r2;
	cvt.u64.u32 %rd5, %r3;
	setp.ge.u64 %p1, %rd5, %rd4;
	@%p1 bra $L_end;
	shl.b64 %rd6, %rd5, 2;
	add.s64 %rd7, %rd1, %rd6;
	add.s64 %rd8, %rd2, %rd6;
	add.s64 %rd9, %rd3, %rd6;
	ld.global.f32 %f1, [%rd7];
	ld.global.f32 %f2, [%rd8];
	add.rn.ftz.f32 %f3, %f1, %f2;
	st.global.f32 [%rd9], %f3;
$L_end:
	ret;
}
""",
)
#: Not a multiple of a warp, so that the last one is cut.
_SIZE = 1000


def probe(launcher: Launcher) -> None:
    """Add two vectors on the device and compare with torch.

    Raises:
        BackendError: The launch fails, or sums are wrong.
    """
    x = torch.arange(_SIZE, dtype=torch.float32, device=launcher.device)
    y = x.flip(0) * 0.3
    out = torch.full((_SIZE + 1,), -1.0, device=launcher.device)
    launcher.launch(PROBE, -(-_SIZE // THREADS), (x, y, out, _SIZE))
    if not torch.equal(out[:-1], x + y) or out[-1] != -1.0:
        raise BackendError(
            f"the {launcher.name} launcher adds wrongly: expected {_SIZE} sums as torch has them; "
            "please report it with the versions of driver and torch"
        )
