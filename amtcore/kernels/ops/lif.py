"""Operators of the integrate-and-fire family: `amtcore::lif` and its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.lif import reference, runner
from amtcore.kernels.families.lif.reference import NEURON_COEFS, Outputs
from amtcore.kernels.ops.autograd import as_adjoint, wants_derivative, with_adjoint
from amtcore.kernels.ops.dispatch import use_reference

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("amtcore::lif", mutates_args=(), device_types=DEVICES)
def _lif(
    x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
) -> Kept:
    *outputs, starts = backend_of(x).lif(x, coef, state, max_spikes, record, keep)
    return (*outputs, starts.flatten(1))  # type: ignore[return-value]


@_lif.register_fake
def _(x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool) -> Kept:
    batch, steps, neurons = x.shape[0], x.shape[1], coef.shape[0]
    synapses, recorded = coef.shape[1] - NEURON_COEFS, steps if record else 0
    return (
        x.new_empty(batch, steps, neurons),
        x.new_empty(batch, recorded, neurons),
        x.new_empty(batch, recorded, neurons, synapses),
        torch.empty_like(state),
        # One axis for groups and blocks: an axis of one block would make the length static in
        # `torch.export`.
        x.new_empty(
            batch, math.prod(runner.starts_shape(1, steps if keep else 0, neurons, synapses))
        ),
    )


@torch.library.custom_op("amtcore::lif_adjoint", mutates_args=(), device_types=DEVICES)
def _lif_adjoint(
    x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> Gradients:  # fmt: skip
    neurons, synapses = coef.shape[0], coef.shape[1] - NEURON_COEFS
    starts = starts.view(runner.starts_shape(len(x), x.shape[1], neurons, synapses))
    return backend_of(x).lif_adjoint(
        x, coef, starts, max_spikes, record, gspikes, gvmem, gisyn, gstate
    )


@_lif_adjoint.register_fake
def _(
    x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> Gradients:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(coef), torch.empty_like(gstate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Kept) -> None:
    x, coef, _, ctx.max_spikes, ctx.record, _ = inputs
    ctx.save_for_backward(x, coef, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _adjoint_op(*ctx.saved_tensors, ctx.max_spikes, ctx.record, *upstream[:4])
    return (*gradients, None, None, None)


_adjoint_op = as_adjoint(_lif_adjoint)
_differentiable = with_adjoint(_lif, _save, _backward, (0, 2))


def lif(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    max_spikes: float,
    record: bool = False,
    backend: str | None = None,
) -> Outputs:
    """Integrate-and-fire neurons; arguments as in `reference.lif`.

    Input that is not finite raises on the CPU, except in a compiled plain loop, where values cannot
    be looked at; on a GPU, which is not waited for, it stays in the state and what that drives.
    """
    _check(x, coef, state)
    if use_reference(x, backend):
        outputs = reference.lif(x, coef, state, max_spikes, record)
        if not (torch.compiler.is_compiling() or x.is_cuda):
            runner.check_finite(x, coef, state, outputs[-1])
        return outputs
    keep = wants_derivative(x, coef, state)
    return _differentiable(x, coef, state, max_spikes, record, keep)[:4]


def _check(x: Tensor, coef: Tensor, state: Tensor) -> None:
    """Shapes and dtypes that the kernel relies on; it does not check bounds."""
    neurons, synapses = coef.shape[0], coef.shape[1] - NEURON_COEFS
    if x.ndim != 3 or x.shape[2] != neurons * synapses:
        raise ShapeError(
            f"expected input (batch, time, {neurons} neurons * {synapses} synapses), "
            f"got {tuple(x.shape)}"
        )
    wanted = (x.shape[0], neurons, 1 + synapses)
    if tuple(state.shape) != wanted:
        raise ShapeError(f"expected a state of shape {wanted}, got {tuple(state.shape)}")
    if not x.dtype == coef.dtype == state.dtype or x.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            "input, coefficients and state must share one dtype, float32 or float64; got "
            f"{x.dtype}, {coef.dtype}, {state.dtype}"
        )
