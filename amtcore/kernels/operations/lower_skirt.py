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

from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.operation import Device, RowOperation, empty_gradients, keep_all
from amtcore.kernels.vector.arrays import groups_of
from amtcore.kernels.vector.elementary import LOG2_E, vdecay, vexp
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.simd import (
    LANES,
    accumulate,
    add_once,
    fma,
    lane_id,
    lanes_are_threads,
    vload,
    vmax,
    vsplat,
    vstore,
    vsum,
    where_greater,
)

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


@part
def _is_finite(number: float) -> bool:
    return number - number == 0.0


@part
def _all_finite(rate: Any) -> bool:
    for k in range(rate.shape[0]):
        if not _is_finite(rate[k]):
            return False
    return True


@part
def _present(
    intensity: Any, slope: Any, f_hz: Any, fine: bool, where: Any, i: Any, s: Any, f: Any
) -> int:
    """Gather the components of nonzero intensity, and their indices in `where`; return the count.

    Silent components stay if NaN could reach a sum: unless `fine`, or with a slope that is not
    finite. The last vector is padded with silence at a high frequency.
    """
    count = 0
    for j in range(f_hz.shape[0]):
        if not (fine and intensity[j] == 0 and _is_finite(slope[j])):
            where[count] = float(j)
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


#: Frames of one work item. On a CPU larger items are faster where no gradients of rates are summed.
ITEM_FRAMES, _FORWARD_FRAMES = 16, 64


@kernel
def lower_skirt_item(
    item: int, frames: int, components: int, filters: int, intensity: Any, slope: Any, rate: Any,
    fc_hz: Any, f_hz: Any, out: Any, some: int, size: int, room: Any,
) -> None:  # fmt: skip
    """Compute `some` frames of flat arrays; `room` has 4 rows of `size` numbers."""
    where, i, s, f = room, room[size:], room[2 * size :], room[3 * size :]
    rate, fc_hz, f_hz = rate[:filters], fc_hz[:filters], f_hz[:components]
    fine = _all_finite(rate)
    for n in range(item * some, min((item + 1) * some, frames)):
        at = n * components
        count = _present(intensity[at:], slope[at:], f_hz, fine, where, i, s, f)
        _skirts(count, i, s, f, rate, fc_hz, out[n * filters :])


@kernel
def lower_skirt_adjoint_item(
    item: int, frames: int, components: int, filters: int, intensity: Any, slope: Any, rate: Any,
    fc_hz: Any, f_hz: Any, gout: Any, gintensity: Any, gslope: Any, grate: Any, size: int,
    room: Any,
) -> None:  # fmt: skip
    """Compute gradients of ITEM_FRAMES frames; `room` has 6 rows of `size` numbers.

    `gintensity` and `gslope` are zero before; `grate` (item, filter) is added to.
    """
    where, i, s, f = room, room[size:], room[2 * size :], room[3 * size :]
    gi, gs = room[4 * size :], room[5 * size :]
    rate, fc_hz, f_hz = rate[:filters], fc_hz[:filters], f_hz[:components]
    fine, zero, step = _all_finite(rate), vsplat(room, 0.0), LANES if lanes_are_threads() else 1
    for n in range(item * ITEM_FRAMES, min((item + 1) * ITEM_FRAMES, frames)):
        at = n * components
        count = _present(intensity[at:], slope[at:], f_hz, fine, where, i, s, f)
        for j in range(0, count, LANES):
            vstore(gi, j, zero)
            vstore(gs, j, zero)
        _skirts_adjoint(
            count, i, s, f, rate, fc_hz, gout[n * filters :], gi, gs, grate[item * filters :]
        )
        for j in range(lane_id(), count, step):
            gintensity[at + int(where[j])] = gi[j]
            gslope[at + int(where[j])] = gs[j]


def _strange(device: Device, intensity: Tensor, slope: Tensor, rate: Tensor) -> Tensor:
    """Return (frame,), True for frames with non-finite numbers on a CPU.

    The plain form computes these frames: the kernel's exponential ends earlier, so that it has NaN
    in other places. A GPU does not wait for this question.
    """
    none = torch.zeros(len(intensity), dtype=torch.bool, device=intensity.device)
    if device.name != "cpu" or bool(torch.isfinite(intensity.sum() + slope.sum() + rate.sum())):
        return none
    fine = torch.isfinite(intensity).all(1) & torch.isfinite(slope).all(1)
    return ~(fine & torch.isfinite(rate).all())


def _run(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    (frames, components), filters = intensity.shape, len(rate)
    out, size = intensity.new_empty(frames, filters), (groups_of(components) + 1) * LANES
    given = [t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz)]
    some = _FORWARD_FRAMES if device.name == "cpu" else ITEM_FRAMES
    device.run_items(
        lower_skirt_item, -(-frames // some) if filters else 0, frames, components, filters, *given,
        out, some, size, room=4 * size,
    )  # fmt: skip
    strange = _strange(device, *given[:3])
    if device.name == "cpu" and bool(strange.any()):
        out[strange] = reference(given[0][strange], given[1][strange], *given[2:])
    return out


def _run_adjoint(
    device: Device, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
    gout: Tensor,
) -> Gradients:  # fmt: skip
    (frames, components), filters = intensity.shape, len(rate)
    g_intensity = torch.zeros_like(intensity, memory_format=torch.contiguous_format)
    g_slope, size = torch.zeros_like(g_intensity), (groups_of(components) + 1) * LANES
    given = [t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz, gout)]
    strange = _strange(device, *given[:3])
    if device.name == "cpu" and bool(strange.any()):
        leaves = [t.requires_grad_() for t in (given[0][strange], given[1][strange], rate.detach())]
        with torch.enable_grad():
            out = reference(*leaves, *given[3:5])
        plain = torch.autograd.grad(out, leaves, gout[strange])
        levels, slopes, upstream = (given[k][~strange] for k in (0, 1, 5))
        made = _run_adjoint(device, levels, slopes, rate, fc_hz, f_hz, upstream)
        for total, of_strange, of_fine in zip((g_intensity, g_slope), plain, made, strict=False):
            total[strange], total[~strange] = of_strange, of_fine
        return g_intensity, g_slope, plain[2] + made[2]
    g_rate = rate.new_zeros(-(-frames // ITEM_FRAMES), filters)
    device.run_items(
        lower_skirt_adjoint_item, len(g_rate) if filters else 0, frames, components, filters,
        *given, g_intensity, g_slope, g_rate, size, room=6 * size,
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


LOWER_SKIRT_ADJOINT = RowOperation(
    name="lower_skirt_adjoint", run=_run_adjoint, fake=empty_gradients, batched=None
)
LOWER_SKIRT = RowOperation(
    name="lower_skirt",
    run=_run,
    fake=lambda x, slope, rate, fc_hz, f_hz: x.new_empty(x.shape[0], rate.shape[0]),
    reference=reference,
    check=_check,
    keep=keep_all,
    backward=lambda ctx, run, g: (*run(LOWER_SKIRT_ADJOINT, *ctx.saved_tensors, g), None, None),
    batched=(0, 1),
)
