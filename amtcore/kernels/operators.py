"""Torch operators of the operations: checks, derivatives, and compiled graphs.

Every forward operator has a hand-written adjoint, which is an operator too. First derivatives in
reverse mode work: `backward`, `torch.func.grad`, `vjp` and `jacrev`, also combined with `vmap`,
which folds the mapped axis into the batch. Second and forward-mode derivatives raise; the plain
loops have both. A call takes one of three ways:

    no derivative    the plain function. An operator's first call would import the compiler, which
                     takes as long as importing torch
    derivatives      a torch.autograd.Function with rules for vmap
    compiled         a torch.library operator with a registered gradient and a fake

Two things are impossible with public torch. `torch.compile` of a function that calls
`torch.func.grad` raises torch's own error: compile the model, and call `torch.func.grad` outside.
A tracer that is visible neither in its tensors nor in `torch.compiler` runs the plain function.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import DerivativeError, ParameterError, ShapeError
from amtcore.kernels import chain
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.devices import backend_of, get_backend
from amtcore.kernels.operation import (
    ChainOperation,
    Device,
    RowOperation,
    check_tensors,
    empty_gradients,
    keep_nothing,
)
from amtcore.kernels.operations import modulation_filters
from amtcore.kernels.torch_state import (
    DEVICES,
    can_compute,
    has_tangent,
    is_real,
    use_reference,
    wants_derivative,
)
from amtcore.kernels.vector.arrays import training
from amtcore.torch_internals import COMPILER

Call = Callable[..., Any]
Pair = Callable[..., tuple[Tensor, Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor]


def _folded(call: Call, positions: tuple[int, ...]) -> Call:
    """Return the vmap rule of an operator: outputs and `positions` alone have the batch first."""

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


def _one_by_one(call: Call) -> Call:
    """Return the vmap rule of an adjoint, which runs each mapped item separately.

    The gradient of coefficients is a sum over the batch, so mapped items cannot share a batch.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def item(i: int, argument: Any, axis: int | None) -> Any:
            is_mapped = isinstance(argument, Tensor) and axis is not None
            return argument.select(axis, i) if is_mapped else argument

        items = (functools.partial(item, i) for i in range(info.batch_size))
        parts = [call(*map(each, args, in_dims)) for each in items]
        outputs = tuple(torch.stack(each) for each in zip(*parts, strict=True))
        return outputs, (0,) * len(outputs)

    return rule


def _refusal(message: str) -> Call:
    def refuse(*_: Any) -> Any:
        raise DerivativeError(message)

    return refuse


_refuse_forward_mode = _refusal(
    "the kernels have no forward-mode derivative (jvp, jacfwd, hessian, forward_ad): use "
    "backward() or torch.func.grad, vjp or jacrev, or stages with backend='reference'"
)
_refuse_second = _refusal(
    "the kernels have no second derivative: differentiate once, or use stages with "
    "backend='reference'"
)
_refuse_any = _refusal(
    "this operator has no autograd formula: use the stage's single operators, which have"
)


def _differentiable(
    function: Call, keep: Call, backward: Call, rule: Callable[[Call], Call]
) -> Call:
    """Return a function with a gradient, for use outside a compiler."""

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with training():
                return function(*args)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            with training():
                return backward(ctx, *upstream)

        setup_context = staticmethod(keep)
        jvp = staticmethod(_refuse_forward_mode)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return rule(Differentiated.apply)(info, in_dims, *args)

    call: Call = Differentiated.apply
    return call


def _refuse_tangents(args: Iterable[Any]) -> None:
    """Raise if an argument has a forward-mode tangent, which an operator would ignore."""
    for tensor in args:
        if isinstance(tensor, Tensor) and has_tangent(tensor, unknown=True):
            _refuse_forward_mode()


def _uncompiled(function: Call) -> Call:
    """Apply `torch.compiler.disable` once the process has imported the compiler, which is slow."""
    disabled: list[Call] = []

    def call(*args: Any) -> Any:
        if not disabled:
            if COMPILER not in sys.modules:
                return function(*args)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args)

    return call


def _schema_of(function: Call) -> str:
    """Return an operator's schema, from the annotations of a function, without a device.

    Annotations of lists become `typing.Sequence`, because torch 2.6 does not know `list[int]`.
    """

    def known(hint: Any) -> Any:
        is_list = typing.get_origin(hint) is list
        return typing.Sequence[typing.get_args(hint)] if is_list else hint  # type: ignore[misc]

    hints = {name: known(hint) for name, hint in typing.get_type_hints(function).items()}
    signature = inspect.signature(function)
    each = [p for p in signature.parameters.values() if hints[p.name] is not Device]
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in each]

    @functools.wraps(function)
    def twin(*args: Any) -> Any:
        return function(*args)

    twin.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=hints["return"]
    )
    return torch.library.infer_schema(twin, mutates_args=())


def _define(
    name: str, function: Call, fake: Call, *, schema: str, keep: Call, backward: Call,
    batched: tuple[int, ...] | None, encode: Call = lambda *args: args,
) -> Call:  # fmt: skip
    """Define the operator `amtcore::<name>` and return the function that calls it.

    `function` computes outputs of plain tensors. The other arguments are as in `RowOperation`, but
    `backward(ctx, *upstream)`. `encode` converts call arguments to operator arguments.
    """

    def rule(call: Call) -> Call:
        return _one_by_one(call) if batched is None else _folded(call, batched)

    def compute(*args: Any) -> Any:
        _refuse_tangents(args)
        made = function(*args)  # contiguous, because a compiler expects the layout of `fake`
        return made.contiguous() if isinstance(made, Tensor) else tuple(
            y.contiguous() for y in made
        )  # fmt: skip

    operator = torch.library.custom_op(
        f"amtcore::{name}", compute, mutates_args=(), device_types=DEVICES, schema=schema
    )
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=keep)
    operator.register_vmap(rule(operator))
    differentiable = _uncompiled(_differentiable(function, keep, backward, rule))
    direct = _uncompiled(function)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_tangents(args)
            return operator(*encode(*args))
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not all(map(is_real, tensors)):
            return operator(*encode(*args))
        return differentiable(*args) if wants_derivative(*tensors) else direct(*args)

    return call


# --- rows, frames, neurons ---

_calls: dict[RowOperation, Call] = {}
_lock = threading.RLock()


def _call_of(operation: RowOperation) -> Call:
    def compute(*args: Any) -> Any:
        # The backend "interpreted" takes tensors of the CPU, where a kernel for the CPU alone runs.
        on_cpu = operation.only_cpu and args[0].device.type == "cpu"
        backend = get_backend("cpu") if on_cpu else backend_of(args[0])
        return backend.run_rows(operation, *args)

    def backward(ctx: Any, *upstream: Any) -> Any:
        if operation.backward is None:
            return _refuse_second() if operation.batched is None else _refuse_any()
        return operation.backward(ctx, run, *upstream)

    with _lock:
        if operation not in _calls:
            _calls[operation] = _define(
                operation.name, compute, operation.fake, schema=_schema_of(operation.run),
                keep=operation.keep, backward=backward, batched=operation.batched,
            )  # fmt: skip
        return _calls[operation]


def run(operation: RowOperation, *args: Any) -> Any:
    """Run a row operation without its checks, for the gradient of another one."""
    return _call_of(operation)(*args)


def operator(operation: RowOperation) -> Call:
    """Return the function (*args, backend=None) that callers of a row operation use.

    It checks, chooses between kernel and plain form, and has the operation's gradient. Ask for it
    when a module is imported: inside a compiler no operator can be made.
    """
    kernel = _call_of(operation)

    def call(*args: Any, backend: str | None = None) -> Any:
        if operation.check is not None:
            operation.check(*args)
        tensors = [a for a in args if isinstance(a, Tensor)]
        by_kernel = can_compute(*tensors) if operation.numbers_only else True
        if use_reference(args[0], backend) or not by_kernel:
            assert operation.reference is not None
            return operation.reference(*args)
        return kernel(*args)

    return call if operation.call is None else functools.partial(operation.call, kernel)


# --- operations of a chain ---


def check_signals(x: Tensor, coef: Tensor, state: Tensor, rows: int, values: int) -> None:
    """Check shapes and dtypes that every chain relies on; the kernels do not check bounds.

    Shapes: x (batch, channel or 1, time), coef (channel, rows) and state (batch, channel, values).
    """
    if x.ndim != 3 or x.shape[1] not in (1, coef.shape[0]):
        raise ShapeError(
            f"expected input (batch, {coef.shape[0]} channels, time), got {tuple(x.shape)}"
        )
    if coef.shape[1] != rows:
        raise ShapeError(f"expected {rows} coefficients per channel, got {coef.shape[1]}")
    check_tensors(x, coef, state, (x.shape[0], coef.shape[0], values))


def _keep_signals(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the three tensors, and the constants after them."""
    ctx.save_for_backward(*inputs[:3])
    ctx.constants = inputs[3:]


def _define_pair(name: str, fake: Call, layout_of: Call, encode: Call) -> Pair:
    """Define an operator of (x, coef, state, *constants) and its adjoint.

    `layout_of(coef, *constants)` returns the `ChainTables`.
    """
    schema = _schema_of(fake)

    def function(x: Tensor, coef: Tensor, state: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
        return backend_of(x).run_chain(layout_of(coef, *constants), x, coef, state)

    def gradients(x: Tensor, coef: Tensor, state: Tensor, *rest: Any) -> Gradients:
        *constants, gy, gstate = rest
        layout = layout_of(coef, *constants)
        if layout.steps and (len(layout.steps) != 1 or not layout.steps[0][0].has_adjoint):
            _refuse_any()
        return backend_of(x).run_chain_adjoint(layout, x, coef, state, gy, gstate)

    adjoint = _define(
        f"{name}_adjoint", gradients, empty_gradients,
        schema=schema.replace(") -> (", ", Tensor gy, Tensor gstate) -> (Tensor, "),
        keep=keep_nothing, backward=_refuse_second, batched=None, encode=encode,
    )  # fmt: skip

    def backward(ctx: Any, gy: Tensor, gstate: Tensor) -> tuple[Tensor | None, ...]:
        found = adjoint(*ctx.saved_tensors, *ctx.constants, gy, gstate)
        return (*found, *(None for _ in ctx.constants))

    return _define(
        name, function, fake, schema=schema, keep=_keep_signals, backward=backward, batched=(0, 2),
        encode=encode,
    )  # fmt: skip


def _fake_chain(x: Tensor, coef: Tensor, state: Tensor, steps: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], coef.shape[0], x.shape[2]), torch.empty_like(state)


_chain_operator = _define_pair(
    "chain",
    _fake_chain,
    lambda coef, steps: chain.tables_of_steps(steps, len(coef)),
    lambda x, coef, state, steps, *rest: (
        x,
        coef,
        state,
        chain.text_of(chain.steps_of(steps)),
        *rest,
    ),
)


def run_step(
    operation: ChainOperation, argument: int, x: Tensor, coef: Tensor, state: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one operation that keeps the rate: x (batch, channel or 1, time) -> y, and the state."""
    check_signals(x, coef, state, operation.coefficients(argument), operation.states(argument))
    if use_reference(x, backend) or not operation.has_adjoint:
        if operation.reference is None:
            raise ParameterError(f"operation {operation.name} has no operator at full rate")
        return operation.reference(x, coef, state, argument)
    return _chain_operator(x, coef, state, ((operation, argument),))


def can_fuse(x: Tensor, ops: Sequence[ChainStep], *states: Tensor) -> bool:
    """Return True if no derivative of these tensors or of coefficients may be requested."""
    return not wants_derivative(x, *states, *(op.coef for op in ops))


def run_fused(x: Tensor, ops: Sequence[ChainStep], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run operations in one pass, all of them in cache, without a gradient; see `run_ops`."""
    chain.check_sizes(ops)
    coef = torch.cat([op.coef for op in ops], 1)
    check_signals(x, coef, state, coef.shape[1], sum(op.state.shape[1] for op in ops))
    steps = tuple((op.operation, op.argument) for op in ops)
    return _chain_operator(x, coef, state, steps)


def rest_state(ops: Sequence[ChainStep], batch: int) -> Tensor:
    """Return the states of all operations before the first sample, (batch, channel, values)."""
    return torch.cat([op.state for op in ops], -1).expand(batch, -1, -1)


def run_ops(
    x: Tensor, ops: Sequence[ChainStep], state: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Run operations that keep the rate, one after another.

    Args:
        x: (batch, channel or 1, time).
        ops: One or more operations.
        state: (batch, channel, values), the states of all operations side by side; None is the
            operations' own states.
        backend: Kernel choice; None picks.
    Returns:
        Outputs (batch, channel, time) and the state after them. Several operations without a
        derivative share one pass, with the same values.
    """
    state = rest_state(ops, x.shape[0]) if state is None else state
    if len(ops) > 1 and can_fuse(x, ops, state) and not use_reference(x, backend):
        return run_fused(x, ops, state)
    counts = [op.state.shape[1] for op in ops]
    if state.shape[-1] != sum(counts):
        raise ShapeError(
            f"expected a state of {sum(counts)} values a channel, got {tuple(state.shape)}"
        )
    aside, after = x, []
    for op, before in zip(ops, state.split(counts, -1), strict=True):
        if op.operation.paths is not None:
            x, aside = op.operation.paths(x, aside)
        else:
            x, before = run_step(op.operation, op.argument, x, op.coef, before, backend)
        after.append(before)
    return x, torch.cat(after, -1)


# --- the filters that end a chain ---


def _fake_bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], offsets[-1], x.shape[2]), torch.empty_like(state)


_bank_operator = _define_pair(
    "modulation_bank",
    _fake_bank,
    lambda coef, kinds, offsets: chain.tables_of_bank(tuple(kinds), tuple(offsets), coef.shape[1]),
    lambda *args: args,
)


def modulation_bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Modulation filters of every channel; arguments as in `modulation_filters.modulation_bank`."""
    two_sections = modulation_filters.BANK_TWO_SECTIONS in kinds
    coefs = modulation_filters.FILTER_COEFS * (2 if two_sections else 1)
    check_signals(x[:, :1], coef, state, coefs, modulation_filters.filter_states(coefs))
    if use_reference(x, backend):
        return modulation_filters.modulation_bank(x, coef, state, kinds, offsets)
    return _bank_operator(x, coef, state, kinds, offsets)
