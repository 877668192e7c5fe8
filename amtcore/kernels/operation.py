"""Descriptions of operations. The engine knows an operation only through one of these objects.

A `ChainOperation` runs inside a chain, on blocks of samples of LANES channels. A `RowOperation` has
its own loop over rows of samples, frames, or neurons. An operation never imports the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.vector.kernel_cache import sources_digest

Size = Callable[[int], int]
#: Parameters of the compiled functions of a chain's operation; `c` and `s` are its first rows.
BLOCK_PARAMETERS = ("a", "b", "side", "n", "argument", "coef", "c", "state", "s")
ADJOINT_PARAMETERS = (
    "x", "gy", "gx", "n", "argument", "coef", "gcoef", "c", "state", "gstate", "s", "scratch",
)  # fmt: skip


class Rate(NamedTuple):
    """The timing of an operation's outputs.

    Args:
        samples_per_output: 1 if the operation keeps the rate.
        lookahead: Samples after its own sample that an output needs.
    """

    samples_per_output: int = 1
    lookahead: int = 0


class Example(NamedTuple):
    """A case on which the conformance tests run an operation.

    Args:
        argument: Its integer argument.
        coef: (channel, coefficient), float64.
        state: (channel, value), float64.
        x: (channel, time), float64.
    """

    argument: int
    coef: Tensor
    state: Tensor
    x: Tensor


def check_tensors(x: Tensor, coef: Tensor, state: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if the state has another shape, or a tensor another dtype than float32 or float64."""
    if tuple(state.shape) != shape:
        raise ShapeError(f"expected a state of shape {shape}, got {tuple(state.shape)}")
    if not x.dtype == coef.dtype == state.dtype or x.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            "input, coefficients and state must share one dtype, float32 or float64; got "
            f"{x.dtype}, {coef.dtype}, {state.dtype}; convert the input or build the model "
            "with dtype="
        )


def always(count: int) -> Size:
    """Return a size that does not depend on the argument."""
    return lambda argument: count


def over_time(samples: Sequence[Tensor], state: Tensor) -> Tensor:
    """Stack samples (batch, channel) of a plain loop to (batch, channel, time).

    Without samples the time axis is empty, and `state` (batch, channel, values) gives the shape.
    """
    return torch.stack(list(samples), -1) if samples else state[..., :0]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChainOperation:
    """An operation of a chain.

    Args:
        name: Identifier of the torch operator and in messages; unique.
        coefficients: Argument -> coefficients of a channel; none by default.
        states: Argument -> state values of a channel; none by default.
        block: Part (a, b, side, n, argument, coef, c, state, s) -> number of outputs. It changes
            the `n` samples in `a` in place; `b` is scratch, `side` the second signal of the chain.
        reference: Plain loop in torch, (x, coef, state, argument) -> (y, state), with gradients.
        adjoint: Part (x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch): gradients
            of one block, backwards in time. `state` is the state before the block. `gstate` enters
            as the gradient of the state after the block and leaves as the gradient of the state
            before it. `gcoef` is added to. Without an adjoint the plain loop computes gradients.
        taped: Argument -> rows of scratch a sample that the adjoint needs.
        rate: Argument -> samples an output and look-ahead.
        paths: For an operation that only moves signals: (signal, side) -> (signal, side).
        exponentials: True if every sample takes an exponential or a logarithm, which need GPU
            registers.
        example: Cases for `amtcore.testing.operations`.
    """

    name: str
    coefficients: Size = lambda argument: 0
    states: Size = lambda argument: 0
    block: Any
    reference: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    adjoint: Any = None
    taped: Size = lambda argument: 0
    rate: Callable[[int], Rate] = lambda argument: Rate()
    paths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    exponentials: bool = False
    example: Callable[[], Sequence[Example]] | None = None
    #: True if there is an adjoint. `torch.compile` can read this flag, but not a compiled part.
    has_adjoint: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_adjoint", self.adjoint is not None)
        if not self.name.isidentifier():
            raise ParameterError(f"an operation's name must be an identifier, got {self.name!r}")
        for what, part, wanted in (
            ("block", self.block, BLOCK_PARAMETERS),
            ("adjoint", self.adjoint, ADJOINT_PARAMETERS),
        ):
            if part is None:
                continue
            got = tuple(inspect.signature(part.py_func).parameters)
            if got != wanted:
                raise ParameterError(
                    f"operation {self.name}: expected a {what} with the parameters "
                    f"({', '.join(wanted)}), got ({', '.join(got)})"
                )

    def __repr__(self) -> str:
        """Return the name and the hash of the sources, a part of the keys of compiled code."""
        folder = Path(self.block.py_func.__code__.co_filename).parent
        return f"{self.name}@{sources_digest(folder)}"


class Device(Protocol):
    """A device that runs the items of a row operation."""

    name: str

    @property
    def workers(self) -> int:
        """Number of items that keep the device busy."""

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """Call the kernel `body(item, *arguments)` for 0 <= item < items.

        Arguments are integers and contiguous tensors, which `body` gets as flat arrays. With `room`
        above 0 each item gets scratch memory of `room` numbers as a last argument, which on a CPU
        begins a cache line.
        """


def empty_gradients(*args: Tensor) -> tuple[Tensor, ...]:
    """Return the empty outputs of an adjoint: gradients of its first three arguments."""
    return tuple(map(torch.empty_like, args[:3]))


def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowOperation:
    """An operation with a loop of its own.

    Args:
        name: Identifier of its torch operator, `amtcore::<name>`.
        run: (device, *args) -> outputs; its annotations are the operator's schema.
        on_gpu: True if `run` works on a GPU, else `reference` runs there.
        fake: (*args) -> empty outputs, for compilers.
        reference: (*args) -> outputs in torch, differentiable.
        check: (*args): raises if shapes or types are wrong.
        keep: (ctx, inputs, output): saves what the gradient needs.
        backward: (ctx, run, *upstream) -> a gradient or None for every argument; `run(operation,
            *args)` runs another operation. None if there is no gradient.
        batched: For vmap, positions of the arguments whose first axis is the batch. None for an
            adjoint, whose gradients of coefficients are sums over the batch.
        call: (run, *args) -> result for the caller, if it does more than call the operator.
        numbers_only: True if the kernels compute float32 on the CPU without gradients. The plain
            form then runs for derivatives, other types and other devices.
    """

    name: str
    run: Callable[..., Any]
    on_gpu: bool = True
    fake: Callable[..., Any]
    reference: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    keep: Callable[..., None] = keep_nothing
    backward: Callable[..., Any] | None = None
    batched: tuple[int, ...] | None = (0,)
    call: Callable[..., Any] | None = None
    numbers_only: bool = False

    @property
    def only_cpu(self) -> bool:
        """True if other devices have neither a kernel nor, for these tensors, a plain form."""
        return not self.on_gpu and (self.numbers_only or self.reference is None)
