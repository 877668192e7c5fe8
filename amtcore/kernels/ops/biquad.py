"""Operators of the section family: `amtcore::first_order`, `amtcore::state_variable`."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.biquad import reference
from amtcore.kernels.fused.operations import FIRST_ORDER, STATE_VARIABLE
from amtcore.kernels.ops.autograd import differentiate
from amtcore.kernels.ops.dispatch import check_recurrence, use_reference


@torch.library.custom_op("amtcore::first_order", mutates_args=(), device_types=DEVICES)
def _first(x: Tensor, coef: Tensor, state: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(FIRST_ORDER, int(rectify), x, coef, state)


@torch.library.custom_op("amtcore::state_variable", mutates_args=(), device_types=DEVICES)
def _second(x: Tensor, coef: Tensor, state: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(STATE_VARIABLE, int(rectify), x, coef, state)


_first_op = differentiate(_first, FIRST_ORDER, lambda constants, state: int(constants[0]))
_second_op = differentiate(_second, STATE_VARIABLE, lambda constants, state: int(constants[0]))


def first_order(
    x: Tensor, coef: Tensor, state: Tensor, rectify: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """First-order section, after half-wave rectification if asked; see `reference.first_order`."""
    check_recurrence(x, coef, state, 3, 1)
    if use_reference(x, backend):
        return reference.first_order(x, coef, state, rectify)
    return _first_op(x, coef, state, rectify)


def state_variable(
    x: Tensor, coef: Tensor, state: Tensor, rectify: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Second-order section in state-variable form; see `reference.state_variable`."""
    check_recurrence(x, coef, state, 6, 2)
    if use_reference(x, backend):
        return reference.state_variable(x, coef, state, rectify)
    return _second_op(x, coef, state, rectify)
