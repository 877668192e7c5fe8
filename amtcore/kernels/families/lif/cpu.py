"""Integrate-and-fire neurons over lanes: all neurons of a step, then the next step.

Time is the outer loop because a step's neurons lie side by side in memory: input and output are
read and written once, in order, while states and coefficients stay in the first-level cache.
The forward kernel rounds every operation as the plain loop does, so that spikes agree exactly;
a fused multiply-add could move a potential across its threshold. Equations in `reference`.
"""

from __future__ import annotations

from typing import Any

from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, prefetch, vstream
from amtcore.kernels.vector.simd import (
    LANES,
    _unary,
    any_at_least,
    own_number,
    vload,
    vmax,
    vmin,
    vsplat,
    vstore,
    where_greater,
)
from amtcore.kernels.vector.transpose import copy_row
from amtcore.kernels.vector.warp_lowering import lane_id, lanes_are_threads

#: Steps between the states kept for the adjoint: its tape then stays in the first-level cache.
BLOCK = 32
#: Steps that the input is asked for ahead of its use.
_AHEAD = 2
# Coefficient rows of a neuron.
ALPHA, BIAS, THRESHOLD, WINDOW, BETA = 0, 1, 2, 3, 4

vfloor = _unary("floor")


@part(forceinline=True)
def load_lanes(x: Any, at: int, stride: int, lanes: int, buffer: Any) -> Any:
    """x[at], x[at + stride], .. in the first `lanes` lanes, zeros in the others."""
    if lanes_are_threads():
        own = vsplat(x, 0.0)
        if lane_id() < lanes:
            own = vsplat(x, x[at + lane_id() * stride])
        return own
    if stride == 1 and lanes == LANES:
        return vload(x, at)
    vstore(buffer, 0, vsplat(buffer, 0.0))
    for lane in range(lanes):
        buffer[lane] = x[at + lane * stride]
    return vload(buffer, 0)


@part(forceinline=True)
def store_lanes(
    out: Any, at: int, stride: int, lanes: int, streamed: bool, buffer: Any, value: Any
) -> None:
    """The inverse of `load_lanes`."""
    if lanes_are_threads():
        if lane_id() < lanes:
            out[at + lane_id() * stride] = own_number(value)
    elif stride != 1 or lanes != LANES:
        vstore(buffer, 0, value)
        for lane in range(lanes):
            out[at + lane * stride] = buffer[lane]
    elif streamed:
        vstream(out, at, value)
    else:
        vstore(out, at, value)


@part(forceinline=True)
def integrate(
    x: Any, at: int, lanes: int, synapses: int, coef: Any, c: int, state: Any, s: int, buffer: Any
) -> Any:
    """Synapses and leak of one step: the potential before firing; currents go to `state`."""
    current = vsplat(coef, 0.0)
    for k in range(synapses):
        row = (s + 1 + k) * LANES
        driven = vload(state, row) + load_lanes(x, at + k, synapses, lanes, buffer)
        isyn = vload(coef, (c + BETA + k) * LANES) * driven
        vstore(state, row, isyn)
        current = current + isyn
    leaked = vload(coef, (c + ALPHA) * LANES) * vload(state, s * LANES)
    return (leaked + current) + vload(coef, (c + BIAS) * LANES)


@part(forceinline=True)
def count_spikes(potential: Any, threshold: Any, most: Any) -> Any:
    """Whole thresholds in a potential: a quotient below 1 never rounds up to 1, nor one below 2 to
    2, so comparisons count what most steps have; the division is slower than all the rest."""
    zero, one = vsplat(potential, 0.0), vsplat(potential, 1.0)
    if any_at_least(potential, threshold + threshold):
        return vmin(vmax(vfloor(potential / threshold), zero), most)
    return where_greater(threshold, potential, zero, one)


@part(forceinline=True)
def step(
    x: Any, at: int, g: int, lanes: int, synapses: int, most: Any, coef: Any, state: Any,
    spikes: Any, vmem: Any, isyn: Any, record: bool, streamed: bool, buffer: Any,
) -> None:  # fmt: skip
    """One step of lane group `g`, whose first neuron is element `at` of the spikes."""
    c, s = g * (BETA + synapses), g * (1 + synapses)
    potential = integrate(x, at * synapses, lanes, synapses, coef, c, state, s, buffer)
    threshold = vload(coef, (c + THRESHOLD) * LANES)
    count = count_spikes(potential, threshold, most)
    after = potential - count * threshold
    vstore(state, s * LANES, after)
    store_lanes(spikes, at, 1, lanes, streamed, buffer, count)
    if record:
        store_lanes(vmem, at, 1, lanes, streamed, buffer, after)
        for k in range(synapses):
            value = vload(state, (s + 1 + k) * LANES)
            store_lanes(isyn, at * synapses + k, synapses, lanes, streamed, buffer, value)


def _build(single: bool, record: bool) -> Any:
    """A kernel for one or any number of synapses, with or without records: the compiler needs
    both facts to keep vectors in registers, which makes a factor of ten."""

    @kernel
    def run(
        x: Any, steps: int, first: int, last: int, neurons: int, count: int, max_spikes: float,
        coef: Any, state: Any, spikes: Any, vmem: Any, isyn: Any, starts: Any, streamed: bool,
    ) -> None:  # fmt: skip
        """Neurons first..last of one batch item, each with `count` synapses.

        x (time * neuron * synapse) and the outputs flat; coef and state of these neurons' lane
        groups, flat, LANES numbers a row; state changes to that after the last step. starts
        (lane group, block, row * LANES) gets the state before every block, if it has blocks.
        """
        synapses = 1 if single else count
        states = (1 + synapses) * LANES
        buffer, most = aligned(LANES, x), vsplat(coef, max_spikes)
        # Whole lane groups of neurons with one synapse are loaded as they lie.
        groups, whole = -(-(last - first) // LANES), (last - first) // LANES if single else 0
        for t in range(steps):
            if starts.shape[1] > 0 and t % BLOCK == 0:
                for g in range(groups):
                    copy_row(state, g * states, starts[g, t // BLOCK], 0, states)
            at = t * neurons + first
            for g in range(whole):
                prefetch(x, at + _AHEAD * neurons + g * LANES)
                step(x, at + g * LANES, g, LANES, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip
            for g in range(whole, groups):
                lanes = min(LANES, last - first - g * LANES)
                step(x, at + g * LANES, g, lanes, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip

    return run


_KINDS = [(single, record) for single in (False, True) for record in (False, True)]
#: Forward kernels by (one synapse, record).
RUN_LIF = {kind: _build(*kind) for kind in _KINDS}
