"""Operators of the one-pole family: `amtcore::one_pole_cascade`, `amtcore::pole_zero_cascade` and
`amtcore::modulation_bank`."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.one_pole import reference
from amtcore.kernels.fused.filters import FILTER_COEFS
from amtcore.kernels.fused.operations import ONE_POLE_CASCADE, POLE_ZERO_CASCADE
from amtcore.kernels.fused.runner import filter_states
from amtcore.kernels.ops.autograd import differentiate
from amtcore.kernels.ops.dispatch import check_recurrence, use_reference


@torch.library.custom_op("amtcore::one_pole_cascade", mutates_args=(), device_types=DEVICES)
def _cascade(x: Tensor, coef: Tensor, state: Tensor, order: int) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(ONE_POLE_CASCADE, order, x, coef, state)


@torch.library.custom_op("amtcore::pole_zero_cascade", mutates_args=(), device_types=DEVICES)
def _pole_zero(x: Tensor, coef: Tensor, state: Tensor, order: int) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_op(POLE_ZERO_CASCADE, order, x, coef, state)


@torch.library.custom_op("amtcore::modulation_bank", mutates_args=(), device_types=DEVICES)
def _bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_bank(x, coef, state, kinds, offsets)


@_bank.register_fake
def _(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], offsets[-1], x.shape[2]), torch.empty_like(state)


_cascade_op = differentiate(_cascade, ONE_POLE_CASCADE, lambda constants, state: constants[0])
_pole_zero_op = differentiate(_pole_zero, POLE_ZERO_CASCADE, lambda constants, state: constants[0])
_bank_op = differentiate(_bank, None)


def one_pole_cascade(
    x: Tensor, coef: Tensor, state: Tensor, order: int, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Cascade of equal complex one-pole sections; arguments as in `reference.one_pole_cascade`."""
    check_recurrence(x, coef, state, 3, 2 * order)
    if use_reference(x, backend):
        return reference.one_pole_cascade(x, coef, state, order)
    return _cascade_op(x, coef, state, order)


def pole_zero_cascade(
    x: Tensor, coef: Tensor, state: Tensor, order: int, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Cascade of equal real pole-zero sections; arguments as in `reference.pole_zero_cascade`."""
    check_recurrence(x, coef, state, 3, 2 * order)
    if use_reference(x, backend):
        return reference.pole_zero_cascade(x, coef, state, order)
    return _pole_zero_op(x, coef, state, order)


def modulation_bank(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    kinds: list[int],
    offsets: list[int],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Modulation filters of every channel; arguments as in `reference.modulation_bank`."""
    coefs = FILTER_COEFS * (2 if reference.TWO_SECTIONS in kinds else 1)
    check_recurrence(x[:, :1], coef, state, coefs, filter_states(coefs))
    if use_reference(x, backend):
        return reference.modulation_bank(x, coef, state, kinds, offsets)
    return _bank_op(x, coef, state, kinds, offsets)
