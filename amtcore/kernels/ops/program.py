"""Operator that runs several block operations in one pass: `amtcore::program`.

It has no gradient: stages use it where none is asked for, and their single operators elsewhere.
Both compute the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.fused.program import BlockOp, lay_out
from amtcore.kernels.ops.autograd import fake_rows, wants_derivative, without_gradient
from amtcore.kernels.ops.dispatch import check_recurrence


@torch.library.custom_op("amtcore::program", mutates_args=(), device_types=DEVICES)
def _program(x: Tensor, coef: Tensor, state: Tensor, table: list[int]) -> tuple[Tensor, Tensor]:
    return backend_of(x).run_program(np.array(table, np.int64).reshape(-1, 4), x, coef, state)


_program.register_fake(fake_rows)
_operator = without_gradient(_program, (0, 2))


def can_fuse(x: Tensor, ops: Sequence[BlockOp]) -> bool:
    """Whether nothing that enters the program may want a derivative."""
    return not wants_derivative(x, *(op.coef for op in ops))


def program(x: Tensor, ops: Sequence[BlockOp], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run operations that keep the rate on x (batch, channel or 1, time), all of them in cache.

    Args:
        x: The signal.
        ops: The operations in order; their own states are not used.
        state: (batch, channel, values), the states of all operations side by side.
    """
    table, coefs, _ = lay_out(ops)
    coef = torch.cat(coefs, 1)
    check_recurrence(x, coef, state, coef.shape[1], sum(op.state.shape[1] for op in ops))
    made: tuple[Tensor, Tensor] = _operator(x, coef, state, table.ravel().tolist())
    return made
