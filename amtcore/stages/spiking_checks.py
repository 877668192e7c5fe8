"""What integrate-and-fire layers accept; errors name the argument, its value and the limits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import ParameterError


def checked(
    name: str,
    value: Any,
    shapes: tuple[tuple[int, ...], ...] = (),
    above: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """A constant in float64; an error names the argument, its value and what is allowed.

    Args:
        name: Name of the argument.
        value: Number, nested list, array or tensor.
        shapes: Allowed shapes besides a single number.
        above: Values must be larger than this.
        most: Values must not be larger than this.
    """
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(f"{name} must be a number or an array, got {value!r}") from error
    if tensor.numel() == 1:
        tensor = tensor.reshape(())
    elif tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(shape) for shape in ((), *shapes))
        raise ParameterError(f"{name} must have shape {allowed}, got {tuple(tensor.shape)}")
    good = torch.isfinite(tensor) & (tensor > above) & (tensor <= most)
    if not bool(good.all()):
        limits = [f"above {above:g}"] if above > -math.inf else []
        limits += [f"at most {most:g}"] if most < math.inf else []
        wrong = float(tensor[~good].flatten()[0])
        raise ParameterError(f"{name} must be {' and '.join(['finite', *limits])}, got {wrong:g}")
    return tensor


def check_shape(shape: Any) -> tuple[int, int]:
    """(inputs, neurons) of whole synapses; (n,) means one synapse a neuron."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if len(sizes) == 1:
        sizes *= 2
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ParameterError(
            f"shape must be (inputs, neurons) as integers of 1 or more, got {shape!r}"
        )
    if sizes[0] % sizes[1]:
        raise ParameterError(
            f"shape (inputs, neurons) must give every neuron the same number of synapses, got "
            f"{shape!r}; {sizes[0]} is no multiple of {sizes[1]}"
        )
    return sizes


def check_max_spikes(most: Any) -> float:
    """Most spikes in a step as a float."""
    if not isinstance(most, (int, float)) or not most >= 1 or (most < math.inf and most % 1):
        raise ParameterError(
            f"max_spikes_per_dt must be a whole number of 1 or more, or inf, got {most!r}"
        )
    return float(most)
