"""A model through the whole way to a driver: real PTX, real words, and the interpreter at its end.

What the stand-in for libcuda was given over the C ABI is all that the interpreter is told, so
arguments that were packed wrongly, cut or counted wrongly would not give the CPU's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from amtcore_interpreter import InterpretedLauncher
from torch import Tensor

from amtcore.features.registry import build_extractor
from amtcore.kernels.gpu.backend import GpuBackend
from amtcore.kernels.gpu.launcher import Kernel
from tests.amtcore.fake_driver import FUNCTION, MULTIPROCESSORS, FakeDriver, Launch, open_launcher

LENGTHS = (300, 40, 0, 441)


def signed(word: int) -> int:
    """As a kernel takes a 64-bit parameter."""
    return word - 2**64 if word >= 2**63 else word


def test_a_model_through_the_driver_equals_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, interpreter = FakeDriver(warps_per_sm=1), InterpretedLauncher()
    launcher = open_launcher(monkeypatch, driver)
    right, given = launcher.launch, []

    def launch(kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        given.append(kernel)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        by_address = {each.data_ptr(): each for each in tensors if each.numel()}

        def run(at_driver: Launch) -> None:
            assert driver.loads[at_driver.function - FUNCTION - 1].decode() == kernel.ptx
            words = [by_address.get(word, signed(word)) for word in at_driver.words]
            interpreter.launch(kernel, at_driver.grid[0], words)

        driver.run = run
        right(kernel, warps, arguments)

    monkeypatch.setattr(launcher, "launch", launch)
    here, there = build_extractor("dau1997"), build_extractor("dau1997")
    there.place(GpuBackend(launcher))
    assert there.backend.name == "cuda"
    rng = np.random.default_rng(0)
    clips = [0.05 * rng.standard_normal(n).astype(np.float32) for n in LENGTHS]
    for _ in range(2):
        for got, expected in zip(there.extract(clips), here.extract(clips), strict=True):
            for stream, frames in expected.items():
                np.testing.assert_array_equal(torch.as_tensor(got[stream]), frames)
    assert len(driver.loads) == len(set(given)) < len(driver.launches)
    assert all(1 <= each.grid[0] <= MULTIPROCESSORS for each in driver.launches)
