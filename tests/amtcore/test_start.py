"""What a process imports before it computes: every worker pays for it."""

from __future__ import annotations

import subprocess
import sys

import torch

from amtcore.kernels.ops import autograd

#: Half a second to three each, and no part of a job needs them.
LEFT_OUT = {"torch._dynamo", "sympy", "scipy.interpolate", "ray", "matplotlib"}
_FEATURES = """
import sys, numpy as np
from amtcore.features.build import build_extractor
build_extractor("dau1997").extract([np.zeros(800, np.float32)])
print(*sys.modules)
"""


def test_features_are_computed_without_compiler_and_scipy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FEATURES], check=True, capture_output=True, text=True
    )
    assert not LEFT_OUT & set(done.stdout.split())


def test_the_mark_of_a_constant_is_torchs_own() -> None:
    """It is set by hand, as torch's decorator would import the compiler."""

    def marked() -> bool:
        return True

    torch.compiler.assume_constant_result(marked)
    assert vars(marked).items() <= vars(autograd._traces_a_transform).items()
