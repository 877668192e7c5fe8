"""Operator of the lower skirts: `amtcore::lower_skirt` and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ShapeError
from amtcore.kernels.families.roex import reference
from amtcore.kernels.families.roex.cpu import run_lower_skirt, run_lower_skirt_adjoint
from amtcore.kernels.ops.autograd import as_adjoint, with_adjoint
from amtcore.kernels.ops.dispatch import use_reference
from amtcore.kernels.vector.threads import parallel_for

#: Frames of one work item.
ITEM_FRAMES = 16
Gradients = tuple[Tensor, Tensor, Tensor]


def _arrays(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple(tensor.detach().contiguous().numpy() for tensor in tensors)


def _strange(levels: NDArray[Any], slopes: NDArray[Any], rates: NDArray[Any]) -> NDArray[Any]:
    """Indices of the frames that hold something else than finite numbers: the kernel, which looks
    at intensities above 0 only, would pass over it. They are left to the plain way."""
    fine = np.isfinite(levels).all(1) & np.isfinite(slopes).all(1) & np.isfinite(rates).all()
    return np.flatnonzero(~fine)


def _over_frames(one: Callable[[int, slice], None], frames: int) -> None:
    def item(i: int) -> None:
        one(i, slice(i * ITEM_FRAMES, (i + 1) * ITEM_FRAMES))

    parallel_for(item, -(-frames // ITEM_FRAMES))


@torch.library.custom_op("amtcore::lower_skirt", mutates_args=(), device_types="cpu")
def _lower_skirt(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    levels, slopes, *axes = _arrays(intensity, slope, rate, fc_hz, f_hz)
    out = np.empty((len(levels), len(axes[0])), levels.dtype)

    def one(_: int, part: slice) -> None:
        run_lower_skirt(levels[part], slopes[part], *axes, out[part])
        strange = _strange(levels[part], slopes[part], axes[0]) + part.start
        if len(strange):
            frames = (torch.from_numpy(values[strange]) for values in (levels, slopes))
            out[strange] = reference.lower_skirt(*frames, *map(torch.from_numpy, axes)).numpy()

    _over_frames(one, len(levels))
    return torch.from_numpy(out)


@_lower_skirt.register_fake
def _(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> Tensor:
    return intensity.new_empty(intensity.shape[0], rate.shape[0])


@torch.library.custom_op("amtcore::lower_skirt_adjoint", mutates_args=(), device_types="cpu")
def _adjoint(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor, gout: Tensor
) -> Gradients:
    levels, slopes, rates, centres, components, upstream = _arrays(
        intensity, slope, rate, fc_hz, f_hz, gout
    )
    g_levels, g_slopes = np.empty_like(levels), np.empty_like(levels)
    items = -(-len(levels) // ITEM_FRAMES)
    g_rates = np.zeros((items, len(rates)), levels.dtype)

    def kernel(i: int, chosen: Any) -> None:
        made = np.empty_like(levels[chosen]), np.empty_like(levels[chosen])
        run_lower_skirt_adjoint(
            levels[chosen], slopes[chosen], rates, centres, components, upstream[chosen], *made,
            g_rates[i],
        )  # fmt: skip
        g_levels[chosen], g_slopes[chosen] = made

    def one(i: int, part: slice) -> None:
        strange = _strange(levels[part], slopes[part], rates) + part.start
        if not len(strange):
            kernel(i, part)
            return
        kernel(i, np.setdiff1d(np.arange(len(levels))[part], strange))
        of_frames = (values[strange] for values in (levels, slopes, upstream))
        plain = reference.lower_skirt_gradients(
            *map(torch.from_numpy, (*of_frames, rates, centres, components))
        )
        g_levels[strange], g_slopes[strange] = plain[0].numpy(), plain[1].numpy()
        g_rates[i] += plain[2].numpy()

    _over_frames(one, len(levels))
    return (
        torch.from_numpy(g_levels),
        torch.from_numpy(g_slopes),
        torch.from_numpy(g_rates.sum(0)),
    )


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
