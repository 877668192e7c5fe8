"""Speed and memory of the integrate-and-fire layer against its plain loop in PyTorch.

Times are the best of several runs of one process with two threads; figures of memory are
the growth of a fresh process's peak. The loop records its graph while learning, and not in
`no_grad`, as the layer does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from amtcore import LIFExodus, set_num_threads
from amtcore.kernels.vector.threads import parallel_for
from benchmarks.report import peak_mb, reset_peak_mb, table, write_section

BATCH, STEPS, NEURONS = 8, 10_000, 1024
THREADS = 2
_HEAD = ("what", "kernel", "plain loop", "ratio", "wanted", "copy", "ratio of a mere copy")
_WANTED = {"forward, no_grad": "100", "forward and backward": "50"}
_REPEATS = {"kernel": 7, "plain loop": 2}
_BACKENDS = {"kernel": None, "plain loop": "reference"}


def _layer(backend: str | None) -> LIFExodus:
    return LIFExodus((NEURONS, NEURONS), tau_syn=0.01, backend=backend)


def _data(steps: int) -> torch.Tensor:
    """Return input that makes every neuron fire about every fifteenth step."""
    return 0.02 * torch.rand(BATCH, steps, NEURONS, generator=torch.Generator().manual_seed(0))


def _forward(layer: LIFExodus, x: torch.Tensor, upstream: torch.Tensor) -> None:
    layer.reset_state()(x)


def _inference(layer: LIFExodus, x: torch.Tensor, upstream: torch.Tensor) -> None:
    with torch.no_grad():
        _forward(layer, x, upstream)


def _learning(layer: LIFExodus, x: torch.Tensor, upstream: torch.Tensor) -> None:
    """Run forward and backward as inside a network, with gradients of output and input."""
    leaf = x.detach().requires_grad_()
    layer.reset_state()(leaf).backward(upstream)


Call = Callable[[LIFExodus, torch.Tensor, torch.Tensor], None]
_CALLS: dict[str, Call] = {
    "forward, no_grad": _inference,
    "forward, learnable constants": _forward,
    "forward and backward": _learning,
}


def _least_s(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def _seconds(call: Call, kind: str) -> float:
    layer, x = _layer(_BACKENDS[kind]), _data(STEPS)
    upstream = torch.ones_like(x)
    call(layer, x[:, :50], upstream[:, :50])
    return _least_s(lambda: call(layer, x, upstream), _REPEATS[kind])


def _peak_growth_mb(what: str, steps: int) -> float:
    """Return the megabytes that one call adds to the peak of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.lif", what, str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))


def _print_growth(what: str, steps: int) -> None:
    layer, x = _layer(None), _data(steps)
    upstream = torch.ones_like(x)
    _CALLS[what](layer, x[:, :50], upstream[:, :50])
    before = reset_peak_mb()
    _CALLS[what](layer, x, upstream)
    print(json.dumps(peak_mb() - before))


def _copy_s(passes: int) -> float:
    """Return the time to copy an array of the output's size `passes` times into mapped memory."""
    source = _data(STEPS).numpy()
    target = np.zeros_like(source)

    def once() -> None:
        for _ in range(passes):
            parallel_for(lambda item: np.copyto(target[item], source[item]), BATCH)

    return _least_s(once, 7)


#: Arrays of the output's size that a call must at least read and write.
_PASSES = {"forward, no_grad": 1, "forward, learnable constants": 1, "forward and backward": 2}


def _speed_rows() -> list[tuple[str, ...]]:
    rows = []
    for what, call in _CALLS.items():
        kernel, loop = _seconds(call, "kernel"), _seconds(call, "plain loop")
        copy = _copy_s(_PASSES[what])
        times = (
            f"{1e3 * kernel:.0f} ms",
            f"{loop:.2f} s",
            f"{loop / kernel:.0f}",
            _WANTED.get(what, ""),
        )
        rows.append((what, *times, f"{1e3 * copy:.0f} ms", f"{loop / copy:.0f}"))
    return rows


def main() -> None:
    """Measure and write the section."""
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    speed = table(_HEAD, _speed_rows())
    rows = [
        (what, *(f"{_peak_growth_mb(what, STEPS // part):.0f} MB" for part in (4, 2, 1)))
        for what in ("forward, no_grad", "forward and backward")
    ]
    head = ("peak memory of a call", *(f"{STEPS // part} steps" for part in (4, 2, 1)))
    output_mb = 4 * BATCH * STEPS * NEURONS / 2**20
    note = (
        f"Input ({BATCH}, {STEPS}, {NEURONS}), one synapse a neuron, float32, {THREADS} threads. "
        f"Output is {output_mb:.0f} MB. Copy: one such array read and one written, for forward and "
        "again for backward, into memory that was there before: what moving the data costs."
    )
    body = f"{note}\n\n{speed}\n\n{table(head, rows)}"
    write_section("Integrate-and-fire layer", "python -m benchmarks.lif", body)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _print_growth(sys.argv[1], int(sys.argv[2]))
    else:
        main()
