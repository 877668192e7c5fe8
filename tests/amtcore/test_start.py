"""What a process imports before it computes: every worker pays for it."""

from __future__ import annotations

import subprocess
import sys

#: Half a second to three each, and no part of a job needs them; operators import the compiler.
LEFT_OUT = {"torch._dynamo", "sympy", "scipy.linalg", "scipy.interpolate", "ray", "matplotlib"}
#: Loaded by those who ask for them; the interpreter is a distribution of its own.
ASKED_FOR = {"torchaudio", "amtcore.features.mel", "amtcore_interpreter"}
#: Who compiles a kernel imports it, and with it much else; who finds one on disk does not.
OF_A_COMPILER = "numba.np.arraymath"
_FEATURES = """
import sys, numpy as np
from amtcore.features.registry import build_extractor
from amtcore.features.registry import BUILT_IN
streams = {"dau1997": {"modulation": {}, "spikes": {"gain": 1.0}}}
for name in BUILT_IN:
    build_extractor(name, streams=streams.get(name)).extract([np.zeros(800, np.float32)])
    print(*sys.modules)
"""


def test_features_are_computed_without_compiler_and_scipy() -> None:
    command = [sys.executable, "-c", _FEATURES]
    for _ in range(2):  # the first may be the first ever, and compile
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        first, *_, last = (set(line.split()) for line in done.stdout.splitlines())
        if OF_A_COMPILER not in last:
            break
    assert not (LEFT_OUT | {OF_A_COMPILER}) & first
    assert not ASKED_FOR & last
    # Some models interpolate.
    assert not (LEFT_OUT - {"scipy.linalg", "scipy.interpolate"}) & last
