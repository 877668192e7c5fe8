"""Gradients of integrate-and-fire neurons: backwards over blocks of steps, states recomputed.

    for blocks from the last to the first, for every lane group:
        forward from the state that the forward kernel kept, with a tape;  then backwards

Memory is that of the signals plus one state a block; the tape is that of one block of one group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..digest import sources_digest
from ..simd import LANES, accumulate, fma, vload, vsplat, vstore, where_greater
from .cpu import (
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

# Rows of the tape: potential before the step and before firing, spikes, then i_s + x_s.
_BEFORE, _REACHED, _COUNT, _DRIVEN = 0, 1, 2, 3


@njit(forceinline=True)
def _forward_block(
    x: Any, begin: int, end: int, lanes: int, neuron: int, neurons: int, synapses: int, most: Any,
    coef: Any, c: int, start: Any, isyn: Any, tape: Any, buffer: Any,
) -> None:  # fmt: skip
    """Steps begin..end of one lane group from `start`, writing down what the gradients need.

    `isyn` is scratch for the synaptic currents.
    """
    alpha, bias = vload(coef, (c + ALPHA) * LANES), vload(coef, (c + BIAS) * LANES)
    threshold, v = vload(coef, (c + THRESHOLD) * LANES), vload(start, 0)
    isyn[:] = start[LANES:]
    for t in range(begin, end):
        at, r = (t * neurons + neuron) * synapses, (t - begin) * (_DRIVEN + synapses)
        vstore(tape, (r + _BEFORE) * LANES, v)
        current = vsplat(coef, 0.0)
        for k in range(synapses):
            driven = vload(isyn, k * LANES) + load_lanes(x, at + k, synapses, lanes, buffer)
            decayed = vload(coef, (c + BETA + k) * LANES) * driven
            vstore(isyn, k * LANES, decayed)
            vstore(tape, (r + _DRIVEN + k) * LANES, driven)
            current = current + decayed
        reached = (alpha * v + current) + bias
        count = count_spikes(reached, threshold, most)
        v = reached - count * threshold
        vstore(tape, (r + _REACHED) * LANES, reached)
        vstore(tape, (r + _COUNT) * LANES, count)


@njit(forceinline=True)
def _backward_block(
    begin: int, end: int, lanes: int, neuron: int, neurons: int, synapses: int, recorded: bool,
    tape: Any, coef: Any, gcoef: Any, c: int, gstate: Any, s: int, gspikes: Any, gvmem: Any,
    gisyn: Any, gx: Any, streamed: bool, buffer: Any,
) -> None:  # fmt: skip
    """Gradients of a block, backwards in time; `gstate` and `gcoef` as in the one-pole family.

    With l the gradient of v after the reset, m of the potential before it, q = 1 / threshold and
    w = 1 inside the surrogate's window, else 0:
    h = gn - threshold l,  m = l + w q h,  gthreshold -= n l + w q^2 v h,  gbias += m,
    galpha += m v_prev,  and per synapse  e = gi + m,  gbeta += e (i_prev + x),  gx = beta e,
    which is also the gradient of i_prev, as alpha m is that of v_prev.
    """
    alpha, threshold = vload(coef, (c + ALPHA) * LANES), vload(coef, (c + THRESHOLD) * LANES)
    zero, inverse = vsplat(coef, 0.0), vsplat(coef, 1.0) / threshold
    opens = threshold - vload(coef, (c + WINDOW) * LANES)
    g_alpha, g_bias, g_threshold, later = zero, zero, zero, vload(gstate, s * LANES)
    for t in range(end - 1, begin - 1, -1):
        at, r = t * neurons + neuron, (t - begin) * (_DRIVEN + synapses)
        if recorded:
            later = later + load_lanes(gvmem, at, 1, lanes, buffer)
        reached = vload(tape, (r + _REACHED) * LANES)
        total = fma(zero - threshold, later, load_lanes(gspikes, at, 1, lanes, buffer))
        slope = where_greater(opens, reached, zero, inverse) * total
        n_later = vload(tape, (r + _COUNT) * LANES) * later
        g_threshold = g_threshold - fma(slope * reached, inverse, n_later)
        potential = later + slope
        g_alpha = fma(potential, vload(tape, (r + _BEFORE) * LANES), g_alpha)
        g_bias = g_bias + potential
        later = alpha * potential
        for k in range(synapses):
            g_isyn = vload(gstate, (s + 1 + k) * LANES) + potential
            if recorded:
                g_isyn = g_isyn + load_lanes(gisyn, at * synapses + k, synapses, lanes, buffer)
            accumulate(gcoef, c + BETA + k, g_isyn * vload(tape, (r + _DRIVEN + k) * LANES))
            g_driven = vload(coef, (c + BETA + k) * LANES) * g_isyn
            vstore(gstate, (s + 1 + k) * LANES, g_driven)
            store_lanes(gx, at * synapses + k, synapses, lanes, streamed, buffer, g_driven)
    vstore(gstate, s * LANES, later)
    accumulate(gcoef, c + ALPHA, g_alpha)
    accumulate(gcoef, c + BIAS, g_bias)
    accumulate(gcoef, c + THRESHOLD, g_threshold)


@njit(forceinline=True)
def _block(
    x: Any, begin: int, end: int, g: int, lanes: int, neuron: int, neurons: int, synapses: int,
    most: Any, recorded: bool, coef: Any, gcoef: Any, start: Any, gstate: Any, isyn: Any,
    tape: Any, gspikes: Any, gvmem: Any, gisyn: Any, gx: Any, streamed: bool, buffer: Any,
) -> None:  # fmt: skip
    """Steps begin..end of lane group `g`: forward with a tape, then backwards."""
    c, s = g * (BETA + synapses), g * (1 + synapses)
    _forward_block(x, begin, end, lanes, neuron, neurons, synapses, most, coef, c, start, isyn,
                   tape, buffer)  # fmt: skip
    _backward_block(begin, end, lanes, neuron, neurons, synapses, recorded, tape, coef, gcoef, c,
                    gstate, s, gspikes, gvmem, gisyn, gx, streamed, buffer)  # fmt: skip


def _build(digest: str, single: bool, recorded: bool) -> Any:
    @njit(nogil=True, cache=True)
    def run(
        x: Any, steps: int, first: int, last: int, neurons: int, count: int, max_spikes: float,
        coef: Any, gcoef: Any, starts: Any, gstate: Any, gspikes: Any, gvmem: Any, gisyn: Any,
        gx: Any, streamed: bool,
    ) -> None:  # fmt: skip
        """Gradients for neurons first..last of one batch item; arguments as in the forward kernel.

        gcoef is added to; gstate goes from the gradient of the last state to that of the first.
        """
        if digest == "":
            return
        synapses, most = 1 if single else count, vsplat(coef, max_spikes)
        groups, whole = -(-(last - first) // LANES), (last - first) // LANES if single else 0
        buffer, isyn = np.empty(LANES, x.dtype), np.empty(synapses * LANES, x.dtype)
        tape = np.empty(BLOCK * (_DRIVEN + synapses) * LANES, x.dtype)
        for i in range(starts.shape[1] - 1, -1, -1):
            begin, end = i * BLOCK, min((i + 1) * BLOCK, steps)
            for g in range(whole):
                _block(x, begin, end, g, LANES, first + g * LANES, neurons, synapses, most,
                       recorded, coef, gcoef, starts[g, i], gstate, isyn, tape, gspikes, gvmem,
                       gisyn, gx, streamed, buffer)  # fmt: skip
            for g in range(whole, groups):
                lanes = min(LANES, last - first - g * LANES)
                _block(x, begin, end, g, lanes, first + g * LANES, neurons, synapses, most,
                       recorded, coef, gcoef, starts[g, i], gstate, isyn, tape, gspikes, gvmem,
                       gisyn, gx, streamed, buffer)  # fmt: skip

    return run


_KINDS = [(single, recorded) for single in (False, True) for recorded in (False, True)]
#: Adjoint kernels by (one synapse, gradients of the records).
RUN_LIF_ADJOINT = {kind: _build(sources_digest(), *kind) for kind in _KINDS}
