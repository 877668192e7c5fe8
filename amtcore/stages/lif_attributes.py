"""Constants, states and settings of an integrate-and-fire layer, by name and by family.

Families are named as in Rockpool: "weights" (there are none), "taus", "decays", "bitshifts", "bias"
and "thresholds". The leak can be stated and learned in three forms:

    taus: factor = exp(-dt / tau)    decays: the factor itself    bitshifts: factor = 1 - 2^-dash.

Bit shifts are the leak of integer hardware, v - (v >> dash); here they need not be whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.plain_numbers import plain_number
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
_MOST_ALLOWED = {"taus": math.inf, "decays": 1.0, "bitshifts": math.inf}


def _limit(mode: str, dt_s: float) -> Range:
    """Return bounds for which the factor of a step lies above 0 and not above 1."""
    if mode == "taus":
        return Range(1e-6 * dt_s, 1e13 * dt_s)
    return Range(1e-9, 1.0) if mode == "decays" else Range(1e-6, 64.0)


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
        """Return a value for one of the six constants in float64, or raise."""
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
        """Return membrane and synapse factors per step, float64."""
        mem, syn = (getattr(self, name).double() for name in self.names)
        return to_factor(self.mode, mem, dt_s), to_factor(self.mode, syn, dt_s)

    def value(self, name: str, dt_s: float) -> Tensor:
        """Return one of the six constants, converted from the leak's mode."""
        if name in self.names:
            return getattr(self, name)
        for mode, names in LEAK_MODES.items():
            if name in names:
                factor = self.factors(dt_s)[names.index(name)]
                return from_factor(mode, factor, dt_s).to(getattr(self, self.names[0]).dtype)
        raise ParameterError(f"there is no leak constant {name!r}")


def _leak_constant(name: str, doc: str) -> Any:
    return property(lambda owner: owner.leak.value(name, owner.dt), doc=doc)


class HasLeak:
    """The six constants of a leak as attributes, in any leak mode."""

    leak: Leak
    dt: float
    tau_mem = _leak_constant("tau_mem", "Membrane time constants in s.")
    tau_syn = _leak_constant("tau_syn", "Synaptic time constants in s.")
    alpha = _leak_constant("alpha", "Membrane decay factors.")
    beta = _leak_constant("beta", "Synaptic decay factors.")
    dash_mem = _leak_constant("dash_mem", "Membrane leak in bits.")
    dash_syn = _leak_constant("dash_syn", "Synaptic leak in bits.")

    @property
    def leak_mode(self) -> str:
        """Form in which the leak is stated and learned."""
        return self.leak.mode


STATES: tuple[str, ...] = ("vmem", "isyn", "spikes")
SETTINGS: tuple[str, ...] = (
    "dt", "leak_mode", "learning_window", "max_spikes_per_dt", "n_synapses", "noise_std",
    "spike_generation_fn",
)  # fmt: skip
_LEAK_NAMES = tuple(name for names in LEAK_MODES.values() for name in names)
#: Assigning to one of these checks the value, and keeps the parameter of a constant.
_CHECKED = frozenset((*_LEAK_NAMES, "bias", "threshold", "learning_window", "max_spikes_per_dt"))
#: Names in one request: one, or several of them.
Names = str | tuple[str, ...] | list[str]


def chosen(kind: str, asked: Names, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested names; raise for an unknown name."""
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in names:
        if name not in known:
            raise ParameterError(f"{kind} must be of {', '.join(known)}, got {name!r}")
    return names


def write(owner: HasConstants, name: str, value: Tensor) -> None:
    """Change the value of a constant in place, so that an optimizer keeps the parameter."""
    if name in owner.bounded:
        owner.set_constant(name, value, value.shape)
    else:
        getattr(owner, name).data = value


class HasAttributes(HasLeak, HasConstants):
    """The access by name and family of `LIFExodus`."""

    vmem: Tensor
    bias: Tensor
    threshold: Tensor
    learning_window: float
    max_spikes_per_dt: float
    assignable = HasConstants.assignable | _CHECKED | {"name", *STATES}
    #: Name of the layer in a network, free to set.
    name = ""
    size_out: int

    if TYPE_CHECKING:

        @property
        def n_synapses(self) -> int:
            """Input synapses per neuron."""

        def check_constant(self, name: str, value: Any) -> Tensor:
            """Return a value for a constant in float64, or raise."""

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return type(self).__name__

    @property
    def full_name(self) -> str:
        """Class and name of the layer."""
        return f"{self.class_name} {self.name!r}"

    @property
    def size(self) -> int:
        """Outputs, as `size_out`."""
        return self.size_out

    def _families(self) -> dict[str, tuple[str, ...]]:
        """Names of the constants by family."""
        leaks = {mode: self.leak.names if mode == self.leak_mode else () for mode in LEAK_MODES}
        return {"weights": (), **leaks, "bias": ("bias",), "thresholds": ("threshold",)}

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants that are kept, in the present leak mode."""
        return tuple(name for names in self._families().values() for name in names)

    def parameters(  # type: ignore[override]
        self, family: Names | bool | None = None, recurse: bool = True
    ) -> Iterator[nn.Parameter] | dict[str, Tensor]:
        """Return constants of families by name; without a family iterate like torch.

        Args:
            family: One or several of "weights", "taus", "decays", "bitshifts" (only the family of
                the leak mode has constants), "bias" (or "biases") and "thresholds". None, or
                torch's own flag, iterates.
            recurse: Passed to torch.
        """
        if family is None or isinstance(family, bool):
            return super().parameters(recurse if family is None else family)
        families = self._families()
        families["biases"] = families["bias"]
        asked = chosen("a family of parameters", family, tuple(families))
        return {name: getattr(self, name) for each in asked for name in families[each]}

    def state(self, family: Names | None = None) -> dict[str, Tensor]:
        """Return the kept vmem, isyn and spikes, or the ones asked for."""
        asked = STATES if family is None else chosen("a family of states", family, STATES)
        return {name: getattr(self, name) for name in asked}

    def simulation_parameters(self, family: Names | None = None) -> dict[str, Any]:
        """Return the settings, which are neither constants nor states, or the ones asked for."""
        asked = SETTINGS
        if family is not None:
            asked = chosen("a family of simulation parameters", family, SETTINGS)
        return {name: getattr(self, name) for name in asked}

    def attributes_named(self, name: Names) -> dict[str, Any]:
        """Return the attributes among the given names that are a constant, state or setting."""
        names = (name,) if isinstance(name, str) else tuple(name)
        every = (*self.constants, *STATES, *SETTINGS)
        return {each: getattr(self, each) for each in names if each in every}

    def remember_constants(self) -> None:
        """Keep the present constants for `reset_parameters`."""
        self._start = {
            name: getattr(self, name).detach().double().clone() for name in self.constants
        }

    def reset_parameters(self) -> Self:
        """Give every constant the value it was built with. Returns the layer."""
        return self.set_attributes(self._start)

    def set_attributes(self, new_attributes: Mapping[str, Any]) -> Self:
        """Set constants, options and states by name; nothing is set when one of them is wrong.

        Args:
            new_attributes: Any of bias, threshold, the constants of the leak in any mode,
                learning_window, max_spikes_per_dt, and vmem, isyn, spikes.
        Returns:
            The layer.
        """
        ready: dict[str, Any] = {}
        for name, value in new_attributes.items():
            if name in (*self.constants, *_LEAK_NAMES):
                name, tensor = self._in_own_mode(name, self.check_constant(name, value))
                ready[name] = tensor.to(getattr(self, name))
            elif name in STATES:
                ready[name] = self._check_state(name, value)
            elif name == "learning_window":
                ready[name] = float(checked(name, value, above=0.0))
            elif name == "max_spikes_per_dt":
                ready[name] = check_max_spikes(value)
            else:
                allowed = [*self.constants, *STATES, "learning_window", "max_spikes_per_dt"]
                raise ParameterError(
                    f"there is no attribute {name!r} to set: allowed are {', '.join(allowed)}"
                )
        for name, value in ready.items():
            if name in self.constants:
                write(self.leak if name in self.leak.names else self, name, value)
            else:
                super().__setattr__(name, value)
        return self

    def _in_own_mode(self, name: str, value: Tensor) -> tuple[str, Tensor]:
        """Convert a constant of the leak to the present mode; return its name and value there."""
        if name in self.constants:
            return name, value
        (mode,) = (mode for mode, names in LEAK_MODES.items() if name in names)
        own = self.leak.names[LEAK_MODES[mode].index(name)]
        stated = from_factor(self.leak_mode, to_factor(mode, value, self.dt), self.dt)
        if not bool((torch.isfinite(stated) & (stated > 0)).all()):
            raise ParameterError(
                f"{name} has no finite {own}, which leak_mode {self.leak_mode!r} keeps, got "
                f"{value.tolist()}"
            )
        return own, stated

    def _check_state(self, name: str, value: Any) -> Tensor:
        tensor = torch.as_tensor(value).detach().to(self.vmem)
        sizes = (self.size_out, self.n_synapses) if name == "isyn" else (self.size_out,)
        if tensor.ndim not in (len(sizes), len(sizes) + 1) or tensor.shape[-len(sizes) :] != sizes:
            raise ShapeError(f"{name} must have shape {sizes} or (batch, ..), got {tensor.shape}")
        if not bool(torch.isfinite(tensor).all()):
            raise ParameterError(f"{name} must be finite, got {value!r}")
        return tensor

    def __setattr__(self, name: str, value: Any) -> None:
        """`layer.tau_mem = 0.03` is `set_attributes({"tau_mem": 0.03})`."""
        if name in _CHECKED and "_start" in self.__dict__ and not self._loading:
            HasAttributes.set_attributes(self, {name: value})
        else:
            super().__setattr__(name, value)

    def to_torch(self, use_torch_call: bool = True) -> Self:
        """Return the layer, which is a torch module already."""
        if not use_torch_call:
            raise ParameterError(
                "a call of the layer is torch's: use_torch_call must be True, got "
                f"{use_torch_call!r}; use evolve() for output, state and records"
            )
        return self
