"""What integrate-and-fire layers accept; errors name the argument, its value and the limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import plain_number
from amtcore.errors import ParameterError


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
        given = torch.as_tensor(value)
        if given.dtype == torch.bool or given.is_complex() or _holds_bool(value):
            raise TypeError(name)
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


def _holds_bool(value: Any) -> bool:
    """Whether there is a True or False among numbers, which torch would take for 1 or 0."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bool, value))
    return isinstance(value, (bool, np.bool_))


def check_shape(shape: Any) -> tuple[int, int]:
    """(inputs, neurons) of whole synapses; (n,) means one synapse a neuron."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    sizes = tuple(int(size) if isinstance(size, np.integer) else size for size in sizes)
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
    number = plain_number(most)
    if number is None or not number >= 1 or (number < math.inf and number % 1):
        raise ParameterError(
            f"max_spikes_per_dt must be a whole number of 1 or more, or inf, got {most!r}"
        )
    return float(number)
