"""Kernels of integrate-and-fire neurons: a warp is one batch item's group of LANES neurons."""

from __future__ import annotations

from collections.abc import Callable

from amtcore.kernels.families.lif.adjoint import DRIVEN, find_windows, tile
from amtcore.kernels.families.lif.cpu import BETA, BLOCK, step
from amtcore.kernels.vector.simd import LANES, vload, vsplat, vstore
from amtcore.kernels.warp.device import numbers_of, shared_rows, take, warp_id

Kernel = Callable[..., None]


def forward(double: bool, synapses: int, record: bool) -> Kernel:
    """As `families.lif.cpu`; `most_at` is the address of the most spikes of a step."""
    numbers, rows, states = numbers_of(double), BETA + synapses, 1 + synapses

    def kernel(
        queue: int, batch: int, groups: int, steps: int, neurons: int, blocks: int, x_at: int,
        coef_at: int, state_at: int, spikes_at: int, vmem_at: int, isyn_at: int, starts_at: int,
        most_at: int, recorded: int,
    ) -> None:  # fmt: skip
        buffer = shared_rows(numbers(x_at), LANES)
        while True:
            item = take(queue)
            if item >= batch * groups:
                return
            b, g = item // groups, item % groups
            lanes, at = min(LANES, neurons - g * LANES), b * steps * neurons
            x, spikes = numbers(x_at)[at * synapses :], numbers(spikes_at)[at:]
            kept = b * recorded * neurons
            vmem, isyn = numbers(vmem_at)[kept:], numbers(isyn_at)[kept * synapses :]
            coef = numbers(coef_at)[g * rows * LANES :]
            state = numbers(state_at)[item * states * LANES :]
            starts = numbers(starts_at)[item * blocks * states * LANES :]
            most = vsplat(coef, numbers(most_at)[0])
            for t in range(steps):
                if blocks > 0 and t % BLOCK == 0:
                    for r in range(states):
                        place = (t // BLOCK * states + r) * LANES
                        vstore(starts, place, vload(state, r * LANES))
                step(
                    x, t * neurons + g * LANES, 0, lanes, synapses, most, coef, state, spikes,
                    vmem, isyn, record, False, buffer,
                )  # fmt: skip

    return kernel


def work_rows(synapses: int) -> int:
    """Rows of memory that a warp of the adjoint needs: the tape of a block and a state."""
    return BLOCK * (DRIVEN + synapses) + 1 + synapses + 2


def adjoint(double: bool, synapses: int, recorded: bool) -> Kernel:
    """As `families.lif.adjoint`; `work` holds `work_rows` a warp."""
    numbers, rows, states = numbers_of(double), BETA + synapses, 1 + synapses
    work_size, taped = work_rows(synapses) * LANES, BLOCK * (DRIVEN + synapses) * LANES

    def kernel(
        queue: int, batch: int, groups: int, steps: int, neurons: int, x_at: int, coef_at: int,
        gcoef_at: int, starts_at: int, gstate_at: int, gspikes_at: int, gvmem_at: int,
        gisyn_at: int, gx_at: int, most_at: int, work_at: int, kept_steps: int,
    ) -> None:  # fmt: skip
        buffer = shared_rows(numbers(x_at), LANES)
        tape = numbers(work_at)[warp_id() * work_size :]
        state, window = tape[taped:], tape[taped + states * LANES :]
        blocks = (steps + BLOCK - 1) // BLOCK
        while True:
            item = take(queue)
            if item >= batch * groups:
                return
            b, g = item // groups, item % groups
            lanes, at = min(LANES, neurons - g * LANES), b * steps * neurons
            kept = b * kept_steps * neurons
            coef = numbers(coef_at)[g * rows * LANES :]
            gcoef = numbers(gcoef_at)[item * rows * LANES :]
            gstate = numbers(gstate_at)[item * states * LANES :]
            starts = numbers(starts_at)[item * blocks * states * LANES :]
            find_windows(coef, 1, rows, window)
            most = vsplat(coef, numbers(most_at)[0])
            for i in range(blocks - 1, -1, -1):
                for r in range(states):
                    vstore(state, r * LANES, vload(starts, (i * states + r) * LANES))
                tile(
                    numbers(x_at)[at * synapses :], i * BLOCK, min((i + 1) * BLOCK, steps), 0, 1,
                    lanes, g * LANES, neurons, synapses, recorded, most, coef, window, gcoef,
                    gstate, state, tape, numbers(gspikes_at)[at:], numbers(gvmem_at)[kept:],
                    numbers(gisyn_at)[kept * synapses :], numbers(gx_at)[at * synapses :], False,
                    buffer,
                )  # fmt: skip

    return kernel
