"""Gradients of integrate-and-fire neurons: backwards over blocks of steps, states recomputed.

    for blocks from the last to the first, for every few lane groups:
        forward from the state that the forward kernel kept, with a tape;  then backwards

Memory is that of the signals plus one state a block; the tape is that of one block of a few groups.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.families.lif.cpu import (
    ALPHA,
    BETA,
    BIAS,
    BLOCK,
    THRESHOLD,
    WINDOW,
    count_spikes,
    load_lanes,
    store_lanes,
)
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, prefetch
from amtcore.kernels.vector.simd import LANES, accumulate, fma, vload, vsplat, vstore, where_greater
from amtcore.kernels.vector.transpose import copy_row

# Rows of the tape: potential before the step and before firing, then i_s + x_s.
_BEFORE, _REACHED, DRIVEN = 0, 1, 2
#: Lane groups that go through a block together: rows of the input are then 256 bytes each, and
#: the tape (24 kB) stays in the first-level cache.
TILE = 2


@part
def find_windows(coef: Any, groups: int, rows: int, window: Any) -> None:
    """Per group of `rows` coefficients: 1 / threshold, and where the gradient's window opens."""
    for g in range(groups):
        threshold = vload(coef, (g * rows + THRESHOLD) * LANES)
        vstore(window, 2 * g * LANES, vsplat(coef, 1.0) / threshold)
        opens = threshold - vload(coef, (g * rows + WINDOW) * LANES)
        vstore(window, (2 * g + 1) * LANES, opens)


@part(forceinline=True)
def _forward_step(
    x: Any, at: int, lanes: int, synapses: int, most: Any, coef: Any, g: int, state: Any, k: int,
    tape: Any, r: int, buffer: Any,
) -> None:  # fmt: skip
    """One step of lane group `g`, the tile's k-th, writing down what the gradients need from row
    `r` of the tape on."""
    c, s = g * (BETA + synapses), k * (1 + synapses)
    v, current = vload(state, s * LANES), vsplat(coef, 0.0)
    vstore(tape, (r + _BEFORE) * LANES, v)
    for j in range(synapses):
        driven = vload(state, (s + 1 + j) * LANES) + load_lanes(x, at + j, synapses, lanes, buffer)
        decayed = vload(coef, (c + BETA + j) * LANES) * driven
        vstore(tape, (r + DRIVEN + j) * LANES, driven)
        vstore(state, (s + 1 + j) * LANES, decayed)
        current = current + decayed
    reached = (vload(coef, (c + ALPHA) * LANES) * v + current) + vload(coef, (c + BIAS) * LANES)
    vstore(tape, (r + _REACHED) * LANES, reached)
    threshold = vload(coef, (c + THRESHOLD) * LANES)
    vstore(state, s * LANES, reached - count_spikes(reached, threshold, most) * threshold)


@part(forceinline=True)
def _backward_step(
    at: int, g: int, lanes: int, synapses: int, recorded: bool, most: Any, tape: Any, r: int,
    coef: Any, window: Any, gcoef: Any, gstate: Any, gspikes: Any, gvmem: Any, gisyn: Any, gx: Any,
    streamed: bool, buffer: Any,
) -> None:  # fmt: skip
    """Gradients of one step of lane group `g`, whose first neuron is element `at` of the spikes.

    With l the gradient of v after the reset, m of the potential before it, q = 1 / threshold and
    w = 1 inside the surrogate's window, else 0:
    h = gn - threshold l,  m = l + w q h,  gthreshold -= n l + w q^2 v h,  gbias += m,
    galpha += m v_prev,  and per synapse  e = gi + m,  gbeta += e (i_prev + x),  gx = beta e,
    which is also the gradient of i_prev, as alpha m is that of v_prev.
    """
    c, s = g * (BETA + synapses), g * (1 + synapses)
    threshold, later = vload(coef, (c + THRESHOLD) * LANES), vload(gstate, s * LANES)
    inverse, opens = vload(window, 2 * g * LANES), vload(window, (2 * g + 1) * LANES)
    zero = vsplat(coef, 0.0)
    if recorded:
        later = later + load_lanes(gvmem, at, 1, lanes, buffer)
    reached = vload(tape, (r + _REACHED) * LANES)
    total = fma(zero - threshold, later, load_lanes(gspikes, at, 1, lanes, buffer))
    slope = where_greater(opens, reached, zero, inverse * total)
    n_later = count_spikes(reached, threshold, most) * later
    by_threshold = zero - fma(slope * reached, inverse, n_later)
    potential = later + slope
    accumulate(gcoef, c + THRESHOLD, by_threshold)
    accumulate(gcoef, c + ALPHA, potential * vload(tape, (r + _BEFORE) * LANES))
    accumulate(gcoef, c + BIAS, potential)
    vstore(gstate, s * LANES, vload(coef, (c + ALPHA) * LANES) * potential)
    for k in range(synapses):
        g_isyn = vload(gstate, (s + 1 + k) * LANES) + potential
        if recorded:
            g_isyn = g_isyn + load_lanes(gisyn, at * synapses + k, synapses, lanes, buffer)
        accumulate(gcoef, c + BETA + k, g_isyn * vload(tape, (r + DRIVEN + k) * LANES))
        g_driven = vload(coef, (c + BETA + k) * LANES) * g_isyn
        vstore(gstate, (s + 1 + k) * LANES, g_driven)
        store_lanes(gx, at * synapses + k, synapses, lanes, streamed, buffer, g_driven)


@part(forceinline=True)
def tile(
    x: Any, begin: int, end: int, g0: int, g1: int, lanes: int, first: int, neurons: int,
    synapses: int, recorded: bool, most: Any, coef: Any, window: Any, gcoef: Any, gstate: Any,
    state: Any, tape: Any, gspikes: Any, gvmem: Any, gisyn: Any, gx: Any, streamed: bool,
    buffer: Any,
) -> None:  # fmt: skip
    """Steps begin..end of lane groups g0..g1: forward from `state` with a tape, then backwards."""
    rows, width = DRIVEN + synapses, g1 - g0
    for t in range(begin, end):
        for k in range(width):
            at, r = t * neurons + first + (g0 + k) * LANES, ((t - begin) * width + k) * rows
            prefetch(x, (at + TILE * LANES) * synapses)
            prefetch(gspikes, at)
            _forward_step(x, at * synapses, lanes, synapses, most, coef, g0 + k, state, k, tape, r,
                          buffer)  # fmt: skip
    for t in range(end - 1, begin - 1, -1):
        for k in range(width):
            at, r = t * neurons + first + (g0 + k) * LANES, ((t - begin) * width + k) * rows
            _backward_step(at, g0 + k, lanes, synapses, recorded, most, tape, r, coef, window,
                           gcoef, gstate, gspikes, gvmem, gisyn, gx, streamed, buffer)  # fmt: skip


def _build(single: bool, recorded: bool) -> Any:
    @kernel
    def run(
        x: Any, steps: int, first: int, last: int, neurons: int, count: int, max_spikes: float,
        coef: Any, gcoef: Any, starts: Any, gstate: Any, gspikes: Any, gvmem: Any, gisyn: Any,
        gx: Any, streamed: bool,
    ) -> None:  # fmt: skip
        """Gradients for neurons first..last of one batch item; arguments as in the forward kernel.

        gcoef is added to; gstate goes from the gradient of the last state to that of the first.
        """
        synapses, most = 1 if single else count, vsplat(coef, max_spikes)
        groups, whole = -(-(last - first) // LANES), (last - first) // LANES if single else 0
        window, states = aligned(groups * 2 * LANES, coef), (1 + synapses) * LANES
        find_windows(coef, groups, BETA + synapses, window)
        tape = aligned(BLOCK * TILE * (DRIVEN + synapses) * LANES, x)
        state, buffer = aligned(TILE * states, x), aligned(LANES, x)
        for i in range(starts.shape[1] - 1, -1, -1):
            begin, end = i * BLOCK, min((i + 1) * BLOCK, steps)
            for g0 in range(0, whole, TILE):
                g1 = min(g0 + TILE, whole)
                for g in range(g0, g1):
                    copy_row(starts[g, i], 0, state, (g - g0) * states, states)
                tile(x, begin, end, g0, g1, LANES, first, neurons, synapses, recorded, most, coef,
                      window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx, streamed,
                      buffer)  # fmt: skip
            for g in range(whole, groups):
                copy_row(starts[g, i], 0, state, 0, states)
                lanes = min(LANES, last - first - g * LANES)
                tile(x, begin, end, g, g + 1, lanes, first, neurons, synapses, recorded, most,
                      coef, window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx,
                      streamed, buffer)  # fmt: skip

    return run


_KINDS = [(single, recorded) for single in (False, True) for recorded in (False, True)]
#: Adjoint kernels by (one synapse, gradients of the records).
RUN_LIF_ADJOINT = {kind: _build(*kind) for kind in _KINDS}
