"""What `make gpu-kernels` would find wrong, and what is reckoned of Dau1997."""

from __future__ import annotations

import re

import torch

from benchmarks.chips import A100, H100
from benchmarks.gpu_kernels import fault_of, recorded, run_case
from benchmarks.gpu_reckoned import CASES, executed, hits_of, run_model
from benchmarks.sass import assemble

#: The most instructions of a sample and warp of Dau1997, pooled.
MOST = 270


def test_faults_are_seen() -> None:
    """Of a kernel that is given too few registers, and of one whose rounding is not asked for."""
    with recorded() as launcher:
        run_case("AdaptLoop", torch.float32)
    first, *_ = launcher.used.values()
    tight = re.sub(r"\.minnctapersm \d+", ".maxnreg 24", first.ptx)
    assert fault_of(tight, "sm_90")[0] == "spills"
    loose = re.sub(r"\b(add|mul|sub)\.rn\.", r"\1.", first.ptx)
    assert fault_of(loose, "sm_90")[0] == "contracts"


def test_dau1997_of_speech() -> None:
    case = CASES[0]
    launcher, warps = run_model(case, seconds=0.1)
    (kernel,) = launcher.used.values()
    profile = launcher.profile(kernel)
    hits = hits_of(kernel.ptx, profile)
    assert sum(hits.values()) == profile.instructions
    assert warps == 1
    for chip in (A100, H100):
        assert not fault_of(kernel.ptx, chip.arch)[0]
        found = executed(kernel, profile, chip, 0.1)
        assert found.registers == assemble(kernel.ptx, chip.arch).registers <= 255
        per_sample = found.instructions / 44100
        assert found.fewest < per_sample < 2 * found.fewest, "speech makes more than the fewest"
        assert found.fewest <= MOST
        assert 1.0 / found.seconds(chip) > 10_000
