"""Attack and release on one group of lanes; equations in `reference`.

Frames are few and channels many, so the channel axis is the contiguous one: a frame of LANES
channels is one load, and the output stays in registers from frame to frame. Rows are padded to
whole groups by the caller.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.simd import LANES, fma, vload, vsplat, vstore, where_greater

#: Frames that all groups of lanes take before the next ones: 160 kB of 320 channels.
_BLOCK_FRAMES = 128


@part
def smooth(x: Any, y: Any, frames: int, row: int, g: int, coef: Any, state: Any) -> None:
    """Smooth lanes g LANES .. of `frames` flat rows of `row` numbers.

    coef flat (2, row): attack, release; state flat (row,), changed in place.
    """
    at = g * LANES
    attack, release = vload(coef, at), vload(coef, row + at)
    level = vload(state, at)
    for t in range(frames):
        value = vload(x, t * row + at)
        rate = where_greater(value, level, attack, release)
        level = fma(rate, value - level, level)
        vstore(y, t * row + at, level)
    vstore(state, at, level)


@part
def smooth_adjoint(
    x: Any, y: Any, gy: Any, gx: Any, frames: int, row: int, g: int, coef: Any, gcoef: Any,
    state: Any, gstate: Any,
) -> None:  # fmt: skip
    """Gradients of one group of lanes, backwards in time, from the outputs `y`.

    With l the gradient of y[t] and c the rate that was used: gx = c l, gc += l (x - y[t-1]),
    and the gradient of y[t-1] is gy[t-1] + (1 - c) l.
    `gstate` enters as the gradient of the last state and leaves as that of the first.
    """
    at = g * LANES
    attack, release = vload(coef, at), vload(coef, row + at)
    zero = vsplat(coef, 0.0)
    g_attack, g_release, later = zero, zero, vload(gstate, at)
    for t in range(frames - 1, -1, -1):
        total = vload(gy, t * row + at) + later
        before = vload(state, at) if t == 0 else vload(y, (t - 1) * row + at)
        value = vload(x, t * row + at)
        rate = where_greater(value, before, attack, release)
        g_rate = total * (value - before)
        g_attack = g_attack + where_greater(value, before, g_rate, zero)
        g_release = g_release + where_greater(value, before, zero, g_rate)
        vstore(gx, t * row + at, rate * total)
        later = fma(zero - rate, total, total)
    vstore(gstate, at, later)
    vstore(gcoef, at, g_attack)
    vstore(gcoef, row + at, g_release)


@kernel
def run_attack_release(
    x: Any, y: Any, frames: int, row: int, g: int, coef: Any, state: Any
) -> None:
    """See `smooth`."""
    smooth(x, y, frames, row, g, coef, state)


@kernel
def run_all_lanes(x: Any, frames: int, row: int, coef: Any, state: Any) -> None:
    """Every group of lanes, in place, a few frames after another: rows are read as they lie."""
    for begin in range(0, frames, _BLOCK_FRAMES):
        part, count = x[begin * row :], min(_BLOCK_FRAMES, frames - begin)
        for g in range(row // LANES):
            smooth(part, part, count, row, g, coef, state)


@kernel
def run_attack_release_adjoint(
    x: Any, y: Any, gy: Any, gx: Any, frames: int, row: int, g: int, coef: Any, gcoef: Any,
    state: Any, gstate: Any,
) -> None:  # fmt: skip
    """See `smooth_adjoint`."""
    smooth_adjoint(x, y, gy, gx, frames, row, g, coef, gcoef, state, gstate)
