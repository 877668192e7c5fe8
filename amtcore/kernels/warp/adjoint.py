"""Kernels of the gradients of one operation or one bank; see `fused.adjoint`.

Blocks are as long as a processor's: sums over a block then have the same order. Signals of a block,
the tape and the states before each block are in memory of the warp's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from amtcore.kernels.fused.cpu import BLOCK
from amtcore.kernels.fused.filters import get_filter
from amtcore.kernels.fused.operations import get_adjoint
from amtcore.kernels.vector.simd import LANES, own_number, vload, vsplat, vstore
from amtcore.kernels.vector.warp_lowering import lane_id
from amtcore.kernels.warp.device import integers_at, numbers_of, take, warp_id
from amtcore.kernels.warp.forward import Program
from amtcore.kernels.warp.written import write

_ROW = BLOCK * LANES


def taped_rows(program: Program) -> int:
    """Rows of scratch of a block; what is before the first sample is written down too."""
    taped = [get_adjoint(code).taped(argument) for code, _, _, argument in program.ops]
    taped += [get_filter(kind).taped for kind, *_ in program.filters]
    return max(taped, default=0) * (BLOCK + 1)


def work_size(program: Program, samples: int) -> int:
    """Numbers of memory that a warp needs of its own."""
    blocks = -(-samples // BLOCK)
    return (4 * BLOCK + taped_rows(program) + blocks * program.states) * LANES


@njit
def _load(x: Any, row: int, t0: int, n: int, buffer: Any) -> None:
    """Samples of this lane's row."""
    for t in range(n):
        vstore(buffer, t * LANES, vsplat(x, x[row + t0 + t]))


@njit
def _load_gradient(gy: Any, place: int, row: int, rate: int, t0: int, n: int, buffer: Any) -> None:
    """As `_load`, of a row of the output; zeros for a lane that has none."""
    for t in range(n):
        vstore(buffer, t * LANES, vsplat(gy, 0.0))
        if row >= 0:
            vstore(buffer, t * LANES, vsplat(gy, gy[place + row * rate + t0 + t]))


def _again(program: Program) -> Any:
    """The block once more, for its states."""
    lines = [f"op_{row[0]}({row}, a, b, b, n, coef, state)" for row in program.ops]
    lines += [f"filter_{row[0]}({row}, a, b, n, coef, state)" for row in program.filters]
    scope = {f"filter_{row[0]}": get_filter(row[0]).forward for row in program.filters}
    scope |= {f"op_{row[0]}": get_adjoint(row[0]).forward for row in program.ops}
    return write("a, b, n, coef, state", lines, scope)


def _backwards(program: Program) -> Any:
    """Gradients of the block: of its samples in `ga`, of coefficients and state added up."""
    given = "gy, place, {row}, rate, t0, n, g"
    end = "n, coef, gcoef, state, gstate, scratch)"
    scope: dict[str, Any] = {"load": _load_gradient, "vstore": vstore, "vsplat": vsplat}
    lines = []
    for row in program.ops:
        scope["op"] = get_adjoint(row[0]).adjoint
        lines += [f"load({given.format(row='own')})", f"op({row}, a, g, ga, {end}"]
    if program.filters:
        lines += ["for t in range(n):", f"    vstore(ga, t * {LANES}, vsplat(ga, 0.0))"]
    for m, row in enumerate(program.filters):
        scope[f"filter_{row[0]}"] = get_filter(row[0]).adjoint
        lines.append(f"load({given.format(row=f'columns[first + {m * LANES}]')})")
        lines.append(f"filter_{row[0]}({row}, a, g, ga, {end}")
    parameters = "a, g, ga, gy, place, own, columns, first, rate, t0, " + end[:-1]
    return write(parameters, lines, scope)


def adjoint_of(program: Program) -> Callable[..., None]:
    """The kernel, a function of addresses (of numbers where they end in _at) and sizes.

    x (clip, row, time) with one row or `channels`, gy (clip, gy_rows, time), gx (clip, channel,
    time); coefficients and states packed; the gradient of the last state becomes that of the first,
    and gcoef is added to. `work` holds `work_size` numbers a warp.
    """
    numbers = numbers_of(program.double)
    coefs, states, filters = program.coefs, program.states, len(program.filters)
    again, backwards, taped = _again(program), _backwards(program), taped_rows(program)
    shared = program.shared

    def kernel(
        queue: int, clips: int, groups: int, channels: int, samples: int, gy_rows: int, x_at: int,
        gy_at: int, gx_at: int, coef_at: int, gcoef_at: int, state_at: int, gstate_at: int,
        columns_at: int, work_at: int, work_size: int, x_rows: int,
    ) -> None:  # fmt: skip
        x, gy, gx, columns = numbers(x_at), numbers(gy_at), numbers(gx_at), integers_at(columns_at)
        work = numbers(work_at)[warp_id() * work_size :]
        a, b, g, ga = work, work[_ROW:], work[2 * _ROW :], work[3 * _ROW :]
        scratch = work[4 * _ROW :]
        before, lane = scratch[taped * LANES :], lane_id()
        blocks = (samples + BLOCK - 1) // BLOCK
        while True:
            item = take(queue)
            if item >= clips * groups:
                return
            clip, group = item // groups, item % groups
            row = group * LANES + lane
            own = row if row < channels else -1
            source = (clip * x_rows + (0 if shared else min(row, channels - 1))) * samples
            first, place = group * filters * LANES + lane, clip * gy_rows * samples
            coef = numbers(coef_at)[group * coefs * LANES :]
            gcoef = numbers(gcoef_at)[item * coefs * LANES :]
            state = numbers(state_at)[item * states * LANES :]
            gstate = numbers(gstate_at)[item * states * LANES :]
            for i in range(blocks):
                for r in range(states):
                    vstore(before, (i * states + r) * LANES, vload(state, r * LANES))
                n = min(BLOCK, samples - i * BLOCK)
                _load(x, source, i * BLOCK, n, a)
                again(a, b, n, coef, state)
            for i in range(blocks - 1, -1, -1):
                t0 = i * BLOCK
                n = min(BLOCK, samples - t0)
                _load(x, source, t0, n, a)
                backwards(
                    a, g, ga, gy, place, own, columns, first, samples, t0, n, coef, gcoef,
                    before[i * states * LANES :], gstate, scratch,
                )  # fmt: skip
                if own >= 0:
                    for t in range(n):
                        target = (clip * channels + own) * samples + t0 + t
                        gx[target] = own_number(vload(ga, t * LANES))

    return kernel
