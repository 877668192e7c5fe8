"""What an integrate-and-fire layer has, by name and by family: constants, states, settings.

Families are those of Rockpool: of constants "weights" (there are none), "taus", "decays",
"bitshifts", "bias" and "thresholds"; states and settings are each their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.stages.constants import HasConstants
from amtcore.stages.spiking.checks import check_max_spikes, checked
from amtcore.stages.spiking.leak import LEAK_MODES, HasLeak, from_factor, to_factor

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
    """The names asked for; an error says which of them there is not."""
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in names:
        if name not in known:
            raise ParameterError(f"{kind} must be of {', '.join(known)}, got {name!r}")
    return names


def write(owner: HasConstants, name: str, value: Tensor) -> None:
    """Give a constant another value in place, so that an optimizer keeps hold of it."""
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
            """A value for a constant in float64, or an error."""

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
        """Constants of families by name, or without one all parameters, as torch has it.

        Args:
            family: One or several of "weights", "taus", "decays", "bitshifts" (of these three the
                leak mode has constants), "bias" (or "biases") and "thresholds". None, or torch's
                own flag, iterates.
            recurse: Passed to torch.
        """
        if family is None or isinstance(family, bool):
            return super().parameters(recurse if family is None else family)
        families = self._families()
        families["biases"] = families["bias"]
        asked = chosen("a family of parameters", family, tuple(families))
        return {name: getattr(self, name) for each in asked for name in families[each]}

    def state(self, family: Names | None = None) -> dict[str, Tensor]:
        """The kept vmem, isyn and spikes, or those of them that are asked for."""
        asked = STATES if family is None else chosen("a family of states", family, STATES)
        return {name: getattr(self, name) for name in asked}

    def simulation_parameters(self, family: Names | None = None) -> dict[str, Any]:
        """The settings that are neither constants nor states, or those that are asked for."""
        asked = SETTINGS
        if family is not None:
            asked = chosen("a family of simulation parameters", family, SETTINGS)
        return {name: getattr(self, name) for name in asked}

    def attributes_named(self, name: Names) -> dict[str, Any]:
        """Those of the given names that the layer has as constant, state or setting."""
        names = (name,) if isinstance(name, str) else tuple(name)
        every = (*self.constants, *STATES, *SETTINGS)
        return {each: getattr(self, each) for each in names if each in every}

    def remember_constants(self) -> None:
        """Keep the present constants as those that `reset_parameters` goes back to."""
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
        """A constant of the leak as the present mode states it, under the name it has there."""
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
        """The layer itself: it is a torch module already, and a call is `forward`."""
        if not use_torch_call:
            raise ParameterError(
                "a call of the layer is torch's: use_torch_call must be True, got "
                f"{use_torch_call!r}; use evolve() for output, state and records"
            )
        return self
