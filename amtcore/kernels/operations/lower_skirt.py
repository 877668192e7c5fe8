"""Excitation by components below a filter's centre (Glasberg and Moore 1990).

    E[n, k] = sum over f[j] < fc[k] of I[n, j] (1 + x) exp(-x),   x = s[n, j] r[k] (fc[k] - f[j])

r is the slope of the filter per Hz at the reference level and s the factor by which the level at
the component changes it. Components above the centre have a fixed slope: a matrix product.

The kernel takes LANES components at a time, after dropping components of zero intensity. Both
frequency axes ascend, so the components below a filter's centre are a prefix. Only the last vector
of the prefix can hold other components, which get no weight. A frame's sums have a fixed order.

Components of zero intensity get no gradient from the kernel: a rule on levels dropped them, and no
small change of their level brings them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.vector.elementary import LOG2_E, vdecay, vexp
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    add_once,
    fma,
    vload,
    vmax,
    vsplat,
    vsum,
    where_greater,
)
from amtcore.kernels.vector.threads import parallel_for
from amtcore.kernels.vector.warp_lowering import lane_id

Gradients = tuple[Tensor, Tensor, Tensor]


def reference(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    """Return the excitation of every filter by the components below its centre.

    Args:
        intensity: (frame, component), 0 for a component that is not there.
        slope: (frame, component), 0 or more.
        rate: (filter,), per Hz.
        fc_hz: (filter,), ascending.
        f_hz: (component,), ascending.
    Returns:
        (frame, filter).
    """
    distance = fc_hz[:, None] - f_hz
    x = slope[:, None] * (rate[:, None] * distance).clamp(min=0.0)
    weight = torch.where(distance > 0, (1.0 + x) * torch.exp(-x), 0.0)
    return (intensity[:, None] * weight).sum(-1)


def _plain_gradients(
    intensity: Tensor, slope: Tensor, gout: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of intensity, slope and rate for `gout` (frame, filter).

    The values agree with automatic differentiation of `reference`.
    """
    distance = fc_hz[:, None] - f_hz
    away = rate[:, None] * distance
    x = slope[:, None] * away.clamp(min=0.0)
    e = torch.exp(-x)
    weight = torch.where(distance > 0, (1.0 + x) * e, 0.0)
    g_weight = torch.where(distance > 0, gout[..., None] * intensity[:, None], 0.0)
    g_x = g_weight * e - g_weight * (1.0 + x) * e
    g_away = torch.where(away >= 0, (g_x * slope[:, None]).sum(0), 0.0)
    return (
        (gout[..., None] * weight).sum(1),
        (g_x * away.clamp(min=0.0)).sum(1),
        (g_away * distance).sum(1),
    )


@part
def _present(intensity: Any, slope: Any, f_hz: Any, where: Any, i: Any, s: Any, f: Any) -> int:
    """Gather the components of nonzero intensity, and their indices in `where`; return the count.

    The last vector is padded with silence at a high frequency.
    """
    count = 0
    for j in range(f_hz.shape[0]):
        if intensity[j] != 0:
            where[count] = j
            i[count], s[count], f[count] = intensity[j], slope[j], f_hz[j]
            count += 1
    for j in range(count, count + (-count) % LANES):
        i[j], s[j], f[j] = 0.0, 0.0, f_hz[-1]
    return count


@part
def _weight(slope: Any, away: Any) -> Any:
    """(1 + x) exp(-x), x = slope away."""
    x = slope * away
    return (vsplat(x, 1.0) + x) * vdecay(x * vsplat(x, -LOG2_E))


@part
def _skirts(count: int, i: Any, s: Any, f: Any, rate: Any, fc_hz: Any, out: Any) -> None:
    zero, below = vsplat(i, 0.0), 0
    for k in range(fc_hz.shape[0]):
        while below < count and f[below] < fc_hz[k]:
            below += 1
        centre, per_hz, total = vsplat(i, fc_hz[k]), vsplat(i, rate[k]), zero
        whole = below - below % LANES
        for j in range(0, whole, LANES):
            away = per_hz * (centre - vload(f, j))
            total = fma(vload(i, j), _weight(vload(s, j), away), total)
        if whole < below:
            away = per_hz * (centre - vload(f, whole))
            away = where_greater(away, zero, away, zero)
            level = where_greater(away, zero, vload(i, whole), zero)
            total = fma(level, _weight(vload(s, whole), away), total)
        out[k] = vsum(total)


@part
def _skirts_adjoint(
    count: int, i: Any, s: Any, f: Any, rate: Any, fc_hz: Any, gout: Any, gi: Any, gs: Any,
    grate: Any,
) -> None:  # fmt: skip
    """With w = (1 + x) exp(-x): dw/dx = -x exp(-x), and x = s r d gives ds = r d dx, dr = s d dx.

    `gi`, `gs` and `grate` are added to.
    """
    zero, one, below = vsplat(i, 0.0), vsplat(i, 1.0), 0
    for k in range(fc_hz.shape[0]):
        while below < count and f[below] < fc_hz[k]:
            below += 1
        centre, per_hz, upstream = vsplat(i, fc_hz[k]), vsplat(i, rate[k]), vsplat(i, gout[k])
        total = zero
        for j in range(0, below, LANES):
            distance = centre - vload(f, j)
            passes = where_greater(distance, zero, upstream, zero)
            slope = where_greater(distance, zero, vload(s, j), zero)
            level = where_greater(distance, zero, vload(i, j), zero)
            distance = vmax(distance, zero)
            x = slope * (per_hz * distance)
            e = vexp(zero - x)
            accumulate(gi, j // LANES, passes * ((one + x) * e))
            g_x = (zero - passes) * level * x * e * distance
            accumulate(gs, j // LANES, g_x * per_hz)
            total = fma(g_x, slope, total)
        add_once(grate, k, vsum(total))


@kernel
def _run_lower_skirt(
    intensity: Any, slope: Any, rate: Any, fc_hz: Any, f_hz: Any, out: Any
) -> None:
    """Compute the excitation of a few frames: (frame, component) twice -> out (frame, filter)."""
    room = f_hz.shape[0] + LANES
    where = np.empty(room, np.int64)
    i, s, f = aligned(room, intensity), aligned(room, intensity), aligned(room, intensity)
    for n in range(intensity.shape[0]):
        count = _present(intensity[n], slope[n], f_hz, where, i, s, f)
        _skirts(count, i, s, f, rate, fc_hz, out[n])


@kernel
def _run_lower_skirt_adjoint(
    intensity: Any, slope: Any, rate: Any, fc_hz: Any, f_hz: Any, gout: Any, gintensity: Any,
    gslope: Any, grate: Any,
) -> None:  # fmt: skip
    """Compute the gradients of a few frames; components of zero intensity get none."""
    room = f_hz.shape[0] + LANES
    where = np.empty(room, np.int64)
    i, s, f = aligned(room, intensity), aligned(room, intensity), aligned(room, intensity)
    gi, gs = aligned(room, intensity), aligned(room, intensity)
    grate[:] = 0.0
    for n in range(intensity.shape[0]):
        count = _present(intensity[n], slope[n], f_hz, where, i, s, f)
        gi[:] = 0.0
        gs[:] = 0.0
        _skirts_adjoint(count, i, s, f, rate, fc_hz, gout[n], gi, gs, grate)
        gintensity[n] = 0.0
        gslope[n] = 0.0
        for j in range(count):
            gintensity[n, where[j]] = gi[j]
            gslope[n, where[j]] = gs[j]


#: Frames of one work item. Gradients of rates are summed by item; without them large items are
#: faster.
ITEM_FRAMES, _FORWARD_FRAMES = 16, 64


def _arrays(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple(tensor.detach().contiguous().numpy() for tensor in tensors)


def _strange(levels: NDArray[Any], slopes: NDArray[Any], rates: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of frames with non-finite numbers, which the plain form computes.

    The kernel skips components and could miss such a number.
    """
    with np.errstate(all="ignore"):
        sums = levels.sum() + slopes.sum() + rates.sum()
    if np.isfinite(sums):
        return np.empty(0, np.int64)
    fine = np.isfinite(levels).all(1) & np.isfinite(slopes).all(1) & np.isfinite(rates).all()
    return np.flatnonzero(~fine)


def _over_frames(one: Callable[[int, slice], None], frames: int, size: int) -> None:
    def item(i: int) -> None:
        one(i, slice(i * size, (i + 1) * size))

    parallel_for(item, -(-frames // size))


def _cpu(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    levels, slopes, *axes = _arrays(intensity, slope, rate, fc_hz, f_hz)
    out = np.empty((len(levels), len(axes[0])), levels.dtype)

    def one(_: int, part: slice) -> None:
        _run_lower_skirt(levels[part], slopes[part], *axes, out[part])
        strange = _strange(levels[part], slopes[part], axes[0]) + part.start
        if len(strange):
            frames = (torch.from_numpy(values[strange]) for values in (levels, slopes))
            out[strange] = reference(*frames, *map(torch.from_numpy, axes)).numpy()

    _over_frames(one, len(levels), _FORWARD_FRAMES)
    return torch.from_numpy(out)


def _cpu_adjoint(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
    gout: Tensor,
) -> Gradients:  # fmt: skip
    levels, slopes, rates, centres, components, upstream = _arrays(
        intensity, slope, rate, fc_hz, f_hz, gout
    )
    g_levels, g_slopes = np.empty_like(levels), np.empty_like(levels)
    items = -(-len(levels) // ITEM_FRAMES)
    g_rates = np.zeros((items, len(rates)), levels.dtype)

    def kernel(i: int, chosen: Any) -> None:
        made = np.empty_like(levels[chosen]), np.empty_like(levels[chosen])
        _run_lower_skirt_adjoint(
            levels[chosen], slopes[chosen], rates, centres, components, upstream[chosen], *made,
            g_rates[i],
        )  # fmt: skip
        g_levels[chosen], g_slopes[chosen] = made

    def one(i: int, part: slice) -> None:
        strange = _strange(levels[part], slopes[part], rates) + part.start
        if not len(strange):
            kernel(i, part)
            return
        kernel(i, np.setdiff1d(np.arange(len(levels))[part], strange))
        of_frames = (values[strange] for values in (levels, slopes, upstream))
        plain = _plain_gradients(*map(torch.from_numpy, (*of_frames, rates, centres, components)))
        g_levels[strange], g_slopes[strange] = plain[0].numpy(), plain[1].numpy()
        g_rates[i] += plain[2].numpy()

    _over_frames(one, len(levels), ITEM_FRAMES)
    return (
        torch.from_numpy(g_levels),
        torch.from_numpy(g_slopes),
        torch.from_numpy(g_rates.sum(0)),
    )


@part
def _is_finite(number: float) -> bool:
    return number - number == 0.0


@part
def _all_finite(rate: Any, count: int) -> bool:
    for k in range(count):
        if not _is_finite(rate[k]):
            return False
    return True


@part
def _gpu_present(
    intensity: Any, slope: Any, f_hz: Any, components: int, fine: bool, where: Any, i: Any, s: Any,
    f: Any,
) -> int:  # fmt: skip
    """Gather components like `_present`, but keep silent ones if NaN could reach a sum."""
    count = 0
    for j in range(components):
        silent = intensity[j] == 0 and _is_finite(intensity[j]) and _is_finite(slope[j])
        if not (fine and silent):
            where[count] = float(j)
            i[count], s[count], f[count] = intensity[j], slope[j], f_hz[j]
            count += 1
    for j in range(count, count + (-count) % LANES):
        i[j], s[j], f[j] = 0.0, 0.0, f_hz[components - 1]
    return count


@part
def gpu_item(
    item: int, frames: int, components: int, filters: int, intensity: Any, slope: Any, rate: Any,
    fc_hz: Any, f_hz: Any, out: Any, size: int, room: Any,
) -> None:  # fmt: skip
    """Compute ITEM_FRAMES frames on a GPU; `room` has 4 rows of `size` numbers."""
    where, i, s, f = room, room[size:], room[2 * size :], room[3 * size :]
    rate, fc_hz = rate[:filters], fc_hz[:filters]
    fine = _all_finite(rate, filters)
    for n in range(item * ITEM_FRAMES, min((item + 1) * ITEM_FRAMES, frames)):
        at = n * components
        count = _gpu_present(intensity[at:], slope[at:], f_hz, components, fine, where, i, s, f)
        _skirts(count, i, s, f, rate, fc_hz, out[n * filters :])


@part
def gpu_adjoint_item(
    item: int, frames: int, components: int, filters: int, intensity: Any, slope: Any, rate: Any,
    fc_hz: Any, f_hz: Any, gout: Any, gintensity: Any, gslope: Any, grate: Any, size: int,
    room: Any,
) -> None:  # fmt: skip
    """Compute gradients of ITEM_FRAMES frames on a GPU; `room` has 6 rows of `size` numbers."""
    where, i, s, f = room, room[size:], room[2 * size :], room[3 * size :]
    gi, gs = room[4 * size :], room[5 * size :]
    rate, fc_hz = rate[:filters], fc_hz[:filters]
    fine, lane = _all_finite(rate, filters), lane_id()
    for n in range(item * ITEM_FRAMES, min((item + 1) * ITEM_FRAMES, frames)):
        at = n * components
        count = _gpu_present(intensity[at:], slope[at:], f_hz, components, fine, where, i, s, f)
        for j in range(lane, count + LANES, LANES):
            gi[j] = gs[j] = 0.0
        _skirts_adjoint(
            count, i, s, f, rate, fc_hz, gout[n * filters :], gi, gs, grate[item * filters :]
        )
        for j in range(lane, count, LANES):
            gintensity[at + int(where[j])] = gi[j]
            gslope[at + int(where[j])] = gs[j]


def _gpu(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    (frames, components), filters = intensity.shape, len(rate)
    out, size = intensity.new_empty(frames, filters), components + 2 * LANES
    given = [t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz)]
    items = -(-frames // ITEM_FRAMES) if filters else 0
    device.run_items(gpu_item, items, frames, components, filters, *given, out, size, room=4 * size)
    return out


def _gpu_adjoint(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
    gout: Tensor,
) -> Gradients:  # fmt: skip
    (frames, components), filters = intensity.shape, len(rate)
    g_intensity = torch.zeros_like(intensity, memory_format=torch.contiguous_format)
    g_slope, size = torch.zeros_like(g_intensity), components + 2 * LANES
    g_rate = rate.new_zeros(-(-frames // ITEM_FRAMES), filters)
    given = [t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz, gout)]
    device.run_items(
        gpu_adjoint_item, len(g_rate) if filters else 0, frames, components, filters, *given,
        g_intensity, g_slope, g_rate, size, room=6 * size,
    )  # fmt: skip
    return g_intensity, g_slope, g_rate.sum(0)


def _check(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> None:
    """Check shapes and dtypes; the kernel does not check bounds."""
    components = (intensity.shape[0], f_hz.shape[0])
    if tuple(intensity.shape) != components or tuple(slope.shape) != components:
        raise ShapeError(
            f"expected intensity and slope (frame, {f_hz.shape[0]} components), got "
            f"{tuple(intensity.shape)} and {tuple(slope.shape)}"
        )
    if rate.ndim != 1 or rate.shape != fc_hz.shape:
        raise ShapeError(
            f"expected one rate a filter, got {tuple(rate.shape)} for {tuple(fc_hz.shape)} filters"
        )
    kinds = {t.dtype for t in (intensity, slope, rate, fc_hz, f_hz)}
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.float64}:
        raise ShapeError(
            "intensity, slope, rate and frequencies must share one dtype, float32 or float64; got "
            f"{', '.join(sorted(map(str, kinds)))}"
        )


def _fake(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> Tensor:
    return intensity.new_empty(intensity.shape[0], rate.shape[0])


def _fake_adjoint(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor, gout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(intensity), torch.empty_like(slope), torch.empty_like(rate)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


LOWER_SKIRT_ADJOINT = RowOperation(
    name="lower_skirt_adjoint",
    cpu=_cpu_adjoint,
    gpu=_gpu_adjoint,
    fake=_fake_adjoint,
    batched=None,
)
LOWER_SKIRT = RowOperation(
    name="lower_skirt",
    cpu=_cpu,
    gpu=_gpu,
    fake=_fake,
    reference=reference,
    check=_check,
    keep=_keep,
    backward=lambda ctx, run, gout: (
        *run(LOWER_SKIRT_ADJOINT, *ctx.saved_tensors, gout),
        None,
        None,
    ),
    batched=(0, 1),
)
