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
from amtcore.kernels.operation import Device, RowOperation, check_tensors
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.lanes import groups_of
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


#: Frames that all groups of lanes take before the next ones: 160 kB of 320 channels.
_BLOCK_FRAMES = 128


@part
def _smooth(x: Any, y: Any, frames: int, row: int, g: int, coef: Any, state: Any) -> None:
    """Smooth lanes g LANES .. of `frames` flat rows of `row` numbers.

    coef flat (2, row): attack, release; state flat (row,), changed in place.
    """
    at = g * LANES
    attack, release = vload(coef, at), vload(coef, row + at)
    level = vload(state, at)
    for t in range(frames):
        value = vload(x, t * row + at)
        rate = where_greater(value, level, attack, release)
        level = fma(rate, value - level, level)
        vstore(y, t * row + at, level)
    vstore(state, at, level)


@part
def _smooth_adjoint(
    x: Any, y: Any, gy: Any, gx: Any, frames: int, row: int, g: int, coef: Any, gcoef: Any,
    state: Any, gstate: Any,
) -> None:  # fmt: skip
    """Gradients of one group of lanes, backwards in time, from the outputs `y`.

    With l the gradient of y[t] and c the rate that was used: gx = c l, gc += l (x - y[t-1]),
    and the gradient of y[t-1] is gy[t-1] + (1 - c) l.
    `gstate` enters as the gradient of the last state and leaves as the gradient of the first.
    """
    at = g * LANES
    attack, release = vload(coef, at), vload(coef, row + at)
    zero = vsplat(coef, 0.0)
    g_attack, g_release, later = zero, zero, vload(gstate, at)
    for t in range(frames - 1, -1, -1):
        total = vload(gy, t * row + at) + later
        before = vload(state, at) if t == 0 else vload(y, (t - 1) * row + at)
        value = vload(x, t * row + at)
        rate = where_greater(value, before, attack, release)
        g_rate = total * (value - before)
        g_attack = g_attack + where_greater(value, before, g_rate, zero)
        g_release = g_release + where_greater(value, before, zero, g_rate)
        vstore(gx, t * row + at, rate * total)
        later = fma(zero - rate, total, total)
    vstore(gstate, at, later)
    vstore(gcoef, at, g_attack)
    vstore(gcoef, row + at, g_release)


@kernel
def _run_all_lanes(x: Any, frames: int, row: int, coef: Any, state: Any) -> None:
    """Smooth all groups of lanes in place, a few frames at a time, to read rows in order."""
    for begin in range(0, frames, _BLOCK_FRAMES):
        part, count = x[begin * row :], min(_BLOCK_FRAMES, frames - begin)
        for g in range(row // LANES):
            _smooth(part, part, count, row, g, coef, state)


@kernel
def attack_release_item(
    item: int, groups: int, frames: int, x: Any, y: Any, coef: Any, state: Any
) -> None:
    """Smooth one clip's group of lanes; x, y (clip, frame, row), state (clip, row)."""
    row, clip = groups * LANES, item // groups
    at = clip * frames * row
    _smooth(x[at:], y[at:], frames, row, item % groups, coef, state[clip * row :])


@kernel
def attack_release_adjoint_item(
    item: int, groups: int, frames: int, x: Any, y: Any, gy: Any, gx: Any, coef: Any, gcoef: Any,
    state: Any, gstate: Any,
) -> None:  # fmt: skip
    """Compute the gradients of one clip's group of lanes; gcoef (clip, 2, row)."""
    row, clip = groups * LANES, item // groups
    at = clip * frames * row
    _smooth_adjoint(
        x[at:], y[at:], gy[at:], gx[at:], frames, row, item % groups, coef, gcoef[2 * clip * row :],
        state[clip * row :], gstate[clip * row :],
    )  # fmt: skip


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

    Args:
        rows: (batch, frame, channel), padded with zeros to whole vectors of channels.
        coef: (channel, 2).
        state: (batch, channel).
    """
    check_tensors(rows, coef, state, (rows.shape[0], coef.shape[0]))
    batch, frames, width = rows.shape
    rates, last = _padded(coef.T).numpy().ravel(), _padded(state)
    signals, states = rows.numpy().reshape(batch, -1), last.numpy()

    def one(b: int) -> None:
        _run_all_lanes(signals[b], frames, width, rates, states[b])

    parallel_for(one, batch)
    return last[..., : coef.shape[0]].contiguous()


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Check shapes and dtypes; the kernel does not check bounds."""
    if x.ndim != 3 or coef.ndim != 2 or tuple(coef.shape) != (x.shape[-1], 2):
        raise ShapeError(
            "expected input (batch, frame, channel) and coefficients (channel, 2), got "
            f"{tuple(x.shape)} and {tuple(coef.shape)}"
        )
    check_tensors(x, coef, state, (x.shape[0], x.shape[2]))


def _fake(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


def _fake_adjoint(
    x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(state)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, output[0])


ATTACK_RELEASE_ADJOINT = RowOperation(
    name="attack_release_adjoint",
    cpu=_compute_adjoint,
    gpu=_compute_adjoint,
    fake=_fake_adjoint,
    batched=None,
)
ATTACK_RELEASE = RowOperation(
    name="attack_release",
    cpu=_compute,
    gpu=_compute,
    fake=_fake,
    reference=reference,
    check=_check,
    keep=_keep,
    backward=lambda ctx, run, gy, gstate: run(
        ATTACK_RELEASE_ADJOINT, *ctx.saved_tensors, gy, gstate
    ),
    batched=(0, 2),
)
