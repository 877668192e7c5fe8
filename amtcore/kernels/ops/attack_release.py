"""Operator of the attack-release family: `amtcore::attack_release` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.attack_release import reference, runner
from amtcore.kernels.ops.autograd import as_adjoint, with_adjoint
from amtcore.kernels.ops.dispatch import use_reference

Gradients = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("amtcore::attack_release", mutates_args=(), device_types=DEVICES)
def _attack_release(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return backend_of(x).attack_release(x, coef, state)


@_attack_release.register_fake
def _(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("amtcore::attack_release_adjoint", mutates_args=(), device_types=DEVICES)
def _adjoint(
    x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    return backend_of(x).attack_release_adjoint(x, coef, state, y, gy, gstate)


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


def attack_release_rows(rows: Tensor, coef: Tensor, state: Tensor) -> Tensor:
    """The same in place, for numbers alone; see `runner.forward_rows`. Returns the state."""
    wanted = (rows.shape[0], coef.shape[0])
    if tuple(state.shape) != wanted:
        raise ShapeError(f"expected a state of shape {wanted}, got {tuple(state.shape)}")
    return runner.forward_rows(rows, coef, state)


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
