"""Operator of the attack-release family: `amtcore::attack_release` and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.families.attack_release import reference
from amtcore.kernels.families.attack_release.cpu import (
    run_attack_release,
    run_attack_release_adjoint,
)
from amtcore.kernels.ops.autograd import as_adjoint, with_adjoint
from amtcore.kernels.ops.dispatch import use_reference
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

Gradients = tuple[Tensor, Tensor, Tensor]


def _padded(values: Tensor) -> NDArray[Any]:
    """Flat rows of whole lane groups, (.., channel) -> (.., group LANES); the filling is zero."""
    missing = -values.shape[-1] % LANES
    rows = torch.nn.functional.pad(values.detach(), (0, missing))
    # A copy in every case: states are changed in place.
    return np.array(rows.numpy(), order="C")


def _cut(rows: NDArray[Any], channels: int) -> Tensor:
    return torch.from_numpy(rows)[..., :channels].contiguous()


@torch.library.custom_op("amtcore::attack_release", mutates_args=(), device_types="cpu")
def _attack_release(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    batch, frames, channels = x.shape
    rows, rates, last = _padded(x), _padded(coef.T).ravel(), _padded(state)
    width = last.shape[1]
    out, groups = np.empty_like(rows), width // LANES

    def one(item: int) -> None:
        b, g = divmod(item, groups)
        run_attack_release(rows[b].ravel(), out[b].reshape(-1), frames, width, g, rates, last[b])

    parallel_for(one, batch * groups)
    return _cut(out, channels), _cut(last, channels)


@_attack_release.register_fake
def _(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("amtcore::attack_release_adjoint", mutates_args=(), device_types="cpu")
def _adjoint(
    x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    batch, frames, channels = x.shape
    rows, outs, upstream = _padded(x), _padded(y), _padded(gy)
    rates, first, g_state = _padded(coef.T).ravel(), _padded(state), _padded(gstate)
    width = first.shape[1]
    g_rows, groups = np.empty_like(rows), width // LANES
    g_rates = np.zeros((batch, 2 * width), rows.dtype)

    def one(item: int) -> None:
        b, g = divmod(item, groups)
        run_attack_release_adjoint(
            rows[b].ravel(), outs[b].ravel(), upstream[b].ravel(), g_rows[b].reshape(-1), frames,
            width, g, rates, g_rates[b], first[b], g_state[b],
        )  # fmt: skip

    parallel_for(one, batch * groups)
    g_coef = _cut(g_rates.reshape(batch, 2, width), channels).sum(0).T.contiguous()
    return _cut(g_rows, channels), g_coef, _cut(g_state, channels)


@_adjoint.register_fake
def _(x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor) -> Gradients:
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(state)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _backward(ctx: Any, gy: Tensor, gstate: Tensor) -> Gradients:
    gradients: Gradients = _adjoint_op(*ctx.saved_tensors, gy, gstate)
    return gradients


_adjoint_op = as_adjoint(_adjoint)
_differentiable = with_adjoint(_attack_release, _keep, _backward, (0, 2))


def attack_release(
    x: Tensor, coef: Tensor, state: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attack and release; arguments as in `reference.attack_release`."""
    _check(x, coef, state)
    if use_reference(x, backend):
        return reference.attack_release(x, coef, state)
    return _differentiable(x, coef, state)


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Shapes and dtypes that the kernel relies on; it does not check bounds."""
    if x.ndim != 3 or coef.ndim != 2 or tuple(coef.shape) != (x.shape[-1], 2):
        raise ShapeError(
            "expected input (batch, frame, channel) and coefficients (channel, 2), got "
            f"{tuple(x.shape)} and {tuple(coef.shape)}"
        )
    wanted = (x.shape[0], x.shape[2])
    if tuple(state.shape) != wanted:
        raise ShapeError(f"expected a state of shape {wanted}, got {tuple(state.shape)}")
    if not x.dtype == coef.dtype == state.dtype or x.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            "input, coefficients and state must share one dtype, float32 or float64; got "
            f"{x.dtype}, {coef.dtype}, {state.dtype}"
        )
