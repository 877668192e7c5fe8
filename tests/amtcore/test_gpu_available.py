"""Why there is no GPU: every reason is told by its own line."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from amtcore.errors import BackendError
from amtcore.kernels.gpu.cuda_launcher import CudaLauncher
from amtcore.kernels.gpu.device import device_facts, find_device, why_no_gpu
from amtcore.kernels.gpu.driver import functions_of
from tests.amtcore.fake_driver import FakeDriver, install


@pytest.fixture
def none_found(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch, built for CUDA 13.0, finds no GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


def no_library() -> dict[str, Any]:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_torch_without_cuda(none_found: pytest.MonkeyPatch) -> None:
    none_found.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "is built without CUDA; install a build with it" in why_no_gpu(FakeDriver().load)


def test_no_driver(none_found: pytest.MonkeyPatch) -> None:
    line = r"^no GPU: libcuda\.so\.1: cannot open shared object file; install the NVIDIA driver"
    with pytest.raises(BackendError, match=line):
        CudaLauncher(load=no_library)


def test_a_library_that_is_no_driver() -> None:
    with pytest.raises(OSError, match=r"libcuda\.so\.1 has no cuInit: it is no NVIDIA driver"):
        functions_of(ctypes.CDLL(None))


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_gpus_that_are_hidden(value: str, none_found: pytest.MonkeyPatch) -> None:
    none_found.setenv("CUDA_VISIBLE_DEVICES", value)
    line = f"CUDA_VISIBLE_DEVICES is {value!r}, which hides every GPU; unset it"
    assert why_no_gpu(FakeDriver().load) == line


def test_a_driver_too_old_for_torch(none_found: pytest.MonkeyPatch) -> None:
    said = why_no_gpu(FakeDriver(version=12020).load)
    assert "too old: it knows CUDA 12.2" in said and "needs 13.0; update the driver" in said


def test_a_driver_that_does_not_start(none_found: pytest.MonkeyPatch) -> None:
    said = why_no_gpu(FakeDriver({"cuInit": 100}).load)
    assert said.startswith("cuInit says CUDA_ERROR_NO_DEVICE; check that nvidia-smi works")
    assert "CUDA error 804" in why_no_gpu(FakeDriver({"cuInit": 804}).load)


def test_a_driver_without_devices(none_found: pytest.MonkeyPatch) -> None:
    said = why_no_gpu(FakeDriver(devices=0).load)
    assert said == "the driver finds no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def test_what_only_torch_knows(none_found: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Unexpected error\nfrom cudaGetDeviceCount()")

    none_found.setattr(torch.cuda, "init", init)
    said = why_no_gpu(FakeDriver().load)
    assert said.endswith("torch says: Unexpected error from cudaGetDeviceCount()")


def test_a_forked_process(none_found: pytest.MonkeyPatch) -> None:
    none_found.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    none_found.setattr(torch.cuda, "is_available", lambda: True)
    assert "forked from one that uses the GPU" in why_no_gpu(FakeDriver().load)


def test_a_gpu_is_found_by_name_or_number(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver := FakeDriver())
    for wanted in ("cuda", "cuda:0", torch.device("cuda")):
        assert find_device(wanted, driver.load) == torch.device("cuda:0")
    with pytest.raises(BackendError, match="below cuda:1, as this process sees 1, got cuda:3"):
        find_device("cuda:3", driver.load)
    with pytest.raises(BackendError, match="expected a CUDA device, got 'cpu'"):
        find_device("cpu", driver.load)


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver := FakeDriver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    with pytest.raises(BackendError, match=r"Tesla T4 of compute capability 7\.5; .* need 8\.0"):
        find_device("cuda", driver.load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    assert find_device("cuda", driver.load).index == 0


def test_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver := FakeDriver(version=12040))
    facts = device_facts("cuda", driver.load)
    assert str(facts) == (
        "NVIDIA H100, sm_90, 80 GiB, 132 multiprocessors at 1.98 GHz, driver for CUDA 12.4"
    )
    assert (facts.clock_hz, facts.multiprocessors) == (1.98e9, 132)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_this_machine_says_why() -> None:
    with pytest.raises(BackendError, match=r"^no GPU: .+; or use the CPU \(device 'cpu'\)$"):
        CudaLauncher()
