"""Attack and release (Glasberg and Moore 2002).

    y[t] = y[t-1] + c (x[t] - y[t-1]),   c = attack where x[t] > y[t-1], else release

In this form of y[t] = c x[t] + (1 - c) y[t-1] a steady input is an exact fixed point.

The channel axis is contiguous, since frames are few and channels many. A frame of LANES channels is
one load, and the output stays in registers from frame to frame. Rows are padded to whole groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.operation import Device, RowOperation, check_tensors, empty_gradients
from amtcore.kernels.vector.arrays import groups_of
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.simd import LANES, fma, vload, vsplat, vstore, where_greater
from amtcore.kernels.vector.threads import parallel_for

Gradients = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Smooth every channel.

    Args:
        x: (batch, frame, channel).
        coef: (channel, 2): attack and release, 0..1.
        state: (batch, channel): the output before the first frame.
    Returns:
        y (batch, frame, channel) and the state after the last frame.
    """
    attack, release = coef.unbind(-1)
    y, frames = state, []
    for frame in x.unbind(1):
        y = y + torch.where(frame > y, attack, release) * (frame - y)
        frames.append(y)
    return (torch.stack(frames, 1) if frames else x.clone()), y.clone()


@kernel
def attack_release_item(
    item: int, groups: int, frames: int, x: Any, y: Any, coef: Any, state: Any
) -> None:
    """Smooth one clip's group of lanes.

    Arrays are flat: x, y (clip, frame, row), coef (2, row): attack, release, and state (clip, row),
    which is changed in place.
    """
    row, clip, lane = groups * LANES, item // groups, item % groups * LANES
    attack, release = vload(coef, lane), vload(coef, row + lane)
    first = clip * frames * row + lane
    level = vload(state, clip * row + lane)
    for t in range(frames):
        at = first + t * row
        value = vload(x, at)
        rate = where_greater(value, level, attack, release)
        level = fma(rate, value - level, level)
        vstore(y, at, level)
    vstore(state, clip * row + lane, level)


@kernel
def attack_release_adjoint_item(
    item: int, groups: int, frames: int, x: Any, y: Any, gy: Any, gx: Any, coef: Any, gcoef: Any,
    state: Any, gstate: Any,
) -> None:  # fmt: skip
    """Gradients of one clip's group of lanes, backwards in time, from the outputs `y`.

    With l the gradient of y[t] and c the rate that was used: gx = c l, gc += l (x - y[t-1]),
    and the gradient of y[t-1] is gy[t-1] + (1 - c) l.
    `gstate` enters as the gradient of the last state and leaves as the gradient of the first;
    gcoef is (clip, 2, row), other arrays are as above.
    """
    row, clip, lane = groups * LANES, item // groups, item % groups * LANES
    attack, release = vload(coef, lane), vload(coef, row + lane)
    zero, first, end = vsplat(coef, 0.0), clip * frames * row + lane, clip * row + lane
    g_attack, g_release, later = zero, zero, vload(gstate, end)
    for t in range(frames - 1, -1, -1):
        at = first + t * row
        total = vload(gy, at) + later
        before = vload(state, end) if t == 0 else vload(y, at - row)
        value = vload(x, at)
        rate = where_greater(value, before, attack, release)
        g_rate = total * (value - before)
        g_attack = g_attack + where_greater(value, before, g_rate, zero)
        g_release = g_release + where_greater(value, before, zero, g_rate)
        vstore(gx, at, rate * total)
        later = fma(zero - rate, total, total)
    vstore(gstate, end, later)
    vstore(gcoef, clip * row + end, g_attack)
    vstore(gcoef, (clip + 1) * row + end, g_release)


def _padded(values: Tensor) -> Tensor:
    """Pad rows to whole lane groups, (.., channel) -> (.., group LANES), in new memory."""
    missing = -values.shape[-1] % LANES
    return torch.nn.functional.pad(values.detach(), (0, missing)).clone(
        memory_format=torch.contiguous_format
    )


def _compute(device: Device, x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    (batch, frames, channels), groups = x.shape, groups_of(x.shape[2])
    rows, rates, last = _padded(x), _padded(coef.T), _padded(state)
    out = torch.empty_like(rows)
    device.run_items(attack_release_item, batch * groups, groups, frames, rows, out, rates, last)
    return out[..., :channels].contiguous(), last[..., :channels].contiguous()


def _compute_adjoint(
    device: Device, x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    (batch, frames, channels), groups = x.shape, groups_of(x.shape[2])
    rows, outs, upstream, rates = _padded(x), _padded(y), _padded(gy), _padded(coef.T)
    first, g_state, g_rows = _padded(state), _padded(gstate), torch.empty_like(rows)
    g_rates = rates.new_zeros(batch, *rates.shape)
    device.run_items(
        attack_release_adjoint_item, batch * groups, groups, frames, rows, outs, upstream, g_rows,
        rates, g_rates, first, g_state,
    )  # fmt: skip
    g_coef = g_rates[..., :channels].sum(0).T.contiguous()
    return g_rows[..., :channels].contiguous(), g_coef, g_state[..., :channels].contiguous()


def smooth_rows(rows: Tensor, coef: Tensor, state: Tensor) -> Tensor:
    """Smooth rows in place on the CPU, without gradients; return the state.

    Rows are padded with zeros to whole vectors of channels; other arguments as in `reference`.
    """
    check_tensors(rows, coef, state, (rows.shape[0], coef.shape[0]))
    (batch, frames, width), last = rows.shape, _padded(state)
    groups, flat = width // LANES, rows.numpy().reshape(-1)
    given = groups, frames, flat, flat, _padded(coef.T).numpy().ravel(), last.numpy().ravel()
    parallel_for(lambda item: attack_release_item(item, *given), batch * groups)
    return last[..., : coef.shape[0]].contiguous()


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Check shapes and dtypes; the kernel does not check bounds."""
    if x.ndim != 3 or coef.ndim != 2 or tuple(coef.shape) != (x.shape[-1], 2):
        raise ShapeError(
            "expected input (batch, frame, channel) and coefficients (channel, 2), got "
            f"{tuple(x.shape)} and {tuple(coef.shape)}"
        )
    check_tensors(x, coef, state, (x.shape[0], x.shape[2]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, output[0])


ATTACK_RELEASE_ADJOINT = RowOperation(
    name="attack_release_adjoint",
    run=_compute_adjoint,
    fake=empty_gradients,
    batched=None,
)
ATTACK_RELEASE = RowOperation(
    name="attack_release",
    run=_compute,
    fake=lambda x, coef, state: (torch.empty_like(x), torch.empty_like(state)),
    reference=reference,
    check=_check,
    keep=_keep,
    backward=lambda ctx, run, gy, gstate: run(
        ATTACK_RELEASE_ADJOINT, *ctx.saved_tensors, gy, gstate
    ),
    batched=(0, 2),
)
