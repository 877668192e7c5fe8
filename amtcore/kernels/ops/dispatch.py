"""Which implementation runs: None picks by device, a name forces it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from amtcore.errors import BackendError, ShapeError
from amtcore.kernels.backends.chosen import DEVICES

BACKENDS = ("reference", "cpu")


def use_reference(x: Tensor, backend: str | None) -> bool:
    """True when the plain loop is asked for; raises when the wanted kernel cannot run on `x`."""
    if backend not in (None, *BACKENDS):
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if backend == "reference":
        return True
    if x.device.type not in (*DEVICES, "meta"):
        raise BackendError(
            f"there is no fast kernel for device {x.device.type!r}; move the input to the CPU or a "
            "CUDA device, or force backend='reference' (slow, any device)"
        )
    if backend == "cpu" and x.device.type == "cuda":
        raise BackendError(
            f"backend='cpu' computes on tensors of the CPU, got one on {x.device}: move it there, "
            "or leave backend=None, which takes the GPU's kernels"
        )
    return False


def rows_of(x: Tensor) -> Tensor:
    """Return (.., time) as (row, time).

    The way through one dimension costs nothing and keeps a dynamic time axis exportable: merging
    several dimensions at once makes `torch.export` compare multiples of the unknown length.
    """
    if x.ndim == 2:
        return x
    return x.reshape(-1).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def by_item(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to every item of a batch by itself: (batch, ..) -> (batch, ..).

    Products, transforms and vectors that end in the middle of a row sum or round in an order that
    depends on shape and alignment. One item in memory of its own gives the same bits in any batch.
    A compiler and a GPU take the batch as it is: there the bits are not promised.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or len(x) == 0:
        return function(x)
    return torch.cat([function(item.clone()) for item in x.split(1)])


def check_recurrence(x: Tensor, coef: Tensor, state: Tensor, rows: int, values: int) -> None:
    """Shapes and dtypes that every recurrence relies on; the kernels do not check bounds.

    Args:
        x: (batch, channel or 1, time).
        coef: (channel, rows).
        state: (batch, channel, values).
        rows: Coefficients a channel must have.
        values: State values a channel must have.
    """
    if x.ndim != 3 or x.shape[1] not in (1, coef.shape[0]):
        raise ShapeError(
            f"expected input (batch, {coef.shape[0]} channels, time), got {tuple(x.shape)}"
        )
    if coef.shape[1] != rows:
        raise ShapeError(f"expected {rows} coefficients per channel, got {coef.shape[1]}")
    wanted = (x.shape[0], coef.shape[0], values)
    if tuple(state.shape) != wanted:
        raise ShapeError(f"expected a state of shape {wanted}, got {tuple(state.shape)}")
    if not x.dtype == coef.dtype == state.dtype or x.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            "input, coefficients and state must share one dtype, float32 or float64; got "
            f"{x.dtype}, {coef.dtype}, {state.dtype}; convert the input or build the model "
            "with dtype="
        )
