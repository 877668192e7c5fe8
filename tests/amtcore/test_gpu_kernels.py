"""Every kernel of every class through ptxas: accepted, nothing spilled, nothing contracted.

The interpreter stands in for a GPU. Each class runs on small signals, forward and backward, in both
types, which compiles every kernel that it needs. `make test-long` checks all of these
kernels; `test_warp_kernels` checks kernels of each family at every change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from amtcore.kernels import devices as chosen
from amtcore.kernels.gpu.backend import GpuBackend

from .constant_cases import CASES
from .ptxas import assemble, faults
from .warp_cases import Recorder

# A100 and H100.
ARCHITECTURES = ("sm_80", "sm_90")


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Inside, the operators on tensors of the CPU are the GPU's kernels, interpreted."""
    launcher = Recorder()
    with patch.object(chosen, "_of_cpu_tensors", GpuBackend(launcher)):
        yield launcher


def run_case(name: str, dtype: torch.dtype) -> None:
    """Run a class forward without gradients, then forward and backward with gradients."""
    case = CASES[name]
    with torch.no_grad():
        case.outputs(case.build(dtype=dtype))
    outputs = case.outputs(case.build(dtype=dtype, learnable=True))
    sums = [y.sum() for y in outputs if y.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_a_class(name: str) -> None:
    with recorded() as launcher:
        for dtype in (torch.float32, torch.float64):
            run_case(name, dtype)
    wrong = {
        kernel.name: found
        for kernel in launcher.used.values()
        for arch in ARCHITECTURES
        if (found := faults(kernel.ptx, arch))
    }
    assert not wrong


@pytest.mark.long
def test_faults_are_seen() -> None:
    """A kernel with too few registers spills; one without rounding modes is contracted."""
    with recorded() as launcher:
        run_case("AdaptLoop", torch.float32)
    first, *_ = launcher.used.values()
    assert faults(first.ptx, "sm_90") == []
    tight = re.sub(r"\.minnctapersm \d+", ".maxnreg 24", first.ptx)
    assert faults(tight, "sm_90") == ["spills on sm_90"]
    loose = re.sub(r"\b(add|mul|sub)\.rn\.", r"\1.", first.ptx)
    assert faults(loose, "sm_90") == ["contracts on sm_90"]
    with pytest.raises(ValueError, match=r"ptxas for sm_80: .*nonsense"):
        assemble(first.ptx.replace("ret;", "nonsense; ret;", 1), "sm_80")
