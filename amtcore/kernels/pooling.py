"""Frames of a chain: which outputs a frame covers, and its running statistic; compiled parts."""

from __future__ import annotations

from typing import Any

from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES, fma, vload, vmax, vstore

#: Samples of a block that gradients go back over, on every device.
ADJOINT_BLOCK = 128
# Modes of a chain's outputs: store them, store a bank's, or pool a bank's into frames.
STORE = 0
STORE_BANK = 1
POOL_BANK = 2
# Frame statistics.
POOLS = {"mean": 0, "rms": 1, "max": 2, "subsample": 3}


@part
def pool_samples(y: Any, n: int, pool: int, first: bool, state: Any, s: int) -> None:
    """Add `n` samples of one frame to its running statistic in state row `s`."""
    total = vload(state, s * LANES)
    if pool == 0:
        for t in range(n):
            total = total + vload(y, t * LANES)
    elif pool == 1:
        for t in range(n):
            value = vload(y, t * LANES)
            total = fma(value, value, total)
    else:
        if first and n > 0:
            total = vload(y, 0)
        if pool == 2:
            for t in range(n):
                total = vmax(vload(y, t * LANES), total)
    vstore(state, s * LANES, total)


@part
def frame_bounds(f: int, frame: Any) -> Any:
    """Return the first output of frame `f`, the output after its last, and the samples needed.

    `frame` is as in `chain_loop.run_chain`.
    """
    num, den, start, stride, delay = frame[0], frame[1], frame[2], frame[3], frame[4]
    begin, end = -(-f * num // den), -(-(f + 1) * num // den)
    return begin, end, (end - 1) * stride + delay + 1 - start


@part
def first_frame(mode: int, frame: Any) -> Any:
    """Return the number of earlier outputs, the frame of the next one, and that frame's bounds."""
    if mode != POOL_BANK:
        return 0, 0, 0, 0, 0
    made = max(0, -(-(frame[2] - frame[4]) // frame[3]))
    f = made * frame[1] // frame[0]
    begin, end, last = frame_bounds(f, frame)
    return made, f, begin, end, last
