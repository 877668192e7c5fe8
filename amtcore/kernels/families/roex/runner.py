"""From tensors to the kernel: frames go to threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.families.roex import reference
from amtcore.kernels.families.roex.cpu import run_lower_skirt, run_lower_skirt_adjoint
from amtcore.kernels.vector.threads import parallel_for

#: Frames of one work item; without gradients, which gather by item, larger ones cost less.
ITEM_FRAMES, _FORWARD_FRAMES = 16, 64


def _arrays(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple(tensor.detach().contiguous().numpy() for tensor in tensors)


def _strange(levels: NDArray[Any], slopes: NDArray[Any], rates: NDArray[Any]) -> NDArray[Any]:
    """Indices of the frames that hold something else than finite numbers: the kernel, which looks
    at what is there only, would pass over it. They are left to the plain way."""
    with np.errstate(all="ignore"):
        sums = levels.sum() + slopes.sum() + rates.sum()
    if np.isfinite(sums):
        return np.empty(0, np.int64)
    fine = np.isfinite(levels).all(1) & np.isfinite(slopes).all(1) & np.isfinite(rates).all()
    return np.flatnonzero(~fine)


def _over_frames(one: Callable[[int, slice], None], frames: int, size: int) -> None:
    def item(i: int) -> None:
        one(i, slice(i * size, (i + 1) * size))

    parallel_for(item, -(-frames // size))


def forward(intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor) -> Tensor:
    """Values of `reference.lower_skirt`."""
    levels, slopes, *axes = _arrays(intensity, slope, rate, fc_hz, f_hz)
    out = np.empty((len(levels), len(axes[0])), levels.dtype)

    def one(_: int, part: slice) -> None:
        run_lower_skirt(levels[part], slopes[part], *axes, out[part])
        strange = _strange(levels[part], slopes[part], axes[0]) + part.start
        if len(strange):
            frames = (torch.from_numpy(values[strange]) for values in (levels, slopes))
            out[strange] = reference.lower_skirt(*frames, *map(torch.from_numpy, axes)).numpy()

    _over_frames(one, len(levels), _FORWARD_FRAMES)
    return torch.from_numpy(out)


def adjoint(
    intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor, gout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` with respect to intensity, slope and rate."""
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

    _over_frames(one, len(levels), ITEM_FRAMES)
    return (
        torch.from_numpy(g_levels),
        torch.from_numpy(g_slopes),
        torch.from_numpy(g_rates.sum(0)),
    )
