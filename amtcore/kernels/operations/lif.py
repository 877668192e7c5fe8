"""Leaky integrate-and-fire neurons with exponential synapses.

    i_s = beta_s (i_s + x_s),   v = alpha v + sum_s i_s + bias
    n = floor(v / threshold) where v >= threshold, else 0, at most `max_spikes`
    v = v - n threshold

The count n has no derivative. Its surrogate is the derivative of v / threshold within `window` of
the threshold and above, and 0 elsewhere (`spike_count`).

Time is the outer loop, because the neurons of a step lie side by side in memory. Input and output
are read and written once, in order; states and coefficients stay in the first-level cache. The
forward kernel rounds every operation like the plain loop, so that spikes agree exactly: a fused
multiply-add could move a potential across its threshold.

Gradients go backwards over blocks of steps, a few lane groups at a time. Each block first runs
forward again with a tape, from a state that the forward kernel kept. The memory is one state a
block and the tape of one block. A GPU's item is one batch item's group of LANES neurons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import NonFiniteError, ShapeError
from amtcore.kernels.operation import Device, RowOperation, check_tensors
from amtcore.kernels.torch_state import use_reference, wants_derivative
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.lanes import groups_of, pack, pack_tensor, unpack, unpack_tensor
from amtcore.kernels.vector.memory import CACHE_LINE, aligned, prefetch, vstream
from amtcore.kernels.vector.result_pool import empty, training
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    any_at_least,
    fma,
    own_number,
    vfloor,
    vload,
    vmax,
    vmin,
    vsplat,
    vstore,
    where_greater,
)
from amtcore.kernels.vector.threads import get_num_threads, parallel_for
from amtcore.kernels.vector.transpose import copy_row
from amtcore.kernels.vector.warp_lowering import lane_id, lanes_are_threads

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

#: Coefficients of a neuron: alpha, bias, threshold, window. Coefficients of its synapses follow.
NEURON_COEFS = 4

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class _SpikeCount(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(vmem: Tensor, threshold: Tensor, window: Tensor, max_spikes: float) -> Tensor:
        count = torch.floor(vmem / threshold).clamp(max=max_spikes)
        return torch.where(vmem >= threshold, count, torch.zeros_like(count))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        vmem, threshold, window = ctx.saved_tensors
        slope = torch.where(vmem >= threshold - window, upstream[0] / threshold, 0.0)
        by_threshold = -slope * vmem / threshold
        return slope, by_threshold.reshape(-1, *threshold.shape).sum(0), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        vmem, threshold, window = ctx.saved_tensors
        change = tangents[0] / threshold - vmem * tangents[1] / threshold.square()
        return torch.where(vmem >= threshold - window, change, 0.0)


def spike_count(vmem: Tensor, threshold: Tensor, window: Tensor, max_spikes: float) -> Tensor:
    """Return the spikes of one step, with the surrogate gradient.

    Args:
        vmem: (.., neuron), before the reset.
        threshold: (neuron,).
        window: (neuron,), distance below the threshold at which the gradient starts.
        max_spikes: Most spikes of a neuron in one step; inf for no limit.
    """
    return _SpikeCount.apply(vmem, threshold, window, max_spikes)


def reference(x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool) -> Outputs:
    """Run the neurons.

    Args:
        x: (batch, time, neuron * synapse); a neuron's synapses lie side by side.
        coef: (neuron, 4 + synapse): alpha, bias, threshold, window, then beta of each synapse.
        state: (batch, neuron, 1 + synapse): membrane potential, synaptic currents.
        max_spikes: Most spikes of a neuron in one step; inf for no limit.
        record: Whether potentials and currents are returned as well.
    Returns:
        Spikes (batch, time, neuron); potentials after the reset, of the same shape, and currents
        (batch, time, neuron, synapse), both with 0 steps unless recorded; and the state after
        the last step.
    """
    alpha, bias, threshold, window = coef[:, :NEURON_COEFS].unbind(-1)
    beta = coef[:, NEURON_COEFS:]
    v, isyn = state[..., 0], state[..., 1:]
    spikes, potentials, currents = [], [], []
    for sample in x.unflatten(-1, beta.shape).unbind(1):
        isyn = beta * (isyn + sample)
        v = alpha * v + sum(isyn.unbind(-1)) + bias
        count = spike_count(v, threshold, window, max_spikes)
        v = v - count * threshold
        spikes.append(count)
        if record:
            potentials.append(v)
            currents.append(isyn)
    last = torch.cat((v.unsqueeze(-1), isyn), -1)
    return _stack(spikes, v), _stack(potentials, v), _stack(currents, isyn), last


def _stack(steps: list[Tensor], like: Tensor) -> Tensor:
    """Stack steps to (batch, time, ..), with an empty time axis for no steps."""
    if steps:
        return torch.stack(steps, 1)
    return like.new_empty(like.shape[0], 0, *like.shape[1:])


#: Steps between the states kept for the adjoint: its tape then stays in the first-level cache.
BLOCK = 32
#: Steps of prefetch ahead of the current step.
_AHEAD = 2
# Coefficient rows of a neuron.
ALPHA, BIAS, THRESHOLD, WINDOW, BETA = 0, 1, 2, 3, 4


@part(forceinline=True)
def load_lanes(x: Any, at: int, stride: int, lanes: int, buffer: Any) -> Any:
    """Load x[at], x[at + stride], .. into the first `lanes` lanes, zeros into the others."""
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
    """Store lanes, the inverse of `load_lanes`."""
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
def _integrate(
    x: Any, at: int, lanes: int, synapses: int, coef: Any, c: int, state: Any, s: int, buffer: Any
) -> Any:
    """Return the potential before firing, after synapses and leak; currents go to `state`."""
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
    """Return the number of whole thresholds in a potential.

    Comparisons decide between 0 and 1 without the division, which is slower than all other steps. A
    quotient below 1 never rounds up to 1, nor a quotient below 2 to 2, so both ways agree.
    """
    zero, one = vsplat(potential, 0.0), vsplat(potential, 1.0)
    if any_at_least(potential, threshold + threshold):
        return vmin(vmax(vfloor(potential / threshold), zero), most)
    return where_greater(threshold, potential, zero, one)


@part(forceinline=True)
def _step(
    x: Any, at: int, g: int, lanes: int, synapses: int, most: Any, coef: Any, state: Any,
    spikes: Any, vmem: Any, isyn: Any, record: bool, streamed: bool, buffer: Any,
) -> None:  # fmt: skip
    """Run one step of lane group `g`, whose first neuron is element `at` of the spikes."""
    c, s = g * (BETA + synapses), g * (1 + synapses)
    potential = _integrate(x, at * synapses, lanes, synapses, coef, c, state, s, buffer)
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


def _forward_kernel(single: bool, record: bool) -> Any:
    """Compile a kernel for one or any number of synapses, with or without records.

    The compiler needs both facts to keep vectors in registers; else the kernel is ten times slower.
    """

    @kernel
    def run(
        x: Any, steps: int, first: int, last: int, neurons: int, count: int, max_spikes: float,
        coef: Any, state: Any, spikes: Any, vmem: Any, isyn: Any, starts: Any, streamed: bool,
    ) -> None:  # fmt: skip
        """Run neurons first..last of one batch item, each with `count` synapses.

        The input (time * neuron * synapse) and the outputs are flat. The arrays coef and state
        belong to these neurons' lane groups, flat, LANES numbers a row; state is updated. The array
        starts (lane group, block, row * LANES) gets the state before every block it has room for.
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
                _step(x, at + g * LANES, g, LANES, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip
            for g in range(whole, groups):
                lanes = min(LANES, last - first - g * LANES)
                _step(x, at + g * LANES, g, lanes, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip

    return run


_KINDS = [(single, record) for single in (False, True) for record in (False, True)]
#: Forward kernels by (one synapse, record).
_RUN = {kind: _forward_kernel(*kind) for kind in _KINDS}


# Rows of the tape: potential before the step and before firing, then i_s + x_s.
_BEFORE, _REACHED, _DRIVEN = 0, 1, 2
#: Lane groups that go through a block together: rows of the input are then 256 bytes each, and
#: the tape (24 kB) stays in the first-level cache.
TILE = 2


@part
def _find_windows(coef: Any, groups: int, rows: int, window: Any) -> None:
    """Compute per lane group 1 / threshold, and the potential at which the window opens."""
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
    """Run one step of lane group `g`, the tile's k-th, with a tape from row `r` on."""
    c, s = g * (BETA + synapses), k * (1 + synapses)
    v, current = vload(state, s * LANES), vsplat(coef, 0.0)
    vstore(tape, (r + _BEFORE) * LANES, v)
    for j in range(synapses):
        driven = vload(state, (s + 1 + j) * LANES) + load_lanes(x, at + j, synapses, lanes, buffer)
        decayed = vload(coef, (c + BETA + j) * LANES) * driven
        vstore(tape, (r + _DRIVEN + j) * LANES, driven)
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
    which is also the gradient of i_prev; alpha m is the gradient of v_prev.
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
        accumulate(gcoef, c + BETA + k, g_isyn * vload(tape, (r + _DRIVEN + k) * LANES))
        g_driven = vload(coef, (c + BETA + k) * LANES) * g_isyn
        vstore(gstate, (s + 1 + k) * LANES, g_driven)
        store_lanes(gx, at * synapses + k, synapses, lanes, streamed, buffer, g_driven)


@part(forceinline=True)
def _tile(
    x: Any, begin: int, end: int, g0: int, g1: int, lanes: int, first: int, neurons: int,
    synapses: int, recorded: bool, most: Any, coef: Any, window: Any, gcoef: Any, gstate: Any,
    state: Any, tape: Any, gspikes: Any, gvmem: Any, gisyn: Any, gx: Any, streamed: bool,
    buffer: Any,
) -> None:  # fmt: skip
    """Run steps begin..end of lane groups g0..g1 forward with a tape, then backwards."""
    rows, width = _DRIVEN + synapses, g1 - g0
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


def _adjoint_kernel(single: bool, recorded: bool) -> Any:
    @kernel
    def run(
        x: Any, steps: int, first: int, last: int, neurons: int, count: int, max_spikes: float,
        coef: Any, gcoef: Any, starts: Any, gstate: Any, gspikes: Any, gvmem: Any, gisyn: Any,
        gx: Any, streamed: bool,
    ) -> None:  # fmt: skip
        """Compute gradients for neurons first..last; arguments as in the forward kernel.

        The kernel adds to gcoef. In gstate the gradient of the last state becomes the gradient of
        the first.
        """
        synapses, most = 1 if single else count, vsplat(coef, max_spikes)
        groups, whole = -(-(last - first) // LANES), (last - first) // LANES if single else 0
        window, states = aligned(groups * 2 * LANES, coef), (1 + synapses) * LANES
        _find_windows(coef, groups, BETA + synapses, window)
        tape = aligned(BLOCK * TILE * (_DRIVEN + synapses) * LANES, x)
        state, buffer = aligned(TILE * states, x), aligned(LANES, x)
        for i in range(starts.shape[1] - 1, -1, -1):
            begin, end = i * BLOCK, min((i + 1) * BLOCK, steps)
            for g0 in range(0, whole, TILE):
                g1 = min(g0 + TILE, whole)
                for g in range(g0, g1):
                    copy_row(starts[g, i], 0, state, (g - g0) * states, states)
                _tile(x, begin, end, g0, g1, LANES, first, neurons, synapses, recorded, most, coef,
                      window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx, streamed,
                      buffer)  # fmt: skip
            for g in range(whole, groups):
                copy_row(starts[g, i], 0, state, 0, states)
                lanes = min(LANES, last - first - g * LANES)
                _tile(x, begin, end, g, g + 1, lanes, first, neurons, synapses, recorded, most,
                      coef, window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx,
                      streamed, buffer)  # fmt: skip

    return run


#: Adjoint kernels by (one synapse, gradients of the records).
_RUN_ADJOINT = {kind: _adjoint_kernel(*kind) for kind in _KINDS}


#: From this size on, output goes past the caches.
STREAM_BYTES = 16 * 2**20


def _flat(values: Tensor) -> NDArray[np.floating]:
    """Flatten (batch, ..) to (batch, values), as an array."""
    return values.detach().contiguous().flatten(1).numpy()


def _over_neurons(one: Callable[[int, slice, slice], None], batch: int, neurons: int) -> None:
    """Call `one(batch item, neurons, lane groups)` on the pool, in pieces for all threads."""
    groups = groups_of(neurons)
    parts = min(groups, -(-get_num_threads() // max(batch, 1)))
    edges = [groups * i // parts for i in range(parts + 1)]

    def piece(item: int) -> None:
        begin, end = edges[item % parts], edges[item % parts + 1]
        chosen = slice(begin * LANES, min(end * LANES, neurons))
        one(item // parts, chosen, slice(begin, end))

    parallel_for(piece, batch * parts)


def starts_shape(batch: int, steps: int, neurons: int, synapses: int) -> tuple[int, ...]:
    """Return the shape of the kept states: (batch, lane group, block, row * LANES)."""
    return batch, groups_of(neurons), -(-steps // BLOCK), (1 + synapses) * LANES


def _cpu(
    device: Device,
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    max_spikes: float,
    record: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the outputs of `reference`, and with `keep` the states before every block."""
    (batch, steps, _), neurons, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    recorded = steps if record else 0
    spikes = empty((batch, steps, neurons), x)
    vmem = empty((batch, recorded, neurons), x)
    isyn = empty((batch, recorded, neurons, synapses), x)
    streamed = _is_streamed(spikes)
    kernel = _RUN[synapses == 1, record]
    starts = empty(starts_shape(batch, steps if keep else 0, neurons, synapses), x)
    inputs, outputs, starts_np = _flat(x), (_flat(spikes), _flat(vmem), _flat(isyn)), starts.numpy()
    packed_coef, packed_state = pack(coef), pack(state)

    def one(b: int, part: slice, groups: slice) -> None:
        kernel(
            inputs[b], steps, part.start, part.stop, neurons, synapses, max_spikes,
            packed_coef[groups].reshape(-1), packed_state[b, groups].reshape(-1),
            *(out[b] for out in outputs), starts_np[b, groups], streamed,
        )  # fmt: skip

    _over_neurons(one, batch, neurons)
    last = unpack(packed_state, neurons)
    check_finite(x, coef, state, last)
    return spikes, vmem, isyn, last, starts.flatten(1)


def _is_streamed(out: Tensor) -> bool:
    """Return True to store output (batch, time, row) past the caches.

    The output must be large, and every row must start at a multiple of CACHE_LINE bytes.
    """
    return out.nbytes >= STREAM_BYTES and out.shape[2] * out.element_size() % CACHE_LINE == 0


def _cpu_adjoint(
    device: Device, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, steps, _), neurons, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    with training():
        gx = empty(tuple(x.shape), x)
    streamed = _is_streamed(gx)
    kernel = _RUN_ADJOINT[synapses == 1, record]
    inputs, g_inputs, upstream = _flat(x), _flat(gx), tuple(map(_flat, (gspikes, gvmem, gisyn)))
    packed_coef, packed_gstate = pack(coef), pack(gstate)
    starts_np = starts.detach().view(starts_shape(batch, steps, neurons, synapses)).numpy()
    gcoef = torch.zeros(batch, *packed_coef.shape, dtype=x.dtype).numpy()

    def one(b: int, part: slice, groups: slice) -> None:
        kernel(
            inputs[b], steps, part.start, part.stop, neurons, synapses, max_spikes,
            packed_coef[groups].reshape(-1), gcoef[b, groups].reshape(-1), starts_np[b, groups],
            packed_gstate[b, groups].reshape(-1), *(values[b] for values in upstream),
            g_inputs[b], streamed,
        )  # fmt: skip

    _over_neurons(one, batch, neurons)
    return gx, unpack(gcoef, neurons).sum(0), unpack(packed_gstate, neurons)


def check_finite(x: Tensor, coef: Tensor, before: Tensor, after: Tensor) -> None:
    """Raise if the state after the last step is not finite, naming the cause.

    A synaptic current that becomes NaN or infinite stays so. The last state therefore shows a
    non-finite number anywhere in the input.
    """
    if bool(torch.isfinite(after).all()):
        return
    for name, values in (("data", x), ("state", before), ("coefficient", coef)):
        wrong = (~torch.isfinite(values)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise NonFiniteError(
                f"{name} must be finite, got {float(values[at])} at index {at} and "
                f"{len(wrong) - 1} more non-finite values; remove or replace them"
            )
    raise NonFiniteError(
        f"the neurons overflowed {after.dtype}; scale the input (largest magnitude "
        f"{float(x.abs().max()):g}) or lower the decay factors"
    )


@functools.cache
def _gpu_item(synapses: int, record: bool) -> Any:
    rows, states = BETA + synapses, 1 + synapses

    @part
    def gpu_lif_item(
        item: int, groups: int, steps: int, neurons: int, blocks: int, x: Any, coef: Any,
        state: Any, spikes: Any, vmem: Any, isyn: Any, starts: Any, limit: Any, recorded: int,
    ) -> None:  # fmt: skip
        b, g = item // groups, item % groups
        lanes, at = min(LANES, neurons - g * LANES), b * steps * neurons
        kept = b * recorded * neurons
        x, spikes = x[at * synapses :], spikes[at:]
        vmem, isyn = vmem[kept:], isyn[kept * synapses :]
        coef, state = coef[g * rows * LANES :], state[item * states * LANES :]
        starts, most = starts[item * blocks * states * LANES :], vsplat(coef, limit[0])
        for t in range(steps):
            if blocks > 0 and t % BLOCK == 0:
                for r in range(states):
                    place = (t // BLOCK * states + r) * LANES
                    vstore(starts, place, vload(state, r * LANES))
            _step(
                x, t * neurons + g * LANES, 0, lanes, synapses, most, coef, state, spikes, vmem,
                isyn, record, False, coef,
            )  # fmt: skip

    return gpu_lif_item


@functools.cache
def _gpu_adjoint_item(synapses: int, recorded: bool) -> Any:
    rows, states, taped = BETA + synapses, 1 + synapses, BLOCK * (_DRIVEN + synapses) * LANES

    @part
    def gpu_lif_adjoint_item(
        item: int, groups: int, steps: int, neurons: int, x: Any, coef: Any, gcoef: Any,
        starts: Any, gstate: Any, gspikes: Any, gvmem: Any, gisyn: Any, gx: Any, limit: Any,
        kept_steps: int, tape: Any,
    ) -> None:  # fmt: skip
        state, window = tape[taped:], tape[taped + states * LANES :]
        blocks = (steps + BLOCK - 1) // BLOCK
        b, g = item // groups, item % groups
        lanes, at = min(LANES, neurons - g * LANES), b * steps * neurons
        kept = b * kept_steps * neurons
        coef, gcoef = coef[g * rows * LANES :], gcoef[item * rows * LANES :]
        gstate = gstate[item * states * LANES :]
        starts = starts[item * blocks * states * LANES :]
        _find_windows(coef, 1, rows, window)
        most = vsplat(coef, limit[0])
        for i in range(blocks - 1, -1, -1):
            for r in range(states):
                vstore(state, r * LANES, vload(starts, (i * states + r) * LANES))
            _tile(
                x[at * synapses :], i * BLOCK, min((i + 1) * BLOCK, steps), 0, 1, lanes, g * LANES,
                neurons, synapses, recorded, most, coef, window, gcoef, gstate, state, tape,
                gspikes[at:], gvmem[kept:], gisyn[kept * synapses :], gx[at * synapses :], False,
                coef,
            )  # fmt: skip

    return gpu_lif_adjoint_item


def _gpu(
    device: Device, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool,
    keep: bool,
) -> Kept:  # fmt: skip
    """Run on a GPU, without `check_finite`, which would wait for the device."""
    (batch, steps, _), count, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    recorded, groups = steps if record else 0, groups_of(count)
    spikes, vmem = x.new_empty(batch, steps, count), x.new_empty(batch, recorded, count)
    isyn = x.new_empty(batch, recorded, count, synapses)
    starts = x.new_empty(starts_shape(batch, steps if keep else 0, count, synapses))
    packed = pack_tensor(state)
    device.run_items(
        _gpu_item(synapses, record), batch * groups if steps else 0, groups, steps, count,
        starts.shape[2], x.detach().contiguous(), pack_tensor(coef), packed, spikes, vmem, isyn,
        starts, x.new_full((1,), max_spikes), recorded,
    )  # fmt: skip
    return spikes, vmem, isyn, unpack_tensor(packed, count), starts.flatten(1)


def _gpu_adjoint(
    device: Device, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> Gradients:  # fmt: skip
    (batch, steps, _), count, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    groups, gx = groups_of(count), torch.zeros_like(x).contiguous()
    packed, packed_gstate = pack_tensor(coef), pack_tensor(gstate)
    gcoef = packed.new_zeros(batch, *packed.shape)
    upstream = (g.detach().contiguous() for g in (gspikes, gvmem, gisyn))
    device.run_items(
        _gpu_adjoint_item(synapses, record), batch * groups if steps else 0, groups, steps, count,
        x.detach().contiguous(), packed, gcoef, starts.detach().contiguous(), packed_gstate,
        *upstream, gx, x.new_full((1,), max_spikes), gvmem.shape[1],
        room=(BLOCK * (_DRIVEN + synapses) + 1 + synapses + 2) * LANES,
    )  # fmt: skip
    return gx, unpack_tensor(gcoef, count).sum(0), unpack_tensor(packed_gstate, count)


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Check shapes and dtypes; the kernel does not check bounds."""
    neurons, synapses = coef.shape[0], coef.shape[1] - NEURON_COEFS
    if x.ndim != 3 or x.shape[2] != neurons * synapses:
        raise ShapeError(
            f"expected input (batch, time, {neurons} neurons * {synapses} synapses), "
            f"got {tuple(x.shape)}"
        )
    check_tensors(x, coef, state, (x.shape[0], neurons, 1 + synapses))


def _fake(
    x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, steps, neurons = x.shape[0], x.shape[1], coef.shape[0]
    synapses, recorded = coef.shape[1] - NEURON_COEFS, steps if record else 0
    return (
        x.new_empty(batch, steps, neurons),
        x.new_empty(batch, recorded, neurons),
        x.new_empty(batch, recorded, neurons, synapses),
        torch.empty_like(state),
        # One axis for groups and blocks: an axis of one block would make the length static in
        # `torch.export`.
        x.new_empty(batch, math.prod(starts_shape(1, steps if keep else 0, neurons, synapses))),
    )


def _fake_adjoint(
    x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(gstate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Kept) -> None:
    x, coef, _, ctx.max_spikes, ctx.record, _ = inputs
    ctx.save_for_backward(x, coef, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _backward(ctx: Any, run: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    given = *ctx.saved_tensors, ctx.max_spikes, ctx.record, *upstream[:4]
    return (*run(LIF_ADJOINT, *given), None, None, None)


def _call(
    kernel: Any, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool = False,
    backend: str | None = None,
) -> Outputs:  # fmt: skip
    """Run integrate-and-fire neurons; arguments as in `reference`.

    Non-finite input raises on the CPU, except in a compiled plain loop. On a GPU there is no check,
    and non-finite numbers stay in the state and the outputs.
    """
    _check(x, coef, state)
    if use_reference(x, backend):
        outputs = reference(x, coef, state, max_spikes, record)
        if not (torch.compiler.is_compiling() or x.is_cuda):
            check_finite(x, coef, state, outputs[-1])
        return outputs
    keep = wants_derivative(x, coef, state)
    made: Outputs = kernel(x, coef, state, max_spikes, record, keep)[:4]
    return made


LIF_ADJOINT = RowOperation(
    name="lif_adjoint", cpu=_cpu_adjoint, gpu=_gpu_adjoint, fake=_fake_adjoint, batched=None
)
LIF = RowOperation(
    name="lif",
    cpu=_cpu,
    gpu=_gpu,
    fake=_fake,
    reference=reference,
    keep=_save,
    backward=_backward,
    batched=(0, 2),
    call=_call,
)
