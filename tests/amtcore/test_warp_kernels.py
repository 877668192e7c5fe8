"""Every kernel compiled for a GPU, run by the interpreter: the processor's numbers, bit for bit."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from amtcore.kernels.devices import get_backend
from amtcore.kernels.gpu.launcher import Kernel
from amtcore.kernels.registry import BUILT_IN

from .ptxas import faults
from .warp_cases import DTYPES, Case, all_cases, interpreted, operations, recorder

CASES = all_cases()
# One of the chips for which `make test-long` assembles every kernel.
ARCHITECTURE = "sm_90"
_looked_at: set[str] = set()
#: `make test` runs one in 6 cases in single precision, and the first case in double precision;
#: `make test-long` runs all of them. `test_no_operation_is_left_out` finds missing kernels.
SINGLE = 6


def _param(case: Case, dtype: torch.dtype) -> Any:
    number = CASES.index(case)
    long = number % SINGLE > 0 or (number > 0 and dtype == torch.float64)
    name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(case, dtype, marks=[pytest.mark.long] * long, id=name)


def test_no_operation_is_left_out() -> None:
    assert {op.operation for op in operations(torch.float32).values()} == set(BUILT_IN)


@pytest.mark.parametrize(("case", "dtype"), [_param(*each) for each in product(CASES, DTYPES)])
def test_kernel(case: Case, dtype: torch.dtype) -> None:
    wanted = case.call(get_backend("cpu"), dtype)
    recorder().used.clear()
    got = case.call(interpreted(), dtype)
    assert recorder().used
    assert len(wanted) == len(got)
    for want, have in zip(map(np.asarray, wanted), map(np.asarray, got), strict=True):
        assert want.shape == have.shape and want.dtype == have.dtype
        if dtype == torch.float32:
            # Denormals that are stored and not computed with are left as they are: they count as 0.
            tiny = np.finfo(np.float32).tiny
            want, have = (np.where(np.abs(each) < tiny, 0.0, each) for each in (want, have))
            np.testing.assert_array_equal(have, want)
        else:
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-300)
    assert any(np.asarray(want).any() for want in wanted)
    for kernel in recorder().used.values():
        check_machine_code(kernel)


def check_machine_code(kernel: Kernel) -> None:
    """What the assembler of a GPU makes of a kernel."""
    if kernel.name in _looked_at:
        return
    _looked_at.add(kernel.name)
    # Told how to round each, an assembler may not make one of a product and a sum.
    assert not re.search(r"\b(add|sub|mul)(\.ftz)?\.f(32|64)\b", kernel.ptx)
    assert faults(kernel.ptx, ARCHITECTURE) == [], kernel.name
