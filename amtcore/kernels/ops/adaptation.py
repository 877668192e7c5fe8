"""Operator of the adaptation family: `amtcore::adaptation`."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.adaptation import reference
from amtcore.kernels.fused.operations import ADAPTATION
from amtcore.kernels.ops.autograd import differentiate
from amtcore.kernels.ops.dispatch import check_recurrence, use_reference


@torch.library.custom_op("amtcore::adaptation", mutates_args=(), device_types=DEVICES)
def _adaptation(x: Tensor, coef: Tensor, state: Tensor, limit: bool) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(ADAPTATION, 2 * state.shape[2] + int(limit), x, coef, state)


_differentiable = differentiate(
    _adaptation, ADAPTATION, lambda constants, state: 2 * state.shape[2] + int(constants[0])
)


def adaptation(
    x: Tensor, coef: Tensor, state: Tensor, limit: bool, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Adaptation loops; arguments as in `reference.adaptation`."""
    check_recurrence(x, coef, state, 3 + 3 * state.shape[2], state.shape[2])
    if use_reference(x, backend):
        return reference.adaptation(x, coef, state, limit)
    return _differentiable(x, coef, state, limit)
