"""Kernels of a chain on a GPU, forward and backward: operations, then a bank.

A kernel is compiled for one chain, whose table is constant in it. There are two forms:

    in registers  one sample at a time; states are in registers, and coefficients if they fit
    in blocks     blocks of samples in shared memory, states in global memory: for operations with
                  more states than registers, or that change the rate

A warp computes one clip's group of LANES channels at a time. It takes groups from a queue, so that
short clips need not wait for the longest.

Gradients go backwards over blocks of the CPU's block length, so that sums over a block have the
same order. Each warp has scratch memory for a block, the tape, and the state before each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit

from amtcore.kernels.chain import Steps
from amtcore.kernels.gpu.device_code import (
    compile_text,
    integers_at,
    numbers_of,
    shared_rows,
    take,
    warp_id,
)
from amtcore.kernels.gpu.launcher import FEW_WARPS, MANY_WARPS
from amtcore.kernels.operation import Rate
from amtcore.kernels.operations.modulation_filters import get_filter
from amtcore.kernels.pooling import (
    ADJOINT_BLOCK,
    POOL_BANK,
    POOLS,
    STORE,
    first_frame,
    frame_bounds,
    pool_samples,
)
from amtcore.kernels.vector.simd import LANES, own_number, vload, vsplat, vsqrt, vstore
from amtcore.kernels.vector.warp_lowering import lane_id, private_rows

#: Samples of a block in shared memory.
SHARED_BLOCK = 32
#: Registers that coefficients and states may take together, and states alone.
_ALL_IN_REGISTERS, _STATES_IN_REGISTERS = 112, 90
#: Registers up to which MANY_WARPS fit: for states alone, and for states and coefficients of a
#: chain with exponentials or logarithms, whose series need registers too.
_STATES_OF_MANY_WARPS, _WITH_POWERS = 50, 100

Row = tuple[int, int, int, int]


@dataclass(frozen=True)
class ChainKernelSpec:
    """The constants that a kernel is compiled for.

    Args:
        steps: Operations of the chain.
        rows: First coefficient row and first state row of each.
        filters: Rows of a bank, see `modulation_filters`; none to store the operations' outputs.
        pool: Statistic of a frame; None at full rate.
        shared: True if the input is one row for all channels.
        double: True for float64.
        coefs: Coefficient rows of a group.
        states: State rows of a group.
    """

    steps: Steps
    rows: tuple[tuple[int, int], ...]
    filters: tuple[Row, ...]
    pool: int | None
    shared: bool
    double: bool
    coefs: int
    states: int

    def block_rows(self, gradient: str = "") -> list[str]:
        """Return the last arguments of every operation's part, from `argument` on."""
        return [
            f"{argument}, coef, {gradient and 'gcoef, '}{c}, state, {gradient and 'gstate, '}{s}"
            for (_, argument), (c, s) in zip(self.steps, self.rows, strict=True)
        ]

    @property
    def words(self) -> int:
        """Registers that a number takes."""
        return 2 if self.double else 1

    @property
    def states_in_registers(self) -> bool:
        """True if states are in registers, and samples come one at a time."""
        keeps_rate = all(operation.rate(argument) == Rate() for operation, argument in self.steps)
        return self.states * self.words <= _STATES_IN_REGISTERS and keeps_rate

    @property
    def coefs_in_registers(self) -> bool:
        """True if coefficients are in registers too."""
        registers = (self.states + self.coefs) * self.words
        return self.states_in_registers and registers <= _ALL_IN_REGISTERS

    @property
    def warps(self) -> int:
        """Warps that fit on a multiprocessor, by their registers."""
        if self.double:
            return FEW_WARPS
        most = _STATES_OF_MANY_WARPS
        held = self.states if self.states_in_registers else 0
        if self.coefs_in_registers:
            powers = any(operation.exponentials for operation, _ in self.steps)
            most = _WITH_POWERS if powers else _ALL_IN_REGISTERS
            held += self.coefs
        return MANY_WARPS if held <= most else FEW_WARPS


@njit
def _only(kept: Any, other: Any) -> Any:
    return kept


@njit
def _other(other: Any, kept: Any) -> Any:
    return kept


@njit
def _store(y: Any, n: int, row: int, rate: int, made: int, out: Any, place: int) -> None:
    """Store this lane's `n` samples to output row `row`, or nowhere for -1."""
    if row >= 0:
        for k in range(n):
            out[place + row * rate + made + k] = own_number(vload(y, k * LANES))


def _mover(rows: int, kept: bool) -> Any:
    """Return a function that copies rows one by one, with constant indices for registers."""
    lines = [f"vstore(target, {r * LANES}, vload(source, {r * LANES}))" for r in range(rows)]
    return compile_text("target, source", lines if kept else [], {"vload": vload, "vstore": vstore})


def _operations(spec: ChainKernelSpec) -> Any:
    """Return a function that runs all operations on `n` samples and returns the output count."""
    calls = [f"n = op_{k}(a, b, side, n, {rows})" for k, rows in enumerate(spec.block_rows())]
    scope = {f"op_{k}": operation.block for k, (operation, _) in enumerate(spec.steps)}
    return compile_text("a, b, side, n, coef, state", [*calls, "return n"], scope)


def _outputs(spec: ChainKernelSpec) -> Any:
    """Return a function that filters `n` outputs in `a`, then stores or pools them."""
    lines, scope = [], {"_store": _store, "pool_samples": pool_samples}
    if not spec.filters:
        lines = ["_store(a, n, row, rate, made, out, place)"]
    for m, row in enumerate(spec.filters):
        scope[f"filter_{row[0]}"] = get_filter(row[0]).forward
        lines.append(f"filter_{row[0]}({row}, a, b, n, coef, state)")
        if spec.pool is None:
            lines.append(f"_store(b, n, columns[first + {m * LANES}], rate, made, out, place)")
        else:
            lines.append(f"pool_samples(b, n, {spec.pool}, opens, state, {row[3]})")
    parameters = "a, b, n, coef, state, row, columns, first, rate, made, opens, out, place"
    return compile_text(parameters, lines, scope)


def _frame(spec: ChainKernelSpec) -> Any:
    """Return a function that writes one frame, a statistic for each filter, and clears it."""
    mean = spec.pool in (POOLS["mean"], POOLS["rms"])
    lines = [f"weight = {'1.0 / count' if mean else '1.0'}"]
    root = "vsqrt" if spec.pool == POOLS["rms"] else ""
    for m, (_, _, _, s) in enumerate(spec.filters):
        lines += [
            f"column = columns[first + {m * LANES}]",
            f"value = vload(state, {s * LANES}) * vsplat(state, weight)",
            "if column >= 0:",
            f"    out[place + column] = own_number({root}(value))",
            f"vstore(state, {s * LANES}, vsplat(state, 0.0))",
        ]
    scope = {"vload": vload, "vsplat": vsplat, "vsqrt": vsqrt, "vstore": vstore,
             "own_number": own_number}  # fmt: skip
    return compile_text("count, state, columns, first, out, place", lines, scope)


def kernel_of(spec: ChainKernelSpec) -> Callable[..., None]:
    """Return the forward kernel, a function of addresses and sizes.

    `order` to `starts` are the rows of `backend.Clips`; `width` is the number of columns of a
    frame. The other arguments are as in `cpu.chain_loop`.
    """
    numbers, integers = numbers_of(spec.double), integers_at
    coefs, states, filters = spec.coefs, spec.states, len(spec.filters)
    in_registers, coefs_kept = spec.states_in_registers, spec.coefs_in_registers
    block = 1 if in_registers else SHARED_BLOCK
    room, rows = (private_rows, block) if in_registers else (shared_rows, block * LANES)
    state_rows, coef_rows = (states if in_registers else 0), (coefs if coefs_kept else 0)
    pick_state, pick_coef = (_only if in_registers else _other), (_only if coefs_kept else _other)
    move_state, move_coef = _mover(states, in_registers), _mover(coefs, coefs_kept)
    run_ops, run_outputs, emit = _operations(spec), _outputs(spec), _frame(spec)
    pooled, shared = spec.pool is not None, spec.shared
    mode = POOL_BANK if pooled else STORE

    def kernel(
        queue: int, order: int, clips: int, groups: int, channels: int, x_at: int, begins: int,
        lengths: int, coef_at: int, state_at: int, columns_at: int, out_at: int, places: int,
        starts: int, width: int, num: int, den: int, stride: int, delay: int,
    ) -> None:  # fmt: skip
        x, out, columns = numbers(x_at), numbers(out_at), integers(columns_at)
        begin_of, length_of, place_of = integers(begins), integers(lengths), integers(places)
        a, b, side = room(x, rows), room(x, rows), room(x, rows)
        own_state, own_coef = private_rows(x, state_rows), private_rows(x, coef_rows)
        lane = lane_id()
        while True:
            item = take(queue)
            if item >= clips * groups:
                return
            clip, group = integers(order)[item // groups], item % groups
            length, place, row = length_of[clip], place_of[clip], group * LANES + lane
            held = numbers(state_at)[(clip * groups + group) * states * LANES :]
            given = numbers(coef_at)[group * coefs * LANES :]
            move_state(own_state, held)
            move_coef(own_coef, given)
            state, coef = pick_state(own_state, held), pick_coef(own_coef, given)
            first = group * filters * LANES + lane
            source = begin_of[clip] + (0 if shared else min(row, channels - 1) * length)
            own = row if row < channels else -1
            frame = (num, den, integers(starts)[clip], stride, delay)
            made, f, begin, end, last = first_frame(mode, frame)
            t = 0
            while t < length:
                n = 1
                if block > 1:
                    n = min(block, length - t)
                    if pooled:
                        n = min(n, last - t)
                for k in range(n):
                    vstore(a, k * LANES, vsplat(x, x[source + t + k]))
                t += n
                n = run_ops(a, b, side, n, coef, state)
                run_outputs(
                    a, b, n, coef, state, own, columns, first, length, made, made == begin, out,
                    place,
                )  # fmt: skip
                made += n
                if pooled and made == end:
                    emit(end - begin, state, columns, first, out, place)
                    place += width
                    f += 1
                    begin, end, last = frame_bounds(f, frame)
            move_state(held, own_state)

    return kernel


_ROW = ADJOINT_BLOCK * LANES


def taped_rows(spec: ChainKernelSpec) -> int:
    """Return the scratch rows of a block, with a row for the state before its first sample."""
    taped = [operation.taped(argument) for operation, argument in spec.steps]
    taped += [get_filter(kind).taped for kind, *_ in spec.filters]
    return max(taped, default=0) * (ADJOINT_BLOCK + 1)


def work_size(spec: ChainKernelSpec, samples: int) -> int:
    """Return the size of a warp's scratch memory, in numbers."""
    blocks = -(-samples // ADJOINT_BLOCK)
    return (4 * ADJOINT_BLOCK + taped_rows(spec) + blocks * spec.states) * LANES


@njit
def _load(x: Any, row: int, t0: int, n: int, buffer: Any) -> None:
    """Load samples of this lane's row."""
    for t in range(n):
        vstore(buffer, t * LANES, vsplat(x, x[row + t0 + t]))


@njit
def _load_gradient(gy: Any, place: int, row: int, rate: int, t0: int, n: int, buffer: Any) -> None:
    """Load gradients of this lane's output row, or zeros if the lane has none."""
    for t in range(n):
        vstore(buffer, t * LANES, vsplat(gy, 0.0))
        if row >= 0:
            vstore(buffer, t * LANES, vsplat(gy, gy[place + row * rate + t0 + t]))


def _again(spec: ChainKernelSpec) -> Any:
    """Return a function that runs a block forward, to get the state after it."""
    lines = [f"op_{k}(a, b, b, n, {rows})" for k, rows in enumerate(spec.block_rows())]
    lines += [f"filter_{row[0]}({row}, a, b, n, coef, state)" for row in spec.filters]
    scope = {f"filter_{row[0]}": get_filter(row[0]).forward for row in spec.filters}
    scope |= {f"op_{k}": operation.block for k, (operation, _) in enumerate(spec.steps)}
    return compile_text("a, b, n, coef, state", lines, scope)


def _backwards(spec: ChainKernelSpec) -> Any:
    """Return a function that computes the gradients of a block: samples, coefficients, state."""
    given = "gy, place, {row}, rate, t0, n, g"
    end = "n, coef, gcoef, state, gstate, scratch)"
    scope: dict[str, Any] = {"load": _load_gradient, "vstore": vstore, "vsplat": vsplat}
    lines = []
    for (operation, _), rows in zip(spec.steps, spec.block_rows("g"), strict=True):
        scope["op"] = operation.adjoint
        lines += [f"load({given.format(row='own')})", f"op(a, g, ga, n, {rows}, scratch)"]
    if spec.filters:
        lines += ["for t in range(n):", f"    vstore(ga, t * {LANES}, vsplat(ga, 0.0))"]
    for m, row in enumerate(spec.filters):
        scope[f"filter_{row[0]}"] = get_filter(row[0]).adjoint
        lines.append(f"load({given.format(row=f'columns[first + {m * LANES}]')})")
        lines.append(f"filter_{row[0]}({row}, a, g, ga, {end}")
    parameters = "a, g, ga, gy, place, own, columns, first, rate, t0, " + end[:-1]
    return compile_text(parameters, lines, scope)


def adjoint_of(spec: ChainKernelSpec) -> Callable[..., None]:
    """Return the adjoint kernel, a function of addresses and sizes.

    The input x is (clip, row, time) with one row or `channels`; gy is (clip, gy_rows, time) and gx
    (clip, channel, time). Coefficients and states are packed. The kernel adds to gcoef. In gstate
    the gradient of the last state becomes the gradient of the first.
    """
    numbers = numbers_of(spec.double)
    coefs, states, filters = spec.coefs, spec.states, len(spec.filters)
    again, backwards, taped = _again(spec), _backwards(spec), taped_rows(spec)
    shared = spec.shared

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
        blocks = (samples + ADJOINT_BLOCK - 1) // ADJOINT_BLOCK
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
                n = min(ADJOINT_BLOCK, samples - i * ADJOINT_BLOCK)
                _load(x, source, i * ADJOINT_BLOCK, n, a)
                again(a, b, n, coef, state)
            for i in range(blocks - 1, -1, -1):
                t0 = i * ADJOINT_BLOCK
                n = min(ADJOINT_BLOCK, samples - t0)
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
