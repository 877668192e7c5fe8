"""Recurrences of Zwicker's loudness (ISO 532-1:2017): third-octave bands, decay, slopes.

Bands are three sections y[t] = x[t] - a1 y[t-1] - a2 y[t-2], a square, and three low-passes. The
decay lets core loudness fall nonlinearly in time, in 24 steps a frame. Slopes over the Bark scale
turn core loudness into specific loudness and loudness.

Bands and decay have a channel in each lane, and run on CPUs and GPUs. Frames need different numbers
of slopes, so that kernel is for CPUs, and the plain form computes all frames at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.torch_state import wants_derivative
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    narrow_lanes,
    vload,
    vload_narrow,
    vsplat,
    vstore,
    where_greater,
)

#: Samples from a band level to the next, and steps of the decay from a frame to the next.
STRIDE = 24
#: Samples that the numerator (1 - z^-2)^3 of the three sections together looks back.
NUMERATOR = 6
#: State values of a band: two of each section, one of each low-pass.
BAND_STATES = 9
#: State values of the decay: the core loudness of the frame before, and the two capacitors.
DECAY_STATES = 3
#: A core loudness "before the first frame", from which every step leaves empty capacitors empty.
BEFORE = -1e30
#: Frames of one work item of the slopes.
SLOPE_FRAMES = 64
#: Points of specific loudness, 0.1 Bark apart, and the margin that puts a band's edge inside it.
GRID_POINTS, EDGE_MARGIN = 240, 1e-4


@part
def _section(
    x: Any, first: int, room: Any, lane: int, n: int, from_x: bool, coef: Any, c: int, state: Any,
    s: int,
) -> None:  # fmt: skip
    """Filter `n` samples of narrow lanes by y[t] = v[t] - a1 y[t-1] - a2 y[t-2], to `room`.

    Input v is `room`, or in every lane the numerator of x, of which x[first] is the oldest sample.
    """
    zero = vsplat(vload_narrow(coef, c * LANES + lane), 0.0)
    minus_a1 = zero - vload_narrow(coef, c * LANES + lane)
    minus_a2 = zero - vload_narrow(coef, (c + 1) * LANES + lane)
    y1, y2 = vload_narrow(state, s + lane), vload_narrow(state, s + LANES + lane)
    for t in range(n):
        at, i = t * LANES + lane, first + t
        if from_x:
            numerator = (x[i + 6] - x[i]) - 3.0 * (x[i + 4] - x[i + 2])
            v = vsplat(zero, numerator)
        else:
            v = vload_narrow(room, at)
        y = fma(minus_a1, y1, fma(minus_a2, y2, v))
        y1, y2 = y, y1
        vstore(room, at, y)
    vstore(state, s + lane, y1)
    vstore(state, s + LANES + lane, y2)


@part
def _power(
    room: Any, lane: int, n: int, coef: Any, c: int, state: Any, s: int, out: Any, at: int
) -> None:
    """Square `n` samples and smooth them by y[t] = x[t] + p y[t-1], with three p; store the first.

    Coefficient rows from `c`: p of each filter.
    """
    p1, p2 = vload_narrow(coef, c * LANES + lane), vload_narrow(coef, (c + 1) * LANES + lane)
    p3 = vload_narrow(coef, (c + 2) * LANES + lane)
    y1, y2 = vload_narrow(state, s + lane), vload_narrow(state, s + LANES + lane)
    y3 = vload_narrow(state, s + 2 * LANES + lane)
    for t in range(n):
        v = vload_narrow(room, t * LANES + lane)
        y1 = fma(v, v, p1 * y1)
        y2 = fma(p2, y2, y1)
        y3 = fma(p3, y3, y2)
        if t == 0:
            vstore(out, at + lane, y3)
    vstore(state, s + lane, y1)
    vstore(state, s + LANES + lane, y2)
    vstore(state, s + 2 * LANES + lane, y3)


@kernel
def bands_item(item: int, samples: int, x: Any, coef: Any, state: Any, out: Any, room: Any) -> None:
    """Compute the bands: `x` (signal, NUMERATOR + samples), `out` (signal, frame, LANES).

    Coefficient rows: a1, a2 of each section, then the rows of `_power`. State (signal, 9, LANES).
    """
    frames, s = -(-samples // STRIDE), item * BAND_STATES * LANES
    for f in range(frames):
        first, n = item * (NUMERATOR + samples) + f * STRIDE, min(STRIDE, samples - f * STRIDE)
        at = (item * frames + f) * LANES
        for lane in range(0, LANES, narrow_lanes()):
            _section(x, first, room, lane, n, True, coef, 0, state, s)
            _section(x, first, room, lane, n, False, coef, 2, state, s + 2 * LANES)
            _section(x, first, room, lane, n, False, coef, 4, state, s + 4 * LANES)
            _power(room, lane, n, coef, 6, state, s + 6 * LANES, out, at)


def _bands(device: Device, x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return powers (signal, frame, LANES) and the state of (signal, NUMERATOR + time)."""
    signals, samples, after = x.shape[0], x.shape[1] - NUMERATOR, state.clone()
    out = x.new_empty(signals, -(-samples // STRIDE), LANES)
    room = STRIDE * LANES
    device.run_items(bands_item, signals, samples, x.contiguous(), coef, after, out, room=room)
    return out, after


#: Powers of the bands at every 24th sample, beginning with the first; without a gradient.
BANDS = RowOperation(
    name="zwicker_bands",
    run=_bands,
    fake=lambda x, coef, state: (
        x.new_empty(x.shape[0], -(-(x.shape[1] - NUMERATOR) // STRIDE), LANES),
        torch.empty_like(state),
    ),
)


def decay_reference(core: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Let the core loudness decay, a plain loop.

    Args:
        core: (signal, frame, lane) in sone/Bark.
        coef: (6,), B0 .. B5 of one step.
        state: (signal, 3, lane): core loudness of the frame before, and the two capacitors.
    Returns:
        The value at the first step of each frame, and the state after the last frame.
    """
    b0, b1, b2, b3, b4, b5 = coef.unbind()
    before, uo, u2 = state.unbind(1)
    frames = []
    for now in core.unbind(1):
        for k in range(1, STRIDE + 1):
            ui = now if k == STRIDE else before + (now - before) * (k / STRIDE)
            fast = torch.maximum(b2 * uo - b3 * u2, ui)
            slow = torch.maximum(b4 * uo, ui)
            falls, charged = ui < uo, uo > u2
            held = (ui - uo < 1e-5) & (ui <= u2)
            rise = torch.where(held, ui, ui + (u2 - ui) * b5)
            down = torch.minimum(b0 * uo - b1 * u2, fast)
            u2 = torch.where(falls, torch.where(charged, down, slow), rise)
            uo = torch.where(falls, torch.where(charged, fast, slow), ui)
        before = now
        frames.append(uo)
    return (torch.stack(frames, 1) if frames else core.clone()), torch.stack((before, uo, u2), 1)


@kernel
def decay_item(item: int, frames: int, core: Any, coef: Any, state: Any, out: Any) -> None:
    """Run the decay of one signal; arrays as in `decay_reference`, with LANES lanes."""
    s = item * DECAY_STATES * LANES
    before, uo, u2 = vload(state, s), vload(state, s + LANES), vload(state, s + 2 * LANES)
    b0, b1, b2 = vsplat(uo, coef[0]), vsplat(uo, -coef[1]), vsplat(uo, coef[2])
    b3, b4, b5 = vsplat(uo, -coef[3]), vsplat(uo, coef[4]), vsplat(uo, coef[5])
    small = vsplat(uo, 1e-5)
    for t in range(frames):
        at = (item * frames + t) * LANES
        now = vload(core, at)
        slope = now - before
        for k in range(1, STRIDE + 1):
            ui = fma(slope, vsplat(uo, k / STRIDE), before)
            if k == STRIDE:
                ui = now
            fast, slow = fma(b2, uo, b3 * u2), b4 * uo
            fast, slow = where_greater(ui, fast, ui, fast), where_greater(ui, slow, ui, slow)
            down, rise = fma(b0, uo, b1 * u2), fma(u2 - ui, b5, ui)
            down = where_greater(down, fast, fast, down)
            rise = where_greater(ui, u2, rise, where_greater(small, ui - uo, ui, rise))
            down, fast = where_greater(uo, u2, down, slow), where_greater(uo, u2, fast, slow)
            u2, uo = where_greater(uo, ui, down, rise), where_greater(uo, ui, fast, ui)
        before = now
        vstore(out, at, uo)
    vstore(state, s, before)
    vstore(state, s + LANES, uo)
    vstore(state, s + 2 * LANES, u2)


def _decay(device: Device, core: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    after, out = state.clone(), torch.empty_like(core)
    device.run_items(decay_item, core.shape[0], core.shape[1], core, coef, after, out)
    return out, after


def _unless_derived(reference: Any) -> Any:
    """Return a `call` that takes the plain form where a derivative may be asked for."""
    return lambda run, *args: (reference if wants_derivative(*args[:1]) else run)(*args)


DECAY = RowOperation(
    name="zwicker_decay",
    run=_decay,
    fake=lambda core, coef, state: (torch.empty_like(core), torch.empty_like(state)),
    reference=decay_reference,
    call=_unless_derived(decay_reference),
)


def slopes_reference(
    core: Tensor, edges: Tensor, limits: Tensor, steepness: Tensor, every: int
) -> tuple[Tensor, Tensor]:
    """Add the upper slopes to the core loudness.

    Args:
        core: (frame, 21 or more) in sone/Bark; the value of the last band is 0.
        edges: (21,), upper edge of each band in Bark.
        limits: (18,), lower limit of each range of specific loudness in sone/Bark, descending.
        steepness: (18, 8), slope in sone/Bark^2 of each range and group of bands.
        every: Frames from one specific loudness to the next; the first frame has one.
    Returns:
        Loudness in sone, (frame,), and specific loudness in sone/Bark, (frame / every, 240).
    """
    limits, steepness, last = limits.to(core), steepness.to(core), len(limits) - 1
    z1, n1 = core[:, 0].double() * 0.0, core[:, 0] * 0.0
    j, total = torch.full_like(z1, last, dtype=torch.int64), n1
    points = 0.1 * torch.arange(1, GRID_POINTS + 1, dtype=torch.float64, device=core.device)
    columns, low = [], 0
    for i, edge in enumerate((edges + EDGE_MARGIN).tolist()):
        c, group = core[:, i], min(max(i - 1, 0), steepness.shape[1] - 1)
        high = int((points <= edge).sum())
        z, values = points[low:high], core.new_zeros(len(core), high - low)
        while bool((z1 < edge).any()):
            inside, masked = z1 < edge, n1 > c
            own = (limits > c[:, None]).sum(1).clamp(max=last)
            j = torch.where(inside & (n1 < c), own, j)
            slope, meets = steepness[j, group], torch.maximum(limits[j], c)
            fall = z1 + ((n1 - meets) / slope).double()
            z2 = torch.where(masked, fall.clamp(max=edge), edge)
            width = (z2 - z1).to(core)
            n2 = torch.where(masked, torch.where(fall > edge, n1 - width * slope, meets), c)
            area = width * torch.where(masked, (n1 + n2) / 2, n2)
            total = total + torch.where(inside, area, 0.0)
            fallen = n1[:, None] - (z - z1[:, None]).to(core) * slope[:, None]
            here = inside[:, None] & (z > z1[:, None]) & (z <= z2[:, None])
            value = torch.where(masked[:, None], fallen, n2[:, None])
            values = torch.where(here, value, values)
            lower = (limits >= n2[:, None]).sum(1).clamp(max=last)
            j = torch.where(inside, torch.maximum(j, lower), j)
            z1, n1 = torch.where(inside, z2, z1), torch.where(inside, n2, n1)
        columns.append(values)
        low = high
    return total, torch.cat(columns, 1)[::every]


@kernel
def slopes_item(
    item: int, frames: int, width: int, every: int, core: Any, edges: Any, limits: Any,
    steepness: Any, total: Any, specific: Any,
) -> None:  # fmt: skip
    """Compute SLOPE_FRAMES frames in float64; arrays as in `slopes_reference`, flat."""
    last, groups = limits.shape[0] - 1, steepness.shape[0] // limits.shape[0]
    for f in range(item * SLOPE_FRAMES, min((item + 1) * SLOPE_FRAMES, frames)):
        z1, n1, j, loudness, m = 0.0, 0.0, last, 0.0, 0
        points = GRID_POINTS if f % every == 0 else 0
        row = f // every * GRID_POINTS
        for i in range(edges.shape[0]):
            c, edge = float(core[f * width + i]), edges[i] + EDGE_MARGIN
            group = min(max(i - 1, 0), groups - 1)
            while z1 < edge:
                slope, z2, n2 = 0.0, edge, c
                if n1 <= c:
                    if n1 < c:
                        j = 0
                        while j < last and limits[j] > c:
                            j += 1
                    n1 = c
                else:
                    slope, n2 = steepness[j * groups + group], max(limits[j], c)
                    z2 = z1 + (n1 - n2) / slope
                    if z2 > edge:
                        z2, n2 = edge, n1 - (edge - z1) * slope
                loudness += (z2 - z1) * (n1 + n2) / 2
                while m < points and 0.1 * (m + 1) <= z2:
                    specific[row + m] = n1 - (0.1 * (m + 1) - z1) * slope
                    m += 1
                while j < last and n2 <= limits[j]:
                    j += 1
                z1, n1 = z2, n2
        total[f] = loudness


def _slopes(
    device: Device, core: Tensor, edges: Tensor, limits: Tensor, steepness: Tensor, every: int
) -> tuple[Tensor, Tensor]:
    (frames, width), rows = core.shape, core.contiguous()
    total, specific = core.new_empty(frames), core.new_empty(-(-frames // every), GRID_POINTS)
    device.run_items(
        slopes_item, -(-frames // SLOPE_FRAMES), frames, width, every, rows, edges, limits,
        steepness, total, specific,
    )  # fmt: skip
    return total, specific


SLOPES = RowOperation(
    name="zwicker_slopes",
    run=_slopes,
    on_gpu=False,
    fake=lambda core, edges, limits, steepness, every: (
        core.new_empty(core.shape[0]),
        core.new_empty(-(-core.shape[0] // every), GRID_POINTS),
    ),
    reference=slopes_reference,
    call=_unless_derived(slopes_reference),
)
