"""The launcher on a stand-in for libcuda: what reaches the driver, word by word, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from amtcore_interpreter import InterpretedLauncher

from amtcore.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    ParameterError,
    WrongDeviceError,
)
from amtcore.kernels.gpu import cuda_launcher as launching
from amtcore.kernels.gpu.backend import GpuBackend
from amtcore.kernels.gpu.cuda_launcher import CudaLauncher, count_parameters, pack
from amtcore.kernels.gpu.driver import LOST, device_error, device_errors
from amtcore.kernels.gpu.launcher import Kernel
from tests.amtcore.fake_driver import (
    ADD,
    CONTEXT,
    FUNCTION,
    MULTIPROCESSORS,
    PTX,
    STREAM,
    WARPS_PER_SM,
    FakeDriver,
    open_launcher,
)

CPU = torch.device("cpu")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def launcher(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> CudaLauncher:
    return open_launcher(monkeypatch, driver)


def test_a_launch_reaches_the_driver(driver: FakeDriver, launcher: CudaLauncher) -> None:
    x, y = torch.zeros(5), torch.zeros(3, dtype=torch.int64)
    launcher.launch(ADD, 1500, [x, y, -2])
    (launch,) = driver.launches
    assert launch.function == FUNCTION + 1
    assert (launch.grid, launch.block, launch.shared_bytes) == ((1500, 1, 1), (32, 1, 1), 0)
    assert launch.stream == STREAM
    assert launch.words == [x.data_ptr(), y.data_ptr(), 2**64 - 2]


def test_a_launch_synchronises_nothing(driver: FakeDriver, launcher: CudaLauncher) -> None:
    launcher.launch(ADD, 1, [1, 2, 3])
    driver.calls.clear()
    launcher.launch(ADD, 1, [1, 2, 3])
    assert driver.calls == ["cuCtxGetCurrent", "cuLaunchKernel"]


def test_arguments_are_packed_byte_by_byte() -> None:
    x = torch.arange(6.0)
    words = pack([x[2:], 0x0102030405060708, -1, 2**64 - 1, True], CPU)
    wanted = x.data_ptr() + 8
    assert bytes(words) == b"".join(
        (
            wanted.to_bytes(8, "little"),
            bytes((8, 7, 6, 5, 4, 3, 2, 1)),
            b"\xff" * 16,
            b"\1",
            bytes(7),
        )
    )


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (torch.zeros(2, device="meta"), r"tensor on cpu, got one on meta; move all"),
        (torch.zeros(4, 4).T[:2], r"contiguous tensor, got strides \(1, 4\) of shape \(2, 4\)"),
        (torch.zeros(2, dtype=torch.float16), r"expected float32 or float64, got torch\.float16"),
        (torch.zeros(2, dtype=torch.complex64), r"got torch\.complex64; convert"),
        (2**64, "does not fit in 64 bits"),
        (-(2**63) - 1, "does not fit in 64 bits"),
    ],
)
def test_what_no_kernel_takes_is_refused(argument: torch.Tensor | int, line: str) -> None:
    wrong = (ParameterError, WrongDeviceError)
    with pytest.raises(wrong, match="argument 1 of a kernel: .*" + line):
        pack([0, argument], CPU)


def test_the_number_of_arguments_is_that_of_the_kernel(
    driver: FakeDriver, launcher: CudaLauncher
) -> None:
    """The driver would read past the end of a list that is too short."""
    with pytest.raises(ParameterError, match="add: expected 3 arguments, got 2"):
        launcher.launch(ADD, 1, [1, 2])
    assert driver.launches == []


@pytest.mark.parametrize("warps", [0, -1, 2**31])
def test_a_grid_that_is_none_is_refused(warps: int, launcher: CudaLauncher) -> None:
    with pytest.raises(ParameterError, match=f"expected 1 to 2147483647 warps, got {warps}"):
        launcher.launch(ADD, warps, [1, 2, 3])


def test_a_kernel_is_loaded_once(driver: FakeDriver, launcher: CudaLauncher) -> None:
    for _ in range(3):
        launcher.launch(Kernel("add", PTX + ""), 1, [1, 2, 3])
        launcher.resident_warps(ADD)
    assert driver.loads == [PTX.encode()]
    assert driver.calls.count("cuFuncLoad") == 1
    other = Kernel("add", PTX + "// other\n")
    launcher.launch(other, 1, [1, 2, 3])
    assert len(driver.loads) == 2 and driver.launches[-1].function == FUNCTION + 2


def test_threads_that_come_at_once_load_it_once(driver: FakeDriver, launcher: CudaLauncher) -> None:
    """New threads have no context; each is given torch's and left as it was."""
    begin = threading.Barrier(4)

    def run() -> None:
        begin.wait()
        launcher.launch(ADD, 1, [1, 2, 3])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 4 and len(driver.loads) == 1
    assert driver.entered == [CONTEXT] * 4 and driver.calls.count("cuCtxPopCurrent_v2") == 4


def test_resident_warps_are_those_of_all_multiprocessors(launcher: CudaLauncher) -> None:
    assert launcher.resident_warps(ADD) == WARPS_PER_SM * MULTIPROCESSORS


def test_a_kernel_too_big_for_the_device_is_told(
    driver: FakeDriver, launcher: CudaLauncher
) -> None:
    driver.warps_per_sm = 0
    with pytest.raises(BackendError, match="kernel add needs more than this GPU has"):
        launcher.resident_warps(ADD)


def test_an_older_driver_has_no_way_to_load_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(lacks=("cuFuncLoad",))
    open_launcher(monkeypatch, driver).launch(ADD, 1, [1, 2, 3])
    assert len(driver.launches) == 1


def test_nothing_is_loaded_while_a_graph_is_captured(
    driver: FakeDriver, launcher: CudaLauncher
) -> None:
    driver.capturing = True
    line = "loading kernel add: a CUDA graph is being captured.* run the same call once before"
    with pytest.raises(BackendError, match=line):
        launcher.launch(ADD, 1, [1, 2, 3])
    assert "cuModuleLoadDataEx" not in driver.calls
    driver.capturing = False
    launcher.launch(ADD, 1, [1, 2, 3])
    driver.capturing = True
    launcher.launch(ADD, 1, [1, 2, 3])
    assert len(driver.launches) == 2


def test_a_graph_of_another_thread_is_told_the_same(
    driver: FakeDriver, launcher: CudaLauncher
) -> None:
    driver.answers["cuModuleLoadDataEx"] = 900
    with pytest.raises(BackendError, match="CUDA error 900: a CUDA graph is being captured"):
        launcher.launch(ADD, 1, [1, 2, 3])


def test_a_forked_child_is_told(launcher: CudaLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.getpid() + 1
    monkeypatch.setattr(launching.os, "getpid", lambda: child)
    calls: list[Callable[[], object]] = [
        lambda: launcher.launch(ADD, 1, [1, 2, 3]),
        lambda: launcher.resident_warps(ADD),
    ]
    for call in calls:
        with pytest.raises(BackendError, match=r"forked from one that uses the GPU.*'spawn'"):
            call()


@pytest.mark.parametrize(
    ("ptx", "line"),
    [
        (PTX.replace("entry add", "entry sub"), "has no entry of this name"),
        (PTX.replace(".param .b64", ".param .f32"), "parameters of 64 bits only, got f32"),
    ],
)
def test_a_kernel_is_what_a_launch_can_feed(
    ptx: str, line: str, driver: FakeDriver, launcher: CudaLauncher
) -> None:
    with pytest.raises(BackendError, match=line):
        launcher.launch(Kernel("add", ptx), 1, [1, 2, 3])
    assert driver.loads == []


@pytest.mark.parametrize(
    ("head", "count"),
    [("()", 0), ("", 0), ("(.param .u64 a)", 1), ("(.param .u64 a,.param .b64 b)", 2)],
)
def test_parameters_are_counted(head: str, count: int) -> None:
    kernel = Kernel("k", f".visible .entry k{head}\n.maxntid 32, 1, 1\n{{ ret; }}")
    assert count_parameters(kernel) == count


def test_rejected_ptx_shows_what_the_driver_said(monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"\nptxas, line 3; fatal : Unsupported .version\n\n  two \nthree\nfour\n"
    driver = FakeDriver({"cuModuleLoadDataEx": 222}, version=11040, log=log)
    with pytest.raises(BackendError) as caught:
        open_launcher(monkeypatch, driver).launch(ADD, 1, [1, 2, 3])
    assert str(caught.value) == (
        "the driver rejects the PTX of kernel add: CUDA_ERROR_UNSUPPORTED_PTX_VERSION: ptxas, "
        "line 3; fatal : Unsupported .version | two | three; the PTX is version 7.0 for sm_80, "
        "the driver knows CUDA 11.4: update the NVIDIA driver, or use the CPU"
    )


@pytest.mark.parametrize("function", ["cuModuleLoadDataEx", "cuLaunchKernel", "cuFuncLoad"])
def test_too_little_memory_has_its_class(
    function: str, driver: FakeDriver, launcher: CudaLauncher
) -> None:
    driver.answers[function] = 2
    with pytest.raises(DeviceMemoryError, match=r"kernel add: .* use smaller batches") as caught:
        launcher.launch(ADD, 1, [1, 2, 3])
    assert isinstance(caught.value, BackendError) and isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("code", LOST)
def test_a_lost_device_has_its_class(code: int, driver: FakeDriver, launcher: CudaLauncher) -> None:
    driver.answers["cuLaunchKernel"] = code
    with pytest.raises(DeviceLostError, match=f"{LOST[code]}.*start a new one"):
        launcher.launch(ADD, 1, [1, 2, 3])


@pytest.mark.parametrize(
    ("code", "hint"), [(46, "nvidia-smi -q -d COMPUTE"), (214, "health"), (700, "LAUNCH_BLOCKING")]
)
def test_a_lost_device_comes_with_a_hint(code: int, hint: str) -> None:
    assert hint in str(device_error(code, "launching"))


def test_another_error_is_named(driver: FakeDriver, launcher: CudaLauncher) -> None:
    driver.answers["cuLaunchKernel"] = 1
    line = r"launching kernel add: the driver says CUDA_ERROR_INVALID_VALUE \(what it means\)"
    with pytest.raises(BackendError, match=line):
        launcher.launch(ADD, 1, [1, 2, 3])


def accelerator_error(code: int) -> RuntimeError:
    error = torch.AcceleratorError("CUDA error: as torch says it")
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (accelerator_error(2), DeviceMemoryError),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), DeviceMemoryError),
        (accelerator_error(700), DeviceLostError),
        (accelerator_error(214), DeviceLostError),
        (accelerator_error(1), torch.AcceleratorError),
        (RuntimeError("a mistake"), RuntimeError),
        (DeviceLostError("told already"), DeviceLostError),
    ],
)
def test_errors_of_torch_become_ours(raised: Exception, wanted: type[Exception]) -> None:
    with pytest.raises(wanted) as caught, device_errors("extracting"):
        raise raised
    assert type(caught.value) is wanted
    assert (caught.value is raised) == (type(raised) is wanted)


def test_the_probe_adds_where_ptx_is_interpreted() -> None:
    GpuBackend(InterpretedLauncher()).check()


def test_a_probe_that_adds_wrongly_is_told(launcher: CudaLauncher) -> None:
    """The stand-in adds nothing at all."""
    with pytest.raises(BackendError, match="the cuda launcher adds wrongly: expected 1024 sums"):
        GpuBackend(launcher).check()
