"""Operator of the hair-cell family: `amtcore::hair_cell`."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.hair_cell import reference
from amtcore.kernels.fused.operations import HAIR_CELL
from amtcore.kernels.ops.autograd import differentiate
from amtcore.kernels.ops.dispatch import check_recurrence, use_reference


@torch.library.custom_op("amtcore::hair_cell", mutates_args=(), device_types=DEVICES)
def _hair_cell(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(HAIR_CELL, 0, x, coef, state)


_differentiable = differentiate(_hair_cell, HAIR_CELL)


def hair_cell(
    x: Tensor, coef: Tensor, state: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Receptor potential above rest; arguments as in `reference.hair_cell`."""
    check_recurrence(x, coef, state, 9, 1)
    if use_reference(x, backend):
        return reference.hair_cell(x, coef, state)
    return _differentiable(x, coef, state)
