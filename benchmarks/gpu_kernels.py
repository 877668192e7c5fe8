"""Every kernel of every class, through ptxas: accepted, nothing spilled, nothing contracted.

`make gpu-kernels`. The classes run on small signals, forward and backward, in both types, with the
interpreter in the place of a GPU: so every kernel that they need is compiled, and none that they do
not. The tests do so for every family at every change; here are the whole chains of every class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from amtcore.kernels.backends import chosen
from amtcore.kernels.backends.warp import WarpBackend
from benchmarks.chips import A100, H100
from benchmarks.report import table
from benchmarks.sass import assemble
from tests.amtcore.constant_cases import CASES
from tests.amtcore.warp_cases import Recorder

_HEAD = ("kernel", "chip", "registers", "spilled bytes", "shared bytes", "contracted")


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Inside, the operators on tensors of the CPU are the GPU's kernels, interpreted."""
    launcher = Recorder()
    with patch.object(chosen, "_of_cpu_tensors", WarpBackend(launcher)):
        yield launcher


def run_case(name: str, dtype: torch.dtype) -> None:
    """A class forward without gradients, then with them and backward."""
    case = CASES[name]
    with torch.no_grad():
        case.outputs(case.build(dtype=dtype))
    outputs = case.outputs(case.build(dtype=dtype, learnable=True))
    sums = [y.sum() for y in outputs if y.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()


def fault_of(ptx: str, arch: str) -> tuple[str, tuple[str, ...]]:
    """What is wrong with a kernel on a chip, "" for nothing, and its row of the table."""
    made = assemble(ptx, arch)
    contracted = made.cubin != assemble(ptx, arch, contract=False).cubin
    spilled = made.spill_store_bytes + made.spill_load_bytes
    row = (arch, f"{made.registers}", f"{spilled}", f"{made.shared_bytes}",
           "yes" if contracted else "no")  # fmt: skip
    wrong = [*(["spills"] if spilled else []), *(["contracts"] if contracted else [])]
    return " and ".join(wrong), row


def main() -> None:
    """Check all; exit 1 where one spills or contracts."""
    with recorded() as launcher:
        for name in CASES:
            for dtype in (torch.float32, torch.float64):
                run_case(name, dtype)
    rows, faults = [], []
    for kernel in launcher.used.values():
        for chip in (A100, H100):
            fault, row = fault_of(kernel.ptx, chip.arch)
            rows.append((kernel.name, *row))
            faults += [f"{kernel.name} {fault} on {chip.arch}"] if fault else []
    print(table(_HEAD, rows))
    print(f"\n{len(launcher.used)} kernels; " + ("; ".join(faults) or "all fine"))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
