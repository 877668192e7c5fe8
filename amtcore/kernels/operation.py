"""Descriptions of operations: all that the engine knows of an operation is one of these objects.

    ChainOperation  runs inside a chain, on blocks of samples of LANES channels
    RowOperation    has its own loop over items: rows of samples, frames, neurons

The engine never names an operation, and a module of an operation never imports the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.vector.source_digest import sources_digest

Size = Callable[[int], int]
#: Parameters of the compiled functions of a chain's operation; `c` and `s` are its first rows.
BLOCK_PARAMETERS = ("a", "b", "side", "n", "argument", "coef", "c", "state", "s")
ADJOINT_PARAMETERS = (
    "x", "gy", "gx", "n", "argument", "coef", "gcoef", "c", "state", "gstate", "s", "scratch",
)  # fmt: skip


class Rate(NamedTuple):
    """How outputs of an operation lie in time.

    Args:
        samples_per_output: 1 where the operation keeps the rate.
        lookahead: Samples after an output's own that it waits for.
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


def always(count: int) -> Size:
    """A size that does not depend on the argument."""
    return lambda argument: count


def over_time(samples: Sequence[Tensor], state: Tensor) -> Tensor:
    """(batch, channel, time) of the samples of a plain loop; no time where there are none.

    Args:
        samples: (batch, channel) each.
        state: (batch, channel, values), of the same operation.
    """
    return torch.stack(list(samples), -1) if samples else state[..., :0]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChainOperation:
    """An operation of a chain.

    Args:
        name: Of its torch operator and in messages; an identifier that no other operation has.
        coefficients: Argument -> coefficients of a channel.
        states: Argument -> state values of a channel.
        block: Part (a, b, side, n, argument, coef, c, state, s) -> samples after it. It changes the
            `n` samples in `a` in place; `b` is scratch, `side` the second signal of the chain.
        reference: Plain loop in torch, (x, coef, state, argument) -> (y, state), with gradients.
        adjoint: Part (x, gy, gx, n, argument, coef, gcoef, c, state, gstate, s, scratch): gradients
            of one block, backwards in time. `state` is the one before the block, `gstate` goes from
            the gradient of the state after it to that of the state before it, `gcoef` is added to.
            Without an adjoint the plain loop runs where a gradient may be asked for.
        taped: Argument -> rows of scratch a sample that the adjoint writes down.
        rate: Argument -> samples an output and look-ahead.
        paths: For an operation that only moves signals: (signal, side) -> (signal, side).
        exponentials: True where every sample takes an exponential or a logarithm, whose series need
            registers of a GPU.
        example: Cases for `amtcore.testing.operations`.
    """

    name: str
    coefficients: Size
    states: Size
    block: Any
    reference: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    adjoint: Any = None
    taped: Size = lambda argument: 0
    rate: Callable[[int], Rate] = lambda argument: Rate()
    paths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    exponentials: bool = False
    example: Callable[[], Sequence[Example]] | None = None
    #: Whether there is an adjoint; compilers cannot look at a part.
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
        """The name and the hash of its sources: part of the keys of compiled code."""
        folder = Path(self.block.py_func.__code__.co_filename).parent
        return f"{self.name}@{sources_digest(folder)}"


class Device(Protocol):
    """What runs the items of a row operation."""

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """Call `body(item, *arguments)` for every item, tensors as flat arrays.

        Args:
            body: A kernel.
            items: How many.
            arguments: Contiguous tensors, and integers.
            room: With a number above 0, numbers of memory of its own that every worker of the
                device passes as a last argument.
        """


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class RowOperation:
    """An operation with a loop of its own.

    Args:
        name: Of its torch operator, `amtcore::<name>`; an identifier.
        cpu: (device, *args) -> outputs. The annotations of its arguments and result are the
            operator's schema.
        gpu: The same for a GPU; None where the plain form runs there.
        fake: (*args) -> empty outputs, for compilers.
        reference: (*args) -> outputs in torch, differentiable.
        check: (*args): raises where shapes or types are wrong.
        keep: (ctx, inputs, output): what the gradient needs.
        backward: (ctx, run, *upstream) -> a gradient or None for every argument; `run(operation,
            *args)` runs another operation. None where there is no gradient.
        batched: Positions of the arguments that have the batch first, as outputs have, for vmap;
            None for an adjoint, whose gradients of coefficients are sums over the batch.
        call: (run, *args) -> what the caller gets, where that is more than the operator.
        numbers_only: True for kernels that compute float32 numbers on the CPU only: the plain form
            runs wherever a derivative, another type or another device is asked for.
    """

    name: str
    cpu: Callable[..., Any]
    gpu: Callable[..., Any] | None = None
    fake: Callable[..., Any]
    reference: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    keep: Callable[..., None] = _keep_nothing
    backward: Callable[..., Any] | None = None
    batched: tuple[int, ...] | None = (0,)
    call: Callable[..., Any] | None = None
    numbers_only: bool = False
