"""The leak of integrate-and-fire neurons, in the three forms it may be stated and learned in.

    taus: factor = exp(-dt / tau)      decays: factor as it is      bitshifts: factor = 1 - 2^-dash

Bit shifts are how integer hardware leaks: v - (v >> dash). They need not be whole numbers here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.stages.constants import HasConstants
from amtcore.stages.limits import Range
from amtcore.stages.spiking.checks import checked

#: Names of the membrane's and the synapses' constant in each mode.
LEAK_MODES = {
    "taus": ("tau_mem", "tau_syn"),
    "decays": ("alpha", "beta"),
    "bitshifts": ("dash_mem", "dash_syn"),
}
_MOST_ALLOWED = {"taus": math.inf, "decays": 1.0, "bitshifts": math.inf}


def _limit(mode: str, dt_s: float) -> Range:
    """Bounds within which the factor of a step lies above 0 and not above 1."""
    if mode == "taus":
        return Range(1e-6 * dt_s, 1e13 * dt_s)
    return Range(1e-9, 1.0) if mode == "decays" else Range(1e-6, 64.0)


def to_factor(mode: str, constant: Tensor, dt_s: float) -> Tensor:
    """Factor per step of a constant stated in `mode`."""
    if mode == "taus":
        return torch.exp(-dt_s / constant)
    return constant if mode == "decays" else 1.0 - torch.exp2(-constant)


def from_factor(mode: str, factor: Tensor, dt_s: float) -> Tensor:
    """The inverse of `to_factor`; a factor of 1 is a constant of infinity."""
    if mode == "taus":
        return dt_s / torch.log(1.0 / factor)
    return factor if mode == "decays" else -torch.log2(1.0 - factor)


class Leak(HasConstants):
    """Constants of membranes and synapses in one mode.

    Args:
        mode: A key of `LEAK_MODES`.
        constants: Name -> value as given, None where it was not; those of `mode` are kept, and
            where they are missing they follow from the time constants.
        dt_s: Length of a step in s.
        shape: (inputs, neurons).
        learnable: Whether the constants are parameters (else buffers).
        dtype: torch.float32 or torch.float64.

    Invariants:
        All three modes give the same factors for constants that follow from each other.

    >>> given = {"tau_mem": 0.02, "tau_syn": 0.05, "alpha": 0.5}
    >>> leak = Leak("decays", given, 1e-3, (2, 2), False, torch.float64)
    >>> [round(float(factor), 4) for factor in leak.factors(1e-3)]
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
        self.mode, self._shape = mode, shape
        for name, value in constants.items():
            if value is not None and name not in (*LEAK_MODES[mode], *LEAK_MODES["taus"]):
                raise ParameterError(
                    f"{name} does not go with leak_mode {mode!r}, got {value!r}; "
                    f"give {' and '.join(LEAK_MODES[mode])}, or choose the mode it belongs to"
                )
        for name, tau_name in zip(LEAK_MODES[mode], LEAK_MODES["taus"], strict=True):
            tensor = self.check(tau_name, constants[tau_name])
            if constants.get(name) is not None:
                tensor = self.check(name, constants[name])
            elif name != tau_name:
                tensor = from_factor(mode, to_factor("taus", tensor, dt_s), dt_s)
            self.constant(name, tensor, _limit(mode, dt_s))

    def check(self, name: str, value: Any) -> Tensor:
        """A value for one of the six constants in float64, or an error."""
        (mode,) = (mode for mode, names in LEAK_MODES.items() if name in names)
        inputs, neurons = self._shape
        per_synapse = ((inputs,), (neurons, inputs // neurons))
        shapes = ((neurons,),) if name == LEAK_MODES[mode][0] else per_synapse
        return checked(name, value, shapes, above=0.0, most=_MOST_ALLOWED[mode])

    @property
    def names(self) -> tuple[str, str]:
        """Names of the membrane's and the synapses' constant."""
        return LEAK_MODES[self.mode]

    def factors(self, dt_s: float) -> tuple[Tensor, Tensor]:
        """Membrane and synapse factors per step, float64, in the shapes they were given."""
        mem, syn = (getattr(self, name).double() for name in self.names)
        return to_factor(self.mode, mem, dt_s), to_factor(self.mode, syn, dt_s)

    def value(self, name: str, dt_s: float) -> Tensor:
        """One of the six constants: the parameter itself in its own mode, else what follows."""
        if name in self.names:
            return getattr(self, name)
        for mode, names in LEAK_MODES.items():
            if name in names:
                factor = self.factors(dt_s)[names.index(name)]
                return from_factor(mode, factor, dt_s).to(getattr(self, self.names[0]).dtype)
        raise ParameterError(f"there is no leak constant {name!r}")


class HasLeak:
    """The six constants of a leak as attributes, whatever mode they are kept in."""

    leak: Leak
    dt: float

    @property
    def leak_mode(self) -> str:
        """What the leak is stated and learned as."""
        return self.leak.mode

    @property
    def tau_mem(self) -> Tensor:
        """Membrane time constants in s."""
        return self.leak.value("tau_mem", self.dt)

    @property
    def tau_syn(self) -> Tensor:
        """Synaptic time constants in s."""
        return self.leak.value("tau_syn", self.dt)

    @property
    def alpha(self) -> Tensor:
        """Membrane decay factors."""
        return self.leak.value("alpha", self.dt)

    @property
    def beta(self) -> Tensor:
        """Synaptic decay factors."""
        return self.leak.value("beta", self.dt)

    @property
    def dash_mem(self) -> Tensor:
        """Membrane leak in bits."""
        return self.leak.value("dash_mem", self.dt)

    @property
    def dash_syn(self) -> Tensor:
        """Synaptic leak in bits."""
        return self.leak.value("dash_syn", self.dt)
