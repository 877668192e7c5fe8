"""Operator of the lower skirts: `amtcore::lower_skirt` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.roex import reference
from amtcore.kernels.ops.autograd import as_adjoint, with_adjoint
from amtcore.kernels.ops.dispatch import use_reference

Gradients = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("amtcore::lower_skirt", mutates_args=(), device_types=DEVICES)
def _lower_skirt(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    return backend_of(intensity).lower_skirt(intensity, slope, rate, fc_hz, f_hz)


@_lower_skirt.register_fake
def _(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> Tensor:
    return intensity.new_empty(intensity.shape[0], rate.shape[0])


@torch.library.custom_op("amtcore::lower_skirt_adjoint", mutates_args=(), device_types=DEVICES)
def _adjoint(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor, gout: Tensor
) -> Gradients:
    return backend_of(intensity).lower_skirt_adjoint(intensity, slope, rate, fc_hz, f_hz, gout)


@_adjoint.register_fake
def _(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor, gout: Tensor
) -> Gradients:
    return torch.empty_like(intensity), torch.empty_like(slope), torch.empty_like(rate)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gout: Tensor) -> tuple[Tensor | None, ...]:
    return (*_adjoint_op(*ctx.saved_tensors, gout), None, None)


_adjoint_op = as_adjoint(_adjoint)
_differentiable = with_adjoint(_lower_skirt, _keep, _backward, (0, 1))


def lower_skirt(
    intensity: Tensor,
    slope: Tensor,
    rate: Tensor,
    fc_hz: Tensor,
    f_hz: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Excitation from below; arguments as in `reference.lower_skirt`.

    Components of zero intensity get no gradient from the kernel: they were dropped by a rule on
    levels, and no small change of theirs brings them back.
    """
    _check(intensity, slope, rate, fc_hz, f_hz)
    if use_reference(intensity, backend):
        return reference.lower_skirt(intensity, slope, rate, fc_hz, f_hz)
    return _differentiable(intensity, slope, rate, fc_hz, f_hz)


def _check(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> None:
    """Shapes and dtypes that the kernel relies on; it does not check bounds."""
    components = (intensity.shape[0], f_hz.shape[0])
    if tuple(intensity.shape) != components or tuple(slope.shape) != components:
        raise ShapeError(
            f"expected intensity and slope (frame, {f_hz.shape[0]} components), got "
            f"{tuple(intensity.shape)} and {tuple(slope.shape)}"
        )
    if rate.ndim != 1 or rate.shape != fc_hz.shape:
        raise ShapeError(
            f"expected one rate a filter, got {tuple(rate.shape)} for {tuple(fc_hz.shape)} filters"
        )
    kinds = {t.dtype for t in (intensity, slope, rate, fc_hz, f_hz)}
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.float64}:
        raise ShapeError(
            "intensity, slope, rate and frequencies must share one dtype, float32 or float64; got "
            f"{', '.join(sorted(map(str, kinds)))}"
        )
