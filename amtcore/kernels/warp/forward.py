"""Kernels of programs: operations, then a bank, at full rate or pooled; see `fused.cpu`.

A kernel is made for one program, whose rows are constants in it:

    in registers  one sample at a time; states, and coefficients where they fit, are in registers
    in blocks     some samples at a time in shared memory, states where they lie: for a decimation,
                  whose states are many and whose outputs are fewer than its inputs

A warp is one clip's group of LANES channels. Its next one comes from a queue, so that the longest
clip does not hold the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit

from amtcore.kernels.fused.cpu import (
    POOL_BANK,
    POOLS,
    STORE,
    first_frame,
    frame_bounds,
    pool_samples,
)
from amtcore.kernels.fused.filters import get_filter
from amtcore.kernels.fused.operations import BROKEN_STICK, DECIMATE, HAIR_CELL, get_operation
from amtcore.kernels.vector.simd import LANES, own_number, vload, vsplat, vsqrt, vstore
from amtcore.kernels.vector.warp_lowering import lane_id, private_rows
from amtcore.kernels.warp.device import integers_at, numbers_of, shared_rows, take
from amtcore.kernels.warp.launching import FEW_WARPS, MANY_WARPS
from amtcore.kernels.warp.written import write

#: Samples of a block in shared memory.
BLOCK = 32
#: Registers that coefficients and states may take together, and states alone.
_ALL_IN_REGISTERS, _STATES_IN_REGISTERS = 112, 90
#: Up to how many there is room for many warps: of states alone, and of all where every sample takes
#: an exponential or a logarithm, whose series are in registers as well.
_STATES_OF_MANY_WARPS, _WITH_POWERS = 50, 100

Row = tuple[int, int, int, int]


@dataclass(frozen=True)
class Program:
    """What a kernel is made for.

    Args:
        ops: Rows of operations, see `fused.operations`.
        filters: Rows of a bank, see `fused.filters`; none where what the operations make is stored.
        pool: Statistic of a frame; None at full rate.
        shared: Whether the input is one row for all channels.
        double: Whether numbers are float64.
        coefs: Coefficient rows of a group.
        states: State rows of a group.
    """

    ops: tuple[Row, ...]
    filters: tuple[Row, ...]
    pool: int | None
    shared: bool
    double: bool
    coefs: int
    states: int

    @property
    def words(self) -> int:
        """Registers that a number takes."""
        return 2 if self.double else 1

    @property
    def states_in_registers(self) -> bool:
        """Whether states are in registers, and samples come one at a time."""
        decimates = any(code == DECIMATE for code, *_ in self.ops)
        return self.states * self.words <= _STATES_IN_REGISTERS and not decimates

    @property
    def coefs_in_registers(self) -> bool:
        """Whether coefficients are in registers too."""
        registers = (self.states + self.coefs) * self.words
        return self.states_in_registers and registers <= _ALL_IN_REGISTERS

    @property
    def warps(self) -> int:
        """How many of a multiprocessor its registers leave room for."""
        if self.double:
            return FEW_WARPS
        most = _STATES_OF_MANY_WARPS
        held = self.states if self.states_in_registers else 0
        if self.coefs_in_registers:
            powers = any(code in (BROKEN_STICK, HAIR_CELL) for code, *_ in self.ops)
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
    """This lane's `n` samples into a row of the output at full rate, none where that is -1."""
    if row >= 0:
        for k in range(n):
            out[place + row * rate + made + k] = own_number(vload(y, k * LANES))


def _mover(rows: int, kept: bool) -> Any:
    """What copies rows into registers, one by one so that their places are constants."""
    lines = [f"vstore(target, {r * LANES}, vload(source, {r * LANES}))" for r in range(rows)]
    return write("target, source", lines if kept else [], {"vload": vload, "vstore": vstore})


def _operations(program: Program) -> Any:
    """All operations on `n` samples; returns how many there are after them."""
    calls = [f"n = op_{row[0]}({row}, a, b, side, n, coef, state)" for row in program.ops]
    scope = {f"op_{row[0]}": get_operation(row[0]).forward for row in program.ops}
    return write("a, b, side, n, coef, state", [*calls, "return n"], scope)


def _outputs(program: Program) -> Any:
    """What becomes of `n` outputs of the operations in `a`: filtered, then stored or pooled."""
    lines, scope = [], {"_store": _store, "pool_samples": pool_samples}
    if not program.filters:
        lines = ["_store(a, n, row, rate, made, out, place)"]
    for m, row in enumerate(program.filters):
        scope[f"filter_{row[0]}"] = get_filter(row[0]).forward
        lines.append(f"filter_{row[0]}({row}, a, b, n, coef, state)")
        if program.pool is None:
            lines.append(f"_store(b, n, columns[first + {m * LANES}], rate, made, out, place)")
        else:
            lines.append(f"pool_samples(b, n, {program.pool}, opens, state, {row[3]})")
    parameters = "a, b, n, coef, state, row, columns, first, rate, made, opens, out, place"
    return write(parameters, lines, scope)


def _frame(program: Program) -> Any:
    """What writes one frame, the statistics of every filter that a channel has, and clears them."""
    mean = program.pool in (POOLS["mean"], POOLS["rms"])
    lines = [f"weight = {'1.0 / count' if mean else '1.0'}"]
    root = "vsqrt" if program.pool == POOLS["rms"] else ""
    for m, (_, _, _, s) in enumerate(program.filters):
        lines += [
            f"column = columns[first + {m * LANES}]",
            f"value = vload(state, {s * LANES}) * vsplat(state, weight)",
            "if column >= 0:",
            f"    out[place + column] = own_number({root}(value))",
            f"vstore(state, {s * LANES}, vsplat(state, 0.0))",
        ]
    scope = {"vload": vload, "vsplat": vsplat, "vsqrt": vsqrt, "vstore": vstore,
             "own_number": own_number}  # fmt: skip
    return write("count, state, columns, first, out, place", lines, scope)


def kernel_of(program: Program) -> Callable[..., None]:
    """The kernel, a function of addresses (of numbers where they end in _at) and sizes.

    Clips are taken in the order of the numbers in `order`. Per clip `begins` and `lengths` are in
    samples of x, `places` in numbers of the output, `starts` in samples since the signal began. The
    rest is as in `fused.cpu`; `width` is that of a frame.
    """
    numbers, integers = numbers_of(program.double), integers_at
    coefs, states, filters = program.coefs, program.states, len(program.filters)
    in_registers, coefs_kept = program.states_in_registers, program.coefs_in_registers
    block = 1 if in_registers else BLOCK
    room, rows = (private_rows, block) if in_registers else (shared_rows, block * LANES)
    state_rows, coef_rows = (states if in_registers else 0), (coefs if coefs_kept else 0)
    pick_state, pick_coef = (_only if in_registers else _other), (_only if coefs_kept else _other)
    move_state, move_coef = _mover(states, in_registers), _mover(coefs, coefs_kept)
    run_ops, run_outputs, emit = _operations(program), _outputs(program), _frame(program)
    pooled, shared = program.pool is not None, program.shared
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
