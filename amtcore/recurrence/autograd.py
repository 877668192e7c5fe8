"""Gradients of the recurrences as operators of their own, and how the forward ones find them.

`amtcore::recurrence_adjoint` and `amtcore::bank_adjoint` run the hand-written adjoint kernels. They
have fake kernels too, so a compiled training step stays one graph. Second derivatives do not exist.
`torch.func.vmap` folds the mapped axis of the signals into their batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from .chain.runner import run_bank_adjoint, run_op_adjoint

Gradients = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("amtcore::recurrence_adjoint", mutates_args=(), device_types="cpu")
def recurrence_adjoint(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    return run_op_adjoint(code, argument, x, coef, state, gy, gstate)


@recurrence_adjoint.register_fake
def _(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(state)


@torch.library.custom_op("amtcore::bank_adjoint", mutates_args=(), device_types="cpu")
def bank_adjoint(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    kinds: list[int],
    offsets: list[int],
    gy: Tensor,
    gstate: Tensor,
) -> Gradients:
    return run_bank_adjoint(x, coef, state, kinds, offsets, gy, gstate)


@bank_adjoint.register_fake
def _(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    kinds: list[int],
    offsets: list[int],
    gy: Tensor,
    gstate: Tensor,
) -> Gradients:
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(state)


def is_transformed() -> bool:
    """Whether a transform of torch.func runs, such as vmap: its tensors neither outlive it nor work
    on other threads."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def map_over_batch(operator: Any, folded: tuple[int, ...]) -> None:
    """Let `torch.func.vmap` map an operator over signals.

    Args:
        operator: A custom op whose outputs have the batch first.
        folded: Positions of the arguments that have it too; the others are the same for all.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, folded_args = info.batch_size, []
        for i, (argument, axis) in enumerate(zip(args, in_dims, strict=True)):
            if i in folded:
                each = argument.expand(size, *argument.shape)
                each = each if axis is None else argument.movedim(axis, 0)
                folded_args.append(each.flatten(0, 1))
            elif axis is None or not isinstance(argument, Tensor):
                folded_args.append(argument)
            else:
                raise ShapeError(
                    "vmap maps over signals, not over coefficients: call the model once for each "
                    "set of parameters"
                )
        out = operator(*folded_args)
        if isinstance(out, tuple):
            return tuple(y.unflatten(0, (size, -1)) for y in out), (0,) * len(out)
        return out.unflatten(0, (size, -1)), 0

    operator.register_vmap(rule)


def fake_rows(x: Tensor, coef: Tensor, state: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
    """Shapes of an operator that keeps the rate: (batch, channel, time), and the state."""
    return x.new_empty(x.shape[0], coef.shape[0], x.shape[2]), torch.empty_like(state)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the three tensors and whatever constants the operator took after them."""
    ctx.save_for_backward(*inputs[:3])
    ctx.constants = inputs[3:]


def differentiate(
    operator: Any, code: int | None, arguments: Any = lambda constants, state: 0
) -> None:
    """Give a forward operator its gradient, and one that is not a bank its fake kernel.

    Args:
        operator: A custom op (x, coef, state, *constants) -> (y, state).
        code: Operation code of the kernel, None for a bank.
        arguments: (constants, state) -> the kernel's integer argument.
    """

    def backward(context: Any, gy: Tensor, gstate: Tensor) -> tuple[Any, ...]:
        x, coef, state = context.saved_tensors
        constants = context.constants
        if code is None:
            gradients = bank_adjoint(x, coef, state, *constants, gy, gstate)
        else:
            argument = arguments(constants, state)
            gradients = recurrence_adjoint(code, argument, x, coef, state, gy, gstate)
        return (*gradients, *(None for _ in constants))

    if code is not None:
        operator.register_fake(fake_rows)
    operator.register_autograd(backward, setup_context=_keep)
    map_over_batch(operator, (0, 2))
