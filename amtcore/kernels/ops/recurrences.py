"""Block operations as torch runs them: one operator each, or all of them in one pass.

A stage says once what its recurrences are, as `BlockOp`s. The fused kernel takes them as they are;
`run_ops` gives their outputs at full rate, with gradients where they may be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.fused.operations import (
    ADAPTATION,
    ADD,
    BROKEN_STICK,
    FIRST_ORDER,
    HAIR_CELL,
    ONE_POLE_CASCADE,
    POLE_ZERO_CASCADE,
    SAVE,
    SQUARE,
    STATE_VARIABLE,
    SWAP,
    get_operation,
)
from amtcore.kernels.fused.program import BlockOp
from amtcore.kernels.ops.adaptation import adaptation
from amtcore.kernels.ops.biquad import first_order, state_variable
from amtcore.kernels.ops.compression import broken_stick
from amtcore.kernels.ops.dispatch import use_reference
from amtcore.kernels.ops.hair_cell import hair_cell
from amtcore.kernels.ops.one_pole import one_pole_cascade, pole_zero_cascade
from amtcore.kernels.ops.program import can_fuse, program

#: (x, coef, state, argument, backend) -> (y, state).
Recurrence = Callable[[Tensor, Tensor, Tensor, int, str | None], tuple[Tensor, Tensor]]

#: The operator of each operation that keeps the rate and has one signal.
RECURRENCES: dict[int, Recurrence] = {
    ONE_POLE_CASCADE: one_pole_cascade,
    FIRST_ORDER: lambda x, c, s, argument, backend: first_order(x, c, s, argument == 1, backend),
    STATE_VARIABLE: lambda x, c, s, argument, backend: state_variable(
        x, c, s, argument == 1, backend
    ),
    ADAPTATION: lambda x, c, s, argument, backend: adaptation(x, c, s, argument % 2 == 1, backend),
    POLE_ZERO_CASCADE: pole_zero_cascade,
    BROKEN_STICK: lambda x, c, s, argument, backend: (broken_stick(x, c, backend), s),
    SQUARE: lambda x, c, s, argument, backend: ((c * x).square(), s),
    HAIR_CELL: lambda x, c, s, argument, backend: hair_cell(x, c, s, backend),
}


def get_recurrence(code: int) -> Recurrence:
    """The operator of an operation; raises where there is none."""
    if code not in RECURRENCES:
        raise ParameterError(
            f"operation {code} ({get_operation(code).name}) has no operator at full rate"
        )
    return RECURRENCES[code]


def rest_state(ops: Sequence[BlockOp], batch: int) -> Tensor:
    """What all operations hold before the first sample, (batch, channel, values)."""
    return torch.cat([op.state for op in ops], -1).expand(batch, -1, -1)


def run_ops(
    x: Tensor, ops: Sequence[BlockOp], state: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Run operations that keep the rate, one after another.

    Args:
        x: (batch, channel or 1, time).
        ops: One or more operations; their own states are not used.
        state: (batch, channel, values), the states of all operations side by side.
        backend: Kernel choice; None picks.
    Returns:
        Outputs (batch, channel, time) and the state after them. Where several operations run and
        nobody may ask for a derivative, they share one pass; the numbers are the same.
    """
    if len(ops) > 1 and can_fuse(x, ops) and not use_reference(x, backend):
        return program(x, ops, state)
    counts = [op.state.shape[1] for op in ops]
    if state.shape[-1] != sum(counts):
        raise ShapeError(
            f"expected a state of {sum(counts)} values a channel, got {tuple(state.shape)}"
        )
    aside, after = x, []
    for op, before in zip(ops, state.split(counts, -1), strict=True):
        if op.code == SAVE:
            aside = x
        elif op.code == SWAP:
            x, aside = aside, x
        elif op.code == ADD:
            x = x + aside
        else:
            x, before = get_recurrence(op.code)(x, op.coef, before, op.argument, backend)
        after.append(before)
    return x, torch.cat(after, -1)
