"""The launcher on a real driver: streams, graphs, threads, and what a device refuses."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from amtcore.errors import BackendError, DeviceMemoryError, WrongDeviceError
from amtcore.kernels.gpu.backend import GpuBackend
from amtcore.kernels.gpu.cuda_launcher import CudaLauncher
from amtcore.kernels.gpu.device import device_facts
from amtcore.kernels.gpu.driver import device_errors
from amtcore.kernels.gpu.launcher import Kernel
from tests.gpu.conftest import refusing_to_wait
from tests.gpu.probe import PROBE

pytestmark = pytest.mark.gpu
SIZE = 1000
WARPS = -(-SIZE // 32)


@pytest.fixture
def launcher(device: torch.device) -> CudaLauncher:
    return CudaLauncher(device)


@pytest.fixture
def vectors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(SIZE, dtype=torch.float32, device=device)
    return x, x.flip(0) * 0.3, torch.zeros(SIZE, device=device)


def another(text: str) -> Kernel:
    """The probe as a kernel that is not loaded yet."""
    return Kernel(PROBE.name, f"{PROBE.ptx}// {text}\n")


def test_vectors_are_added(launcher: CudaLauncher) -> None:
    GpuBackend(launcher).check()


def test_the_device_says_what_it_is() -> None:
    facts = device_facts()
    assert facts.capability >= (8, 0) and facts.multiprocessors > 0
    assert 0.5e9 < facts.clock_hz < 5e9
    assert facts.driver_cuda[0] >= 11


def test_resident_warps_fill_the_multiprocessors(launcher: CudaLauncher) -> None:
    each = launcher.resident_warps(PROBE) / device_facts().multiprocessors
    assert each == int(each) and 1 <= each <= 64


def test_a_launch_is_on_the_current_stream_and_waits_for_nothing(
    launcher: CudaLauncher, vectors: tuple[torch.Tensor, ...]
) -> None:
    x, y, out = vectors
    launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with refusing_to_wait(), torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        x.add_(1.0)
        launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, x + y)


def test_a_launch_is_captured_into_a_graph_and_replayed(
    launcher: CudaLauncher, vectors: tuple[torch.Tensor, ...]
) -> None:
    x, y, out = vectors
    launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
    x.fill_(7.0)
    graph.replay()
    assert torch.equal(out, 7.0 + y)


def test_loading_while_capturing_is_refused_and_the_graph_goes_on(
    launcher: CudaLauncher, vectors: tuple[torch.Tensor, ...]
) -> None:
    x, y, out = vectors
    launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BackendError, match="run the same call once before the capture"):
            launcher.launch(another("captured"), WARPS, [x, y, out, SIZE])
        launcher.launch(PROBE, WARPS, [x, y, out, SIZE])
    graph.replay()
    assert torch.equal(out, x + y)


def test_threads_without_a_context_launch(
    launcher: CudaLauncher, vectors: tuple[torch.Tensor, ...]
) -> None:
    """Also the first call of all on a kernel, and before the thread has used torch."""
    x, y, _ = vectors
    outs = [torch.zeros(SIZE, device=x.device) for _ in range(8)]
    torch.cuda.synchronize()
    kernel, failed = another("threads"), []

    def run(out: torch.Tensor) -> None:
        try:
            launcher.launch(kernel, WARPS, [x, y, out, SIZE])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert all(torch.equal(out, x + y) for out in outs)


def test_tensors_elsewhere_are_refused(
    launcher: CudaLauncher, vectors: tuple[torch.Tensor, ...]
) -> None:
    x, y, out = vectors
    with pytest.raises(WrongDeviceError, match="expected a tensor on cuda:0, got one on cpu"):
        launcher.launch(PROBE, WARPS, [x, y.cpu(), out, SIZE])


def test_ptx_that_the_driver_rejects_is_told(launcher: CudaLauncher) -> None:
    broken = Kernel(PROBE.name, PROBE.ptx.replace("add.rn.ftz.f32", "add.rn.ftz.f99"))
    line = r"the driver rejects the PTX of kernel probe: CUDA_ERROR_INVALID_PTX: .*line \d+"
    with pytest.raises(BackendError, match=line):
        launcher.resident_warps(broken)
    newer = Kernel(PROBE.name, PROBE.ptx.replace(".version 7.0", ".version 99.0"))
    with pytest.raises(BackendError, match=r"the PTX is version 99\.0 for sm_80, the driver knows"):
        launcher.resident_warps(newer)


def test_too_little_memory_is_told(device: torch.device) -> None:
    with pytest.raises(DeviceMemoryError, match="use smaller batches"), device_errors("filling"):
        torch.empty(2**50, dtype=torch.uint8, device=device)


_LOST = """
import torch
from amtcore.errors import BackendError, DeviceLostError
from amtcore.kernels.gpu.cuda_launcher import CudaLauncher
from amtcore.kernels.gpu.driver import device_errors
from tests.gpu.probe import PROBE
launcher = CudaLauncher()
launcher.launch(PROBE, 1, [16, 16, 16, 32])
for act in (torch.cuda.synchronize, lambda: launcher.launch(PROBE, 1, [16, 16, 16, 32])):
    try:
        with device_errors("waiting"):
            act()
    except DeviceLostError as error:
        print(error)
"""


def test_a_lost_device_is_told_by_torch_and_by_the_driver() -> None:
    """In a process of its own, which cannot use the GPU afterwards."""
    done = subprocess.run([sys.executable, "-c", _LOST], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in line for line in lines)
    assert all("start a new one" in line for line in lines)


_FORKED = """
import os, torch
from amtcore.errors import BackendError
from amtcore.kernels.gpu.cuda_launcher import CudaLauncher
from tests.gpu.probe import PROBE
launcher = CudaLauncher()
launcher.resident_warps(PROBE)
if os.fork() == 0:
    for act in (CudaLauncher, lambda: launcher.resident_warps(PROBE)):
        try:
            act()
        except BackendError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_child_is_told() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORKED]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("start processes with the 'spawn' method" in line for line in lines)
