"""Leaks of an integrate-and-fire layer, and the checks of its constants.

The leak can be stated and learned in three forms, named as in Rockpool:

    taus: factor = exp(-dt / tau)    decays: the factor itself    bitshifts: factor = 1 - 2^-dash.

Bit shifts are the leak of integer hardware, v - (v >> dash); here they need not be whole numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import plain_number
from amtcore.errors import ParameterError
from amtcore.stages.constants import HasConstants, Range


def checked(
    name: str,
    value: Any,
    shapes: tuple[tuple[int, ...], ...] = (),
    above: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """Return a finite constant in float64: a number, or an array of one of the shapes.

    Values must be larger than `above`, and not larger than `most`.
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
    """Return True if there is a True or False among numbers, which torch would take for 1 or 0."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bool, value))
    return isinstance(value, (bool, np.bool_))


def check_shape(shape: Any) -> tuple[int, int]:
    """Return (inputs, neurons) with equal numbers of synapses; (n,) is one synapse a neuron."""
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
    """Return the most spikes in a step as a float."""
    number = plain_number(most)
    if number is None or not number >= 1 or (number < math.inf and number % 1):
        raise ParameterError(
            f"max_spikes_per_dt must be a whole number of 1 or more, or inf, got {most!r}"
        )
    return float(number)


#: Names of the membrane's and the synapses' constant in each mode.
LEAK_MODES = {
    "taus": ("tau_mem", "tau_syn"),
    "decays": ("alpha", "beta"),
    "bitshifts": ("dash_mem", "dash_syn"),
}


def place_of(name: str) -> tuple[str, int]:
    """Return the mode of a constant, and 0 for the membrane's or 1 for the synapses' constant."""
    return next((mode, names.index(name)) for mode, names in LEAK_MODES.items() if name in names)


def to_factor(mode: str, constant: Tensor, dt_s: float) -> Tensor:
    """Return the factor per step of a constant stated in `mode`."""
    if mode == "taus":
        return torch.exp(-dt_s / constant)
    return constant if mode == "decays" else 1.0 - torch.exp2(-constant)


def from_factor(mode: str, factor: Tensor, dt_s: float) -> Tensor:
    """Return the constant of a factor per step; a factor of 1 gives infinity."""
    if mode == "taus":
        return dt_s / torch.log(1.0 / factor)
    return factor if mode == "decays" else -torch.log2(1.0 - factor)


class Leak(HasConstants):
    """Constants of membranes and synapses in one mode.

    Args:
        mode: A key of `LEAK_MODES`.
        constants: Name -> value or None. Constants of `mode` are kept, and missing ones follow from
            the time constants.
        dt_s: Length of a step in s.
        shape: (inputs, neurons).
        learnable: Whether the constants are parameters (else buffers).
        dtype: torch.float32 or torch.float64.

    >>> given = {"tau_mem": 0.02, "tau_syn": 0.05, "alpha": 0.5}
    >>> leak = Leak("decays", given, 1e-3, (2, 2), False, torch.float64)
    >>> [round(float(factor), 4) for factor in leak.factors()]
    [0.5, 0.9802]
    """

    def __init__(
        self,
        mode: str,
        constants: dict[str, Any],
        dt_s: float,
        shape: tuple[int, int],
        learnable: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(learnable, dtype)
        if mode not in LEAK_MODES:
            raise ParameterError(f"leak_mode must be one of {', '.join(LEAK_MODES)}, got {mode!r}")
        self.mode, self.names, self._dt_s, self._shape = mode, LEAK_MODES[mode], dt_s, shape
        bounds = {"taus": (1e-6 * dt_s, 1e13 * dt_s), "decays": (1e-9, 1.0)}
        limit = Range(*bounds.get(mode, (1e-6, 64.0)))  # a factor lies above 0 and not above 1
        for name, value in constants.items():
            if value is not None and name not in (*self.names, *LEAK_MODES["taus"]):
                raise ParameterError(
                    f"{name} does not go with leak_mode {mode!r}, got {value!r}; "
                    f"give {' and '.join(self.names)}, or choose the mode it belongs to"
                )
        for name, tau_name in zip(self.names, LEAK_MODES["taus"], strict=True):
            tensor = self.check(tau_name, constants[tau_name])
            if constants.get(name) is not None:
                tensor = self.check(name, constants[name])
            elif name != tau_name:
                tensor = from_factor(mode, to_factor("taus", tensor, dt_s), dt_s)
            self.constant(name, tensor, limit)

    def check(self, name: str, value: Any) -> Tensor:
        """Return a value for one of the six constants in float64, or raise."""
        inputs, neurons = self._shape
        per_synapse = ((inputs,), (neurons, inputs // neurons))
        mode, place = place_of(name)
        most = 1.0 if mode == "decays" else math.inf
        return checked(name, value, per_synapse if place else ((neurons,),), above=0.0, most=most)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return membrane and synapse factors per step, float64."""
        mem, syn = (getattr(self, name).double() for name in self.names)
        return to_factor(self.mode, mem, self._dt_s), to_factor(self.mode, syn, self._dt_s)

    def value(self, name: str) -> Tensor:
        """Return one of the six constants, converted from the leak's mode."""
        mode, place = place_of(name)
        if mode == self.mode:
            return getattr(self, name)
        return from_factor(mode, self.factors()[place], self._dt_s).to(self.dtype)
