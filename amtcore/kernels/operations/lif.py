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
block and the tape of one block. A work item is one batch item's share of the lane groups: as many
shares as there are threads on a CPU, single groups on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import NonFiniteError, ShapeError
from amtcore.kernels.operation import Device, RowOperation, check_tensors, empty_gradients
from amtcore.kernels.torch_state import use_reference, wants_derivative
from amtcore.kernels.vector.arrays import empty, groups_of, pack, training, unpack
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import copy_row, load_lanes, prefetch, store_lanes
from amtcore.kernels.vector.simd import (
    CACHE_LINE,
    LANES,
    accumulate,
    any_at_least,
    fma,
    lanes_are_threads,
    vfloor,
    vload,
    vmax,
    vmin,
    vsplat,
    vstore,
    where_greater,
)

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
# Coefficient rows of a neuron; a row for each synapse follows from BETA on.
ALPHA, BIAS, THRESHOLD, WINDOW, BETA = 0, 1, 2, 3, 4


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
    alpha, bias, threshold, window = coef[:, :BETA].unbind(-1)
    beta = coef[:, BETA:]
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


@part(forceinline=True)
def _integrate(
    x: Any, at: int, lanes: int, synapses: int, coef: Any, c: int, state: Any, s: int, taped: bool,
    tape: Any, r: int, buffer: Any,
) -> Any:  # fmt: skip
    """Return the potential before firing, after synapses and leak; currents go to `state`.

    If `taped`, each i_s + x_s goes to the tape from row `r` on.
    """
    current = vsplat(coef, 0.0)
    for k in range(synapses):
        row = (s + 1 + k) * LANES
        driven = vload(state, row) + load_lanes(x, at + k, synapses, lanes, buffer)
        if taped:
            vstore(tape, (r + k) * LANES, driven)
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
    potential = _integrate(
        x, at * synapses, lanes, synapses, coef, c, state, s, False, coef, 0, buffer
    )
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


def _shapes(x: Tensor, coef: Tensor) -> tuple[int, int, int, int]:
    """Return the number of batch items, steps, neurons, and synapses of a neuron."""
    return x.shape[0], x.shape[1], coef.shape[0], coef.shape[1] - BETA


@part
def _place(item: int, parts: int, neurons: int) -> Any:
    """Return the batch item, the first lane group and the group after the last of a work item."""
    groups, part = -(-neurons // LANES), item % parts
    return item // parts, groups * part // parts, groups * (part + 1) // parts


@part
def _whole_groups(known: int, first: int, last: int) -> int:
    """Return how many groups of neurons first..last are loaded as they lie, on a processor.

    These are full groups of neurons with one synapse.
    """
    return (last - first) // LANES if known == 1 and not lanes_are_threads() else 0


def _known(device: Device, synapses: int) -> int:
    """Return the number of synapses for which a kernel is compiled; 0 for any number.

    A CPU has kernels for one and for any number.
    """
    return synapses if synapses == 1 or device.name != "cpu" else 0


@functools.cache
def _forward_item(known: int, record: bool) -> Any:
    """Return the kernel for `known` synapses, or any number for 0, with or without records.

    The compiler needs both facts to keep vectors in registers; else the kernel is ten times slower.
    """

    @kernel
    def lif_item(
        item: int, parts: int, steps: int, neurons: int, count: int, recorded: int, blocks: int,
        streamed: int, x: Any, coef: Any, state: Any, spikes: Any, vmem: Any, isyn: Any,
        starts: Any, limit: Any, buffer: Any,
    ) -> None:  # fmt: skip
        """Run some lane groups of one batch item, whose neurons have `count` synapses.

        Arrays are flat. The input is (batch, time, neuron, synapse), outputs likewise, with 0 or
        `recorded` steps of records. coef (group, row, LANES) and state (batch, group, row, LANES)
        are packed; state is updated. starts (batch, group, block, row, LANES) gets the state before
        each of `blocks` blocks.
        """
        synapses = known if known > 0 else count
        states, groups = (1 + synapses) * LANES, -(-neurons // LANES)
        b, begin, end = _place(item, parts, neurons)
        first, last, own = begin * LANES, min(end * LANES, neurons), b * groups + begin
        at, kept = b * steps * neurons, b * recorded * neurons
        x, spikes = x[at * synapses :], spikes[at:]
        vmem, isyn = vmem[kept:], isyn[kept * synapses :]
        coef, state = coef[begin * (BETA + synapses) * LANES :], state[own * states :]
        starts, most = starts[own * blocks * states :], vsplat(coef, limit[0])
        whole = _whole_groups(known, first, last)
        for t in range(steps):
            if blocks > 0 and t % BLOCK == 0:
                for g in range(end - begin):
                    copy_row(state, g * states, starts, (g * blocks + t // BLOCK) * states, states)
            at = t * neurons + first
            for g in range(whole):
                prefetch(x, at + _AHEAD * neurons + g * LANES)
                _step(x, at + g * LANES, g, LANES, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip
            for g in range(whole, end - begin):
                lanes = min(LANES, last - first - g * LANES)
                _step(x, at + g * LANES, g, lanes, synapses, most, coef, state, spikes, vmem, isyn,
                     record, streamed, buffer)  # fmt: skip

    return lif_item


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
    vstore(tape, (r + _BEFORE) * LANES, vload(state, s * LANES))
    reached = _integrate(x, at, lanes, synapses, coef, c, state, s, True, tape, r + _DRIVEN, buffer)
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


@functools.cache
def _adjoint_item(known: int, recorded: bool) -> Any:
    """Return the adjoint kernel; arguments as above, but `recorded` for gradients of records."""

    @kernel
    def lif_adjoint_item(
        item: int, parts: int, steps: int, neurons: int, count: int, kept_steps: int, blocks: int,
        streamed: int, x: Any, coef: Any, gcoef: Any, starts: Any, gstate: Any, gspikes: Any,
        gvmem: Any, gisyn: Any, gx: Any, limit: Any, room: Any,
    ) -> None:  # fmt: skip
        """Compute gradients for some lane groups of one batch item; arrays as in `lif_item`.

        The kernel adds to gcoef (batch, group, row, LANES). In gstate the gradient of the last
        state becomes the gradient of the first.
        """
        synapses = known if known > 0 else count
        rows, states, groups = BETA + synapses, (1 + synapses) * LANES, -(-neurons // LANES)
        b, begin, end = _place(item, parts, neurons)
        first, last, own = begin * LANES, min(end * LANES, neurons), b * groups + begin
        at, kept = b * steps * neurons, b * kept_steps * neurons
        x, gx, gspikes = x[at * synapses :], gx[at * synapses :], gspikes[at:]
        gvmem, gisyn = gvmem[kept:], gisyn[kept * synapses :]
        coef, gcoef = coef[begin * rows * LANES :], gcoef[own * rows * LANES :]
        gstate, starts = gstate[own * states :], starts[own * blocks * states :]
        buffer, state, most = room, room[LANES:], vsplat(coef, limit[0])
        tape = state[TILE * states :]
        window = tape[BLOCK * TILE * (_DRIVEN + synapses) * LANES :]
        _find_windows(coef, end - begin, rows, window)
        whole = _whole_groups(known, first, last)
        for i in range(blocks - 1, -1, -1):
            t0, t1 = i * BLOCK, min((i + 1) * BLOCK, steps)
            for g0 in range(0, whole, TILE):
                g1 = min(g0 + TILE, whole)
                for g in range(g0, g1):
                    copy_row(starts, (g * blocks + i) * states, state, (g - g0) * states, states)
                _tile(x, t0, t1, g0, g1, LANES, first, neurons, synapses, recorded, most, coef,
                      window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx, streamed,
                      buffer)  # fmt: skip
            for g in range(whole, end - begin):
                copy_row(starts, (g * blocks + i) * states, state, 0, states)
                lanes = min(LANES, last - first - g * LANES)
                _tile(x, t0, t1, g, g + 1, lanes, first, neurons, synapses, recorded, most, coef,
                      window, gcoef, gstate, state, tape, gspikes, gvmem, gisyn, gx, streamed,
                      buffer)  # fmt: skip

    return lif_adjoint_item


#: From this size on, output goes past the caches.
STREAM_BYTES = 16 * 2**20


def _parts(device: Device, batch: int, neurons: int) -> int:
    """Return the number of work items of a batch item, enough for all workers of the device."""
    return min(groups_of(neurons), -(-device.workers // max(batch, 1)))


def starts_shape(batch: int, steps: int, neurons: int, synapses: int) -> tuple[int, ...]:
    """Return the shape of the kept states: (batch, lane group, block, row * LANES)."""
    return batch, groups_of(neurons), -(-steps // BLOCK), (1 + synapses) * LANES


def _run(
    device: Device, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool,
    keep: bool,
) -> Kept:  # fmt: skip
    """Compute the outputs of `reference`, and with `keep` the states before every block.

    On a GPU nothing checks for finite numbers: the check would wait for the device.
    """
    batch, steps, neurons, synapses = _shapes(x, coef)
    recorded, parts = steps if record else 0, _parts(device, batch, neurons)
    spikes, vmem = (empty((batch, count, neurons), x) for count in (steps, recorded))
    isyn = empty((batch, recorded, neurons, synapses), x)
    starts = empty(starts_shape(batch, steps if keep else 0, neurons, synapses), x)
    packed = pack(state)
    device.run_items(
        _forward_item(_known(device, synapses), record), batch * parts if steps else 0, parts,
        steps, neurons, synapses, recorded, starts.shape[2], _is_streamed(spikes),
        x.detach().contiguous(), pack(coef), packed, spikes, vmem, isyn, starts,
        x.new_full((1,), max_spikes), room=LANES,
    )  # fmt: skip
    last = unpack(packed, neurons)
    if not x.is_cuda:
        check_finite(x, coef, state, last)
    return spikes, vmem, isyn, last, starts.flatten(1)


def _is_streamed(out: Tensor) -> int:
    """Return True to store output (batch, time, row) past the caches.

    The output must be large, and every row must start at a multiple of CACHE_LINE bytes.
    """
    return int(out.nbytes >= STREAM_BYTES and out.shape[2] * out.element_size() % CACHE_LINE == 0)


def _run_adjoint(
    device: Device, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> Gradients:  # fmt: skip
    batch, steps, neurons, synapses = _shapes(x, coef)
    parts, blocks = _parts(device, batch, neurons), -(-steps // BLOCK)
    with training():
        gx = empty(tuple(x.shape), x)
    packed, packed_gstate = pack(coef), pack(gstate)
    gcoef = packed.new_zeros(batch, *packed.shape)
    rows = 1 + TILE * (1 + synapses) + BLOCK * TILE * (_DRIVEN + synapses)
    windows = 2 * -(-groups_of(neurons) // max(parts, 1))
    device.run_items(
        _adjoint_item(_known(device, synapses), record), batch * parts if steps else 0, parts,
        steps, neurons, synapses, gvmem.shape[1], blocks, _is_streamed(gx),
        x.detach().contiguous(), packed, gcoef, starts.detach().contiguous(), packed_gstate,
        *(g.detach().contiguous() for g in (gspikes, gvmem, gisyn)), gx,
        x.new_full((1,), max_spikes), room=(rows + windows) * LANES,
    )  # fmt: skip
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


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Check shapes and dtypes; the kernel does not check bounds."""
    neurons, synapses = coef.shape[0], coef.shape[1] - BETA
    if x.ndim != 3 or x.shape[2] != neurons * synapses:
        raise ShapeError(
            f"expected input (batch, time, {neurons} neurons * {synapses} synapses), "
            f"got {tuple(x.shape)}"
        )
    check_tensors(x, coef, state, (x.shape[0], neurons, 1 + synapses))


def _fake(
    x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
) -> Kept:
    batch, steps, neurons, synapses = _shapes(x, coef)
    recorded = steps if record else 0
    return (
        x.new_empty(batch, steps, neurons),
        x.new_empty(batch, recorded, neurons),
        x.new_empty(batch, recorded, neurons, synapses),
        torch.empty_like(state),
        # One axis for groups and blocks: an axis of one block would make the length static in
        # `torch.export`.
        x.new_empty(batch, math.prod(starts_shape(1, steps if keep else 0, neurons, synapses))),
    )


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
    name="lif_adjoint",
    run=_run_adjoint,
    fake=lambda x, coef, *rest: empty_gradients(x, coef, rest[-1]),
    batched=None,
)
LIF = RowOperation(
    name="lif",
    run=_run,
    fake=_fake,
    reference=reference,
    keep=_save,
    backward=_backward,
    batched=(0, 2),
    call=_call,
)
