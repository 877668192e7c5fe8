"""One training step of a learnable Dau1997: forward and backward over a second at full rate.

Time is the best of several steps of one process with two threads. Memory is
measured in a fresh process: the growth of its peak over the step, and the peak itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

from amtcore import Dau1997, set_num_threads
from benchmarks.kernel import FS_HZ
from benchmarks.report import peak_mb, reset_peak_mb, table, write_section

THREADS = 2
_STEPS = 7
_WANTED_S, _WANTED_MB = 0.5, 2048
_WARM_SAMPLES = 1000


def step(model: Dau1997, x: torch.Tensor) -> None:
    """Run a step. The loss is the mean square of all modulation outputs; x gets a gradient too."""
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    torch.cat([band.square().mean().reshape(1) for band in model(leaf)]).sum().backward()


def _prepare() -> tuple[Dau1997, torch.Tensor]:
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    x = 0.05 * torch.randn(1, FS_HZ, generator=torch.Generator().manual_seed(0))
    model = Dau1997(FS_HZ, learnable=True)
    step(model, x[:, :_WARM_SAMPLES])
    return model, x


def _print_memory() -> None:
    model, x = _prepare()
    whole, before = peak_mb(), reset_peak_mb()
    step(model, x)
    print(json.dumps([peak_mb() - before, max(whole, peak_mb())]))


def main() -> None:
    """Measure and write the section."""
    command = [sys.executable, "-m", "benchmarks.training", "memory"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    growth, peak = json.loads(done.stdout)
    model, x = _prepare()
    best = cpu = float("inf")
    for _ in range(_STEPS):
        begin, busy = time.perf_counter(), time.process_time()
        step(model, x)
        best = min(best, time.perf_counter() - begin)
        cpu = min(cpu, time.process_time() - busy)
    output = 4 * FS_HZ * model.modulation.offsets[-1] / 2**20
    rows = [
        ("wall seconds", f"{best:.2f}", f"{_WANTED_S:g}"),
        ("CPU seconds, all threads", f"{cpu:.2f}", ""),
        ("growth of peak memory, MB", f"{growth:.0f}", ""),
        ("peak memory of the process, MB", f"{peak:.0f}", f"{_WANTED_MB}"),
    ]
    note = (
        f"Learnable Dau1997, one second at {FS_HZ} Hz, {model.num_channels} channels, full-rate "
        f"output of {output:.0f} MB, float32, {THREADS} threads; gradients of the input and of "
        "every constant. Importing torch is most of the process's memory."
    )
    body = f"{note}\n\n{table(('one step', 'measured', 'wanted below'), rows)}"
    write_section("Training step", "python -m benchmarks.training", body)


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        _print_memory()
    else:
        main()
