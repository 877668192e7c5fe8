"""Derivatives of the recurrences, and the ways there are to ask for them.

Every forward operator has a hand-written adjoint, an operator of its own. What differentiates once
and backwards works: `backward`, `torch.func.grad`, `vjp`, `jacrev`, and `vmap` of and in all of
them, which folds the mapped axis of the signals into their batch. Second derivatives and
forward-mode ones do not exist and raise; the plain loops have both.

    outside a compiler: torch.autograd.Function -> operator, adjoint Function -> adjoint operator;
                        without derivatives, until a compiler is there, what the operator runs
    compiled:           operator with a registered gradient -> adjoint operator; inside a compiled
                        function torch.func and forward mode run uncompiled
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from amtcore.errors import DerivativeError, ShapeError
from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.fused.operations import get_adjoint
from amtcore.kernels.vector.result_pool import training

Gradients = tuple[Tensor, Tensor, Tensor]
Operator = Callable[..., Any]
_PLAIN = (Tensor, torch.nn.Parameter)


def is_transformed() -> bool:
    """Whether a transform of torch.func runs, such as vmap: its tensors neither outlive it nor work
    on other threads."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def wants_derivative(*tensors: Tensor) -> bool:
    """Whether someone may ask for a derivative by one of these: what has none is to be avoided."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    # Tensors of an outer transform do not show that they are watched.
    return is_transformed() or forward_ad._current_level >= 0


def _folded(call: Operator, positions: tuple[int, ...]) -> Operator:
    """The vmap rule of an operator whose outputs, and arguments at `positions`, have the batch
    first; the other arguments are the same for all."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, folded_args = info.batch_size, []

        def unfold(y: Tensor) -> Tensor:
            return y.unflatten(0, (size, y.shape[0] // size))

        for i, (argument, axis) in enumerate(zip(args, in_dims, strict=True)):
            if i in positions:
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
        out = call(*folded_args)
        if isinstance(out, tuple):
            return tuple(map(unfold, out)), (0,) * len(out)
        return unfold(out), 0

    return rule


def _one_by_one(call: Operator) -> Operator:
    """The vmap rule of an adjoint: gradients of coefficients are sums over the batch, so mapped
    signals cannot share one."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        mapped = [isinstance(a, Tensor) and axis is not None
                  for a, axis in zip(args, in_dims, strict=True)]  # fmt: skip
        parts = []
        for i in range(info.batch_size):
            each = zip(args, in_dims, mapped, strict=True)
            parts.append(
                call(*(a.select(axis, i) if is_mapped else a for a, axis, is_mapped in each))
            )
        outputs = tuple(torch.stack(each) for each in zip(*parts, strict=True))
        return outputs, (0,) * len(outputs)

    return rule


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise DerivativeError(
        "the kernels have no forward-mode derivative (jvp, jacfwd, hessian, forward_ad): use "
        "backward() or torch.func.grad, vjp or jacrev, or stages with backend='reference'"
    )


def _refuse_second(*_: Any) -> Any:
    raise DerivativeError(
        "the kernels have no second derivative: differentiate once, or use stages with "
        "backend='reference'"
    )


def _refuse_any(*_: Any) -> Any:
    raise DerivativeError(
        "this operator has no autograd formula: use the stage's single operators, which have"
    )


def _function(
    operator: Operator, keep: Operator, gradient: Operator, rule: Callable[[Operator], Operator]
) -> Operator:
    """`operator` under automatic differentiation, for use outside a compiler."""

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with training():
                return operator(*args)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            with training():
                return gradient(ctx, *upstream)

        setup_context = staticmethod(keep)
        jvp = staticmethod(_refuse_forward_mode)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return rule(Differentiated.apply)(info, in_dims, *args)

    function: Operator = Differentiated.apply
    return function


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _traces_a_transform() -> bool:
    """Whether the compiler is inside a derivative of torch.func."""
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    return bool(kinds - {torch._C._functorch.TransformType.Vmap})


# What `torch.compiler.assume_constant_result` does, without importing the compiler: that takes as
# long as torch does, and most processes never compile.
_traces_a_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _uncompiled(function: Operator) -> Operator:
    """`torch.compiler.disable` of a function, from when there is a compiler in this process."""
    disabled: list[Operator] = []

    def call(*args: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args)

    return call


def can_be_direct(*tensors: Tensor) -> bool:
    """Whether what an operator runs may be called by itself: there is no compiler in this process,
    which the first call of an operator would import (that takes as long as importing torch did),
    nobody watches the call, and no tensor only looks like one."""
    if "torch._dynamo" in sys.modules:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(t) in _PLAIN and t.device.type in DEVICES for t in tensors)


def _by_situation(operator: Any, function: Operator) -> Operator:
    function = _uncompiled(function)
    direct: Operator = operator._init_fn

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            tensors = [a for a in args if isinstance(a, Tensor)]
            if wants_derivative(*tensors):
                return function(*args)
            return direct(*args) if can_be_direct(*tensors) else operator(*args)
        # The level is compared again at every call of what was compiled.
        if forward_ad._current_level >= 0 or _traces_a_transform():
            # Then it runs uncompiled, right or with an error of ours.
            torch._dynamo.graph_break(
                msg="derivatives of torch.func and forward mode run uncompiled: leave out fullgraph"
            )
        return operator(*args)

    return call


def as_adjoint(operator: Any) -> Operator:
    """An adjoint operator, so that a second or a forward-mode derivative raises."""
    operator.register_autograd(_refuse_second, setup_context=_keep_nothing)
    operator.register_vmap(_one_by_one(operator))
    return _by_situation(operator, _function(operator, _keep_nothing, _refuse_second, _one_by_one))


def with_adjoint(
    operator: Any, keep: Operator, backward: Operator, folded: tuple[int, ...]
) -> Operator:
    """A forward operator with its gradient.

    Args:
        operator: A custom op whose outputs have the batch first.
        keep: (ctx, inputs, output): what the gradient needs.
        backward: (ctx, *upstream) -> a gradient or None for every argument.
        folded: Positions of the arguments that have the batch first, for vmap.
    """
    operator.register_autograd(backward, setup_context=keep)
    operator.register_vmap(_folded(operator, folded))
    function = _function(operator, keep, backward, lambda call: _folded(call, folded))
    return _by_situation(operator, function)


def without_gradient(operator: Any, folded: tuple[int, ...]) -> Operator:
    """A forward operator that has none: asking for one raises. See `with_adjoint`."""
    return with_adjoint(operator, _keep_nothing, _refuse_any, folded)


@torch.library.custom_op("amtcore::recurrence_adjoint", mutates_args=(), device_types=DEVICES)
def _recurrence_adjoint(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    return backend_of(x).run_op_adjoint(code, argument, x, coef, state, gy, gstate)


@_recurrence_adjoint.register_fake
def _(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
) -> Gradients:
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(state)


@torch.library.custom_op("amtcore::bank_adjoint", mutates_args=(), device_types=DEVICES)
def _bank_adjoint(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    kinds: list[int],
    offsets: list[int],
    gy: Tensor,
    gstate: Tensor,
) -> Gradients:
    return backend_of(x).run_bank_adjoint(x, coef, state, kinds, offsets, gy, gstate)


@_bank_adjoint.register_fake
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


recurrence_adjoint, bank_adjoint = as_adjoint(_recurrence_adjoint), as_adjoint(_bank_adjoint)


def fake_rows(x: Tensor, coef: Tensor, state: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
    """Shapes of an operator that keeps the rate: (batch, channel, time), and the state."""
    return x.new_empty(x.shape[0], coef.shape[0], x.shape[2]), torch.empty_like(state)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the three tensors and whatever constants the operator took after them."""
    ctx.save_for_backward(*inputs[:3])
    ctx.constants = inputs[3:]


def differentiate(
    operator: Any, code: int | None, arguments: Any = lambda constants, state: 0
) -> Operator:
    """Give a forward operator its gradient, and one that is not a bank its fake kernel.

    Args:
        operator: A custom op (x, coef, state, *constants) -> (y, state).
        code: Operation code of the kernel, None for a bank.
        arguments: (constants, state) -> the kernel's integer argument.
    Returns:
        What to call instead of the operator.
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
        get_adjoint(code)
        operator.register_fake(fake_rows)
    return with_adjoint(operator, _keep, backward, (0, 2))
