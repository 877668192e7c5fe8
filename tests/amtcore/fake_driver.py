"""A stand-in for libcuda and for what torch says of a GPU: every call goes through the C ABI.

The functions are C function pointers with the real signatures, so an argument that would be cut
or misplaced on its way to the driver is cut here as well.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_uint64, c_void_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amtcore.kernels.gpu.cuda_launcher import CudaLauncher
from amtcore.kernels.gpu.driver import OPTIONAL, SIGNATURES
from amtcore.kernels.gpu.launcher import Kernel

CONTEXT = 0x7F00_1234_5678
MODULE = 0x7F00_0000_1000
FUNCTION = 0x7F00_0000_2000
STREAM = 0x7FFF_8765_4321
MULTIPROCESSORS = 132
CLOCK_KHZ = 1_980_000
WARPS_PER_SM = 12
_JIT_ERROR_LOG, _JIT_ERROR_BYTES = 5, 6

PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry add(
    .param .u64 add_param_0,
    .param .u64 add_param_1,
    .param .b64 add_param_2
)
{ ret; }
"""
ADD = Kernel("add", PTX)


@dataclass
class Launch:
    """What cuLaunchKernel was given."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    words: list[int]


@dataclass
class FakeDriver:
    """A driver with one device.

    Args:
        answers: Function -> CUresult it returns instead of doing anything.
        version: As cuDriverGetVersion gives it.
        log: What the PTX compiler writes into the error log.
        run: Does what the device would do with a launch.
    """

    answers: dict[str, int] = field(default_factory=dict)
    version: int = 13000
    log: bytes = b""
    devices: int = 1
    warps_per_sm: int = WARPS_PER_SM
    capturing: bool = False
    lacks: tuple[str, ...] = ()
    launches: list[Launch] = field(default_factory=list)
    loads: list[bytes] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    run: Callable[[Launch], None] | None = None
    _here: threading.local = field(default_factory=threading.local)

    def load(self) -> dict[str, Any]:
        """The functions, as `load_library` gives them."""
        functions = {}
        for name, signature in (SIGNATURES | OPTIONAL).items():
            if name not in self.lacks:
                prototype = ctypes.CFUNCTYPE(c_int, *signature)
                functions[name] = prototype(self._answering(name))
                functions[name].argtypes = signature
        return functions

    def enter_context(self) -> None:
        """What the first use of torch does in a thread."""
        self._here.context = CONTEXT

    def _answering(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.answers:
                code = self.answers[name]
                if name == "cuModuleLoadDataEx" and self.log:
                    self._write_log(*arguments[2:])
                return code
            return getattr(self, f"_{name}")(*arguments) or 0

        return answer

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, version: int) -> None:
        c_int.from_address(version).value = self.version

    def _cuDeviceGetCount(self, count: int) -> None:
        c_int.from_address(count).value = self.devices

    def _cuDeviceGet(self, device: int, ordinal: int) -> None:
        c_int.from_address(device).value = ordinal + 40

    def _cuDeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:
        assert (attribute, device) == (13, 40)
        c_int.from_address(value).value = CLOCK_KHZ

    def _cuGetErrorName(self, code: int, text: int) -> int | None:
        names = {1: b"CUDA_ERROR_INVALID_VALUE", 100: b"CUDA_ERROR_NO_DEVICE"}
        names |= {218: b"CUDA_ERROR_INVALID_PTX", 222: b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"}
        if code not in names:
            return 1
        c_char_p.from_address(text).value = names[code]
        return None

    def _cuGetErrorString(self, code: int, text: int) -> None:
        c_char_p.from_address(text).value = b"what it means"

    def _cuCtxGetCurrent(self, context: int) -> None:
        c_void_p.from_address(context).value = getattr(self._here, "context", 0)

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self._here.before = getattr(self._here, "context", 0)
        self._here.context = context
        self.entered.append(context)

    def _cuCtxPopCurrent_v2(self, context: int) -> None:
        c_void_p.from_address(context).value = self._here.context
        self._here.context = self._here.before

    def _cuModuleLoadDataEx(
        self, module: int, text: bytes, count: int, options: int, values: int
    ) -> None:
        assert self._here.context == CONTEXT
        self.loads.append(text)
        c_void_p.from_address(module).value = MODULE + len(self.loads)

    def _write_log(self, count: int, options: int, values: int) -> None:
        codes = list((ctypes.c_uint * count).from_address(options))
        given = dict(zip(codes, (c_uint64 * count).from_address(values), strict=True))
        ctypes.memmove(
            given[_JIT_ERROR_LOG],
            self.log[: given[_JIT_ERROR_BYTES] - 1] + b"\0",
            len(self.log) + 1,
        )

    def _cuModuleGetFunction(self, function: int, module: int, name: bytes) -> None:
        assert module == MODULE + len(self.loads)
        assert name in self.loads[-1]
        c_void_p.from_address(function).value = FUNCTION + len(self.loads)

    def _cuFuncLoad(self, function: int) -> None:
        assert function == FUNCTION + len(self.loads)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, blocks: int, function: int, threads: int, shared_bytes: int
    ) -> None:
        assert (function, threads, shared_bytes) == (FUNCTION + len(self.loads), 32, 0)
        c_int.from_address(blocks).value = self.warps_per_sm

    def _cuLaunchKernel(self, function: int, *arguments: Any) -> None:
        assert self._here.context == CONTEXT
        *shape, shared_bytes, stream, parameters, extra = arguments
        assert extra is None
        ptx = self.loads[function - FUNCTION - 1]
        addresses = (c_void_p * ptx.count(b".param .")).from_address(parameters)
        words = [c_uint64.from_address(each).value for each in addresses]
        launch = Launch(
            function, tuple(shape[:3]), tuple(shape[3:]), shared_bytes, stream or 0, words
        )
        self.launches.append(launch)
        if self.run is not None:
            self.run(launch)


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Let torch say that there is an H100, whose current stream is STREAM."""

    @contextmanager
    def device(_device: object) -> Iterator[None]:
        yield

    properties = SimpleNamespace(
        name="NVIDIA H100",
        **{"major": 9, "minor": 0, "total_memory": 80 * 2**30},
        multi_processor_count=MULTIPROCESSORS,
    )
    known: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda _device: (9, 0),
        "get_device_name": lambda _device: "NVIDIA H100",
        "get_device_properties": lambda _device: properties,
        "device": device,
        "current_stream": lambda _device: SimpleNamespace(cuda_stream=STREAM),
        "is_current_stream_capturing": lambda: driver.capturing,
        "_is_in_bad_fork": lambda: False,
    }
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def open_launcher(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> CudaLauncher:
    """A launcher on the stand-in, whose tensors lie on the CPU."""

    def zeros(*_size: int, device: torch.device) -> None:
        assert device == torch.device("cuda:0")
        driver.enter_context()

    install(monkeypatch, driver)
    with pytest.MonkeyPatch.context() as while_it_opens:
        while_it_opens.setattr(torch, "zeros", zeros)
        launcher = CudaLauncher("cuda", load=driver.load)
    assert launcher.device == torch.device("cuda:0")
    launcher.device = torch.device("cpu")
    return launcher
