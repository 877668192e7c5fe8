"""Operator of the compression family: `amtcore::broken_stick`. It has no state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.compression import reference
from amtcore.kernels.fused.operations import BROKEN_STICK
from amtcore.kernels.ops.autograd import recurrence_adjoint, with_adjoint
from amtcore.kernels.ops.dispatch import check_recurrence, use_reference


def _no_state(x: Tensor, coef: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], coef.shape[0], 0)


@torch.library.custom_op("amtcore::broken_stick", mutates_args=(), device_types=DEVICES)
def _broken_stick(x: Tensor, coef: Tensor) -> Tensor:
    return backend_of(x).run_op(BROKEN_STICK, 0, x, coef, _no_state(x, coef))[0]


@_broken_stick.register_fake
def _(x: Tensor, coef: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], coef.shape[0], x.shape[2])


def _backward(context: Any, gy: Tensor) -> tuple[Tensor, Tensor]:
    x, coef = context.saved_tensors
    none = _no_state(x, coef)
    gx, gcoef, _ = recurrence_adjoint(BROKEN_STICK, 0, x, coef, none, gy, none)
    return gx, gcoef


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_differentiable = with_adjoint(_broken_stick, _keep, _backward, (0,))


def broken_stick(x: Tensor, coef: Tensor, backend: str | None = None) -> Tensor:
    """Broken-stick compression of every sample; arguments as in `reference.broken_stick`."""
    check_recurrence(x, coef, _no_state(x, coef), 4, 0)
    if use_reference(x, backend):
        return reference.broken_stick(x, coef)
    return _differentiable(x, coef)
