"""Speed and memory of the integrate-and-fire layer against its plain loop in PyTorch.

Times are the best of several runs of one process with two threads; every figure of memory is the
growth of a fresh process's peak. The loop is measured as the layer is called: while learning it
records its graph, in `no_grad` it does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from amtcore import LIFExodus, set_num_threads
from benchmarks.report import peak_mb, reset_peak_mb, table, write_section

BATCH, STEPS, NEURONS = 8, 10_000, 1024
THREADS = 2
_REPEATS = {"kernel": 7, "plain loop": 2}
_BACKENDS = {"kernel": None, "plain loop": "reference"}


def _layer(backend: str | None) -> LIFExodus:
    return LIFExodus((NEURONS, NEURONS), tau_syn=0.01, backend=backend)


def _data(steps: int) -> torch.Tensor:
    """Input that makes every neuron fire about every fifteenth step."""
    return 0.02 * torch.rand(BATCH, steps, NEURONS, generator=torch.Generator().manual_seed(0))


def _forward(layer: LIFExodus, x: torch.Tensor) -> None:
    layer.reset_state()(x)


def _inference(layer: LIFExodus, x: torch.Tensor) -> None:
    with torch.no_grad():
        _forward(layer, x)


def _learning(layer: LIFExodus, x: torch.Tensor) -> None:
    """Forward and backward, with the gradient of the input as inside a network."""
    leaf = x.detach().requires_grad_()
    spikes = layer.reset_state()(leaf)
    spikes.backward(torch.ones_like(spikes))


_CALLS: dict[str, Callable[[LIFExodus, torch.Tensor], None]] = {
    "forward, no_grad": _inference,
    "forward, learnable constants": _forward,
    "forward and backward": _learning,
}


def _seconds(call: Callable[[LIFExodus, torch.Tensor], None], kind: str) -> float:
    layer, x, best = _layer(_BACKENDS[kind]), _data(STEPS), float("inf")
    call(layer, x[:, :50])
    for _ in range(_REPEATS[kind]):
        begin = time.perf_counter()
        call(layer, x)
        best = min(best, time.perf_counter() - begin)
    return best


def _peak_growth_mb(what: str, steps: int) -> float:
    """Megabytes that one call of the kernel adds to the peak of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.lif", what, str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))


def _print_growth(what: str, steps: int) -> None:
    layer, x = _layer(None), _data(steps)
    _CALLS[what](layer, x[:, :50])
    before = reset_peak_mb()
    _CALLS[what](layer, x)
    print(json.dumps(peak_mb() - before))


def _speed_rows() -> list[tuple[str, ...]]:
    rows = []
    for what, call in _CALLS.items():
        kernel, loop = _seconds(call, "kernel"), _seconds(call, "plain loop")
        rows.append((what, f"{1e3 * kernel:.0f} ms", f"{loop:.2f} s", f"{loop / kernel:.0f}"))
    return rows


def _copy_ms() -> float:
    """Copying an array of the output's size into fresh memory: less is not to be had."""
    x, best = _data(STEPS), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        x.clone()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def main() -> None:
    """Measure and write the section."""
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    speed = table(("what", "kernel", "plain loop", "ratio"), _speed_rows())
    rows = [
        (what, *(f"{_peak_growth_mb(what, STEPS // part):.0f} MB" for part in (4, 2, 1)))
        for what in ("forward, no_grad", "forward and backward")
    ]
    head = ("peak memory of a call", *(f"{STEPS // part} steps" for part in (4, 2, 1)))
    output_mb = 4 * BATCH * STEPS * NEURONS / 2**20
    note = (
        f"Input ({BATCH}, {STEPS}, {NEURONS}), one synapse a neuron, float32, {THREADS} threads. "
        f"Output is {output_mb:.0f} MB; `clone` of as much takes {_copy_ms():.0f} ms here."
    )
    body = f"{note}\n\n{speed}\n\n{table(head, rows)}"
    write_section("Integrate-and-fire layer", "python -m benchmarks.lif", body)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _print_growth(sys.argv[1], int(sys.argv[2]))
    else:
        main()
