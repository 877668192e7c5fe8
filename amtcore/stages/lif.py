"""Leaky integrate-and-fire neurons with exponential synapses, as a layer for learning.

One step is a synaptic decay, a membrane decay, any number of threshold crossings, and a reset by
subtraction (equations in `kernels.operations.lif`). The gradient of the spike count is a surrogate:
v / threshold within a window below the threshold, and everywhere above it.

A layer is saved as JSON, and exported to the Neuromorphic Intermediate Representation. NIR states
neurons as differential equations: tau_mem dv/dt = v_leak - v + R I and tau_syn dI/dt = -I + w_in S.
With an input held over a step their solution is

    v' = alpha v + (1 - alpha) (v_leak + R I),   I' = beta I + (1 - beta) w_in S.

Our layer follows with R = 1 / (1 - alpha), v_leak = bias R, w_in = beta / (1 - beta). NIR resets to
a potential and our layer subtracts the threshold; the metadata of the graph say so.

The leak can be stated and learned in three forms, named as in Rockpool:

    taus: factor = exp(-dt / tau)    decays: the factor itself    bitshifts: factor = 1 - 2^-dash.

Bit shifts are the leak of integer hardware, v - (v >> dash); here they need not be whole numbers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amtcore.arguments import checked_arguments
from amtcore.errors import BackendError, ParameterError, ShapeError
from amtcore.kernels.operations.lif import LIF, spike_count
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import is_exporting, is_transformed
from amtcore.plain_numbers import plain_number
from amtcore.stages.constants import HasConstants, Range, outside_inference
from amtcore.stages.stage import Stage


def checked(
    name: str,
    value: Any,
    shapes: tuple[tuple[int, ...], ...] = (),
    above: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """Return a number, or an array of one of the shapes, in float64; above < value <= most."""
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


#: Default time step in s.
DEFAULT_DT_S = 1e-3
STATES = ("vmem", "isyn", "spikes")
SETTINGS = (
    "dt", "leak_mode", "learning_window", "max_spikes_per_dt", "n_synapses", "noise_std",
    "spike_generation_fn",
)  # fmt: skip
#: Settings that may be set after construction.
_OPTIONS = ("learning_window", "max_spikes_per_dt")
_LEAK_NAMES = tuple(name for names in LEAK_MODES.values() for name in names)
#: Assigning to one of these checks the value, and keeps the parameter of a constant.
_CHECKED = frozenset((*_LEAK_NAMES, "bias", "threshold", *_OPTIONS))
#: Names in one request: one, or several of them.
Names = str | tuple[str, ...] | list[str]

_lif = operator(LIF)


def _chosen(kind: str, asked: Names | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested names, all for None; raise for an unknown name."""
    names = known if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    for name in names:
        if name not in known:
            raise ParameterError(f"{kind} must be of {', '.join(known)}, got {name!r}")
    return names


def _leak_constant(name: str, doc: str) -> Any:
    return property(lambda layer: layer.leak.value(name), doc=doc)


class LIFExodus(Stage):
    """A layer of leaky integrate-and-fire neurons, several synapses each, no recurrence.

    Args:
        shape: (inputs, neurons); neuron i owns the `inputs / neurons` inputs from
            `i * inputs / neurons` on. (n,) means (n, n).
        tau_mem: Membrane time constant in s, above 0; one or (neurons,).
        tau_syn: Synaptic time constant in s, above 0; one, (inputs,) or (neurons, synapses).
        threshold: Firing threshold, above 0; one or (neurons,).
        learning_window: How far below the threshold the surrogate gradient starts, above 0.
        bias: Added to the membrane at every step; one or (neurons,).
        has_rec: Only False: there are no recurrent weights.
        noise_std: Only 0: there is no noise.
        dt: Length of a time step in s, above 0.
        leak_mode: What the leak is stated and learned as: "taus", "decays" or "bitshifts".
        alpha, beta: Membrane and synaptic decay factor per step, above 0 up to 1, for "decays";
            None takes what follows from the time constants.
        dash_mem, dash_syn: Leak as a right shift in bits, above 0, for "bitshifts"; None likewise.
        max_spikes_per_dt: Most spikes of a neuron in one step; inf for no limit.
        learnable: Whether constants are parameters, as in Rockpool 3.1, else buffers.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, time, inputs) -> spike counts (batch, time, neurons); (time, inputs) likewise.

    Invariants:
        Two calls on the halves of a signal give what one call gives on the whole, exactly:
        `forward` keeps vmem, isyn and spikes, detached, for each batch item until `reset_state`.
        `stream` does the same with explicit state and changes nothing.
        With another number of batch items than before, each starts from the state of the first.

    Differences from Rockpool 3.1: any device, since the CPU kernel needs no CUDA; thresholds have
    gradients, since the adjoint is ours; dt and what follows it are keyword-only, since Rockpool
    hides them in **kwargs; states before the first call have no batch axis, as listed there, but
    `isyn` is (neurons, synapses) and `spikes` (neurons,), which is what they are.

    Two neurons with 2 synapses each (4 input channels), on the device of their data:

    >>> mod = LIFExodus((4, 2), tau_mem=30e-3, tau_syn=10e-3, dt=10e-3).to("cpu")
    >>> output = mod(torch.ones((1, 10, 4)))
    >>> output[0, :, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    state_form = Tensor
    assignable = Stage.assignable | _CHECKED | {"name", *STATES}
    #: Name of the layer in a network, free to set.
    name = ""
    #: The layer takes spikes and sends spikes.
    spiking_input = spiking_output = True
    #: No recurrent weights and no noise, ever.
    w_rec: None = None
    noise_std = 0.0
    shown = "shape n_synapses leak_mode dt learning_window max_spikes_per_dt learnable"

    tau_mem = _leak_constant("tau_mem", "Membrane time constants in s.")
    tau_syn = _leak_constant("tau_syn", "Synaptic time constants in s.")
    alpha = _leak_constant("alpha", "Membrane decay factors.")
    beta = _leak_constant("beta", "Synaptic decay factors.")
    dash_mem = _leak_constant("dash_mem", "Membrane leak in bits.")
    dash_syn = _leak_constant("dash_syn", "Synaptic leak in bits.")

    @checked_arguments()
    def __init__(
        self,
        shape: tuple[int, ...],
        tau_mem: Any = 0.02,
        tau_syn: Any = 0.05,
        threshold: Any = 1.0,
        learning_window: float = 0.5,
        bias: Any = 0.0,
        has_rec: bool = False,
        noise_std: float = 0.0,
        *,
        dt: float = DEFAULT_DT_S,
        leak_mode: str = "taus",
        alpha: Any = None,
        beta: Any = None,
        dash_mem: Any = None,
        dash_syn: Any = None,
        max_spikes_per_dt: float = math.inf,
        learnable: bool = True,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        dt_s = float(checked("dt", dt, above=0.0))
        super().__init__(1.0 / dt_s, learnable, dtype, backend)
        if has_rec:
            raise ParameterError(
                f"LIFExodus has no recurrent weights: has_rec must be False, got {has_rec!r}; "
                "feed the output back outside the layer"
            )
        if noise_std != 0.0:
            raise ParameterError(
                f"Exodus does not support noise injection: noise_std must be 0, got {noise_std!r}; "
                "add noise to the input instead"
            )
        self.dt = dt_s
        self.size_in, self.size_out = check_shape(shape)
        constants = {"tau_mem": tau_mem, "tau_syn": tau_syn, "alpha": alpha, "beta": beta,
                     "dash_mem": dash_mem, "dash_syn": dash_syn}  # fmt: skip
        self.leak = Leak(leak_mode, constants, dt_s, self.shape, learnable, dtype)
        self.constant("bias", self.check_constant("bias", bias))
        threshold = self.check_constant("threshold", threshold)
        self.constant("threshold", threshold, Range(1e-9, 1e9))
        self.learning_window = float(checked("learning_window", learning_window, above=0.0))
        self.max_spikes_per_dt = check_max_spikes(max_spikes_per_dt)
        for name in STATES:
            self.register_buffer(name, torch.zeros(0, dtype=dtype), persistent=False)
        self.reset_state()
        #: The constants for `reset_parameters`.
        self._start = {n: getattr(self, n).detach().double().clone() for n in self.constants}

    @property
    def leak_mode(self) -> str:
        """Form in which the leak is stated and learned."""
        return self.leak.mode

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, neurons)."""
        return self.size_in, self.size_out

    @property
    def n_synapses(self) -> int:
        """Input synapses per neuron."""
        return self.size_in // self.size_out

    @property
    def spike_generation_fn(self) -> Callable[..., Tensor]:
        """The spike count with its surrogate gradient, as the kernel computes it."""
        return spike_count

    def check_constant(self, name: str, value: Any) -> Tensor:
        """Return a value for a constant of the neurons in float64, or raise."""
        if name not in ("bias", "threshold"):
            return self.leak.check(name, value)
        above = 0.0 if name == "threshold" else -math.inf
        return checked(name, value, ((self.size_out,),), above=above)

    def coefficients(self) -> Tensor:
        """Return (neuron, 4 + synapse), the rows of the recurrence."""
        alpha, beta = self.leak.factors()
        beta = beta.reshape(self.size_out, -1) if beta.ndim else beta
        window = torch.full_like(alpha, self.learning_window)
        columns = (alpha, self.bias.double(), self.threshold.double(), window)
        rows = torch.stack([column.expand(self.size_out) for column in columns], -1)
        beta = beta.expand(self.size_out, self.n_synapses)
        return torch.cat((rows, beta), -1).to(self.dtype)

    def rest_state(self, batch: int) -> Tensor:
        """Return zeros, the state before the first step, (batch, neuron, 1 + synapse)."""
        return self.bias.new_zeros(batch, self.size_out, 1 + self.n_synapses)

    def _run(self, data: Tensor, state: Tensor | None, record: bool) -> tuple[Tensor, ...]:
        """Return spikes, vmem and isyn of a batched signal, and the state after it."""
        before = self.rest_state(data.shape[0]) if state is None else state
        most = self.max_spikes_per_dt
        return _lif(data, self.coefficients(), before, most, record, self.backend)

    def _as_batch(self, data: Tensor, state: Tensor | None = None) -> Tensor:
        if isinstance(data, Tensor) and not (data.is_complex() or data.is_floating_point()):
            data = data.to(self.dtype)  # spikes may be counted in integers, or be true or false
        data = self.as_input(data, (2, 3), "(batch, time, inputs) or (time, inputs)", state)
        if data.shape[-1] != self.size_in:
            raise ShapeError(
                f"data must have {self.size_in} inputs on its last axis, got {tuple(data.shape)}"
            )
        return data if data.ndim == 3 else data.unsqueeze(0)

    def stream(self, data: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next chunk with explicit state; the layer's own state is not used.

        The state is (batch, neuron, 1 + synapse) with vmem first, None at the start. Gradients
        flow through the state.
        """
        spikes, _, _, state = self._run(self._as_batch(data, state), state, False)
        return (spikes if data.ndim == 3 else spikes.squeeze(0)), state

    def _continue(self, data: Tensor, record: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Process a signal from the kept state on, and keep the last state, detached."""
        batched = self._as_batch(data)
        spikes, vmem, isyn, last = self._run(batched, self._kept(batched.shape[0]), record)
        if is_transformed(last):
            raise ParameterError(
                "LIFExodus keeps its state between calls, which torch.func cannot map; map "
                "stream(), or call the layer with the whole batch"
            )
        if not is_exporting() and batched.shape[1]:
            # Copies: a kept state must not hold on to the whole output.
            last = last.detach()
            with outside_inference():
                self.vmem, self.isyn = last[..., 0].clone(), last[..., 1:].clone()
                self.spikes = spikes.detach()[:, -1].clone()
        records = {"vmem": vmem, "isyn": isyn, "spikes": spikes} if record else {}
        if data.ndim == 2:
            return spikes.squeeze(0), {name: y.squeeze(0) for name, y in records.items()}
        return spikes, records

    def _kept(self, batch: int) -> Tensor:
        """Return the kept state for the recurrence; another batch gets its first item's."""
        vmem = self.vmem if self.vmem.ndim == 2 else self.vmem.unsqueeze(0)
        isyn = self.isyn.reshape(-1, self.size_out, self.n_synapses)
        # One item expands to any batch, whose size may be unknown in an export.
        if vmem.shape[0] == 1 or vmem.shape[0] != batch:
            vmem = vmem[:1].expand(batch, -1)
        if isyn.shape[0] == 1 or isyn.shape[0] != batch:
            isyn = isyn[:1].expand(batch, -1, -1)
        return torch.cat((vmem.unsqueeze(-1), isyn), -1)

    def forward(self, data: Tensor) -> Tensor:
        """Return the spike counts of the next stretch of time.

        A program of `torch.export` keeps no state: each call starts from the state at the export.

        Args:
            data: (batch, time, inputs) or (time, inputs), finite; integers and booleans are counts.
        """
        return self._continue(data, False)[0]

    def evolve(
        self, input_data: Tensor | np.ndarray, record: bool = False
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Like `forward`, returning states and, if asked, their course.

        Args:
            input_data: (batch, time, inputs) or (time, inputs), tensor or array.
            record: Whether to return potentials, currents and spikes of every step.
        Returns:
            Spike counts; the new state; and vmem (.., time, neurons) after the reset, isyn
            (.., time, neurons, synapses) and spikes, or nothing when not recorded.
        """
        if isinstance(input_data, np.ndarray):
            input_data = torch.from_numpy(input_data).to(self.vmem.device)
        output, records = self._continue(input_data, record)
        return output, self.state(), records

    def reset_state(self) -> LIFExodus:
        """Forget the past: states become zeros without a batch axis. Returns the layer."""
        zeros = self.rest_state(1)[0]
        self.vmem, self.isyn, self.spikes = zeros[:, 0], zeros[:, 1:], zeros[:, 0].clone()
        return self

    def load_own(self, *args: Any) -> None:
        super().load_own(*args)
        self.reset_state()  # states belong to a run and are not saved

    # --- constants, states and settings by name ---

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

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants that are kept, in the present leak mode."""
        return (*self.leak.names, "bias", "threshold")

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
        families: dict[str, tuple[str, ...]] = dict.fromkeys(("weights", *LEAK_MODES), ())
        families |= {self.leak_mode: self.leak.names, "bias": ("bias",), "biases": ("bias",)}
        families["thresholds"] = ("threshold",)
        asked = _chosen("a family of parameters", family, tuple(families))
        return {name: getattr(self, name) for each in asked for name in families[each]}

    def state(self, family: Names | None = None) -> dict[str, Tensor]:
        """Return the kept vmem, isyn and spikes, or the ones asked for."""
        return {n: getattr(self, n) for n in _chosen("a family of states", family, STATES)}

    def simulation_parameters(self, family: Names | None = None) -> dict[str, Any]:
        """Return the settings, which are neither constants nor states, or the ones asked for."""
        asked = _chosen("a family of simulation parameters", family, SETTINGS)
        return {name: getattr(self, name) for name in asked}

    def attributes_named(self, name: Names) -> dict[str, Any]:
        """Return the attributes among the given names that are a constant, state or setting."""
        names = (name,) if isinstance(name, str) else tuple(name)
        every = (*self.constants, *STATES, *SETTINGS)
        return {each: getattr(self, each) for each in names if each in every}

    def reset_parameters(self) -> Self:
        """Give every constant the value it was built with. Returns the layer."""
        return self.set_attributes(self._start)

    def set_attributes(self, new_attributes: Mapping[str, Any]) -> Self:
        """Set constants, options and states by name, and return the layer.

        Nothing is set when one of them is wrong.

        Args:
            new_attributes: Any of bias, threshold, the constants of the leak in any mode,
                learning_window, max_spikes_per_dt, and vmem, isyn, spikes.
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
                allowed = (*self.constants, *STATES, *_OPTIONS)
                raise ParameterError(
                    f"there is no attribute {name!r} to set: allowed are {', '.join(allowed)}"
                )
        for name, value in ready.items():
            owner = self.leak if name in self.leak.names else self
            if name in owner.bounded:
                owner.set_constant(name, value, value.shape)
            elif name in self.constants:
                getattr(self, name).data = value  # in place: an optimizer keeps the parameter
            else:
                super().__setattr__(name, value)
        return self

    def _in_own_mode(self, name: str, value: Tensor) -> tuple[str, Tensor]:
        """Convert a constant of the leak to the present mode; return its name and value there."""
        if name in self.constants:
            return name, value
        mode, place = place_of(name)
        own = self.leak.names[place]
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
            LIFExodus.set_attributes(self, {name: value})
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

    # --- files ---

    def to_json(self) -> str:
        """Return options and constants as JSON, without states."""
        names = ("shape", "dt", "leak_mode", "learning_window", "max_spikes_per_dt", "learnable")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.max_spikes_per_dt == math.inf:
            options["max_spikes_per_dt"] = None
        options["dtype"] = str(self.dtype).removeprefix("torch.")
        options["constants"] = {name: getattr(self, name).tolist() for name in self.constants}
        return json.dumps({"class": "LIFExodus", **options})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the layer that `to_json` wrote, at rest."""
        try:
            options = json.loads(text)
            if options.pop("class") != "LIFExodus":
                raise ParameterError("expected JSON of a LIFExodus")
            most, dtype = options.pop("max_spikes_per_dt"), getattr(torch, options.pop("dtype"))
            shape, constants = tuple(options.pop("shape")), options.pop("constants")
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
            raise ParameterError(f"expected what to_json wrote, got {text[:80]!r}") from error
        most = math.inf if most is None else most
        return cls(shape, **options, **constants, dtype=dtype, max_spikes_per_dt=most)

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(filename).write_text(self.to_json(), encoding="utf-8")

    def load(self, filename: str | os.PathLike[str]) -> Self:
        """Take constants and options from a file that `save` wrote; states stay. Returns the layer.

        Shape, time step and leak mode must agree; `from_json` builds a new layer.
        """
        stored = type(self).from_json(Path(filename).read_text(encoding="utf-8"))
        for name in ("shape", "dt", "leak_mode"):
            mine, other = getattr(self, name), getattr(stored, name)
            if mine != other:
                raise ParameterError(
                    f"expected a layer with {name} {mine!r}, got {other!r} in {filename}; build "
                    "one from it with from_json()"
                )
        self.set_attributes({name: getattr(stored, name) for name in (*self.constants, *_OPTIONS)})
        return self

    def to_nir(self) -> Any:
        """Return a graph input -> CubaLIF -> output of the `nir` package.

        The layer must have one synapse a neuron. Its other settings are metadata of the graph.
        """
        if self.n_synapses != 1:
            raise ParameterError(
                f"NIR neurons have one synapse, this layer's have {self.n_synapses}; "
                "split it into layers of one synapse"
            )

        def per_neuron(values: Tensor) -> NDArray[np.float64]:
            flat = values.detach().double().flatten().expand(self.size_out)
            return flat.cpu().numpy().copy()

        alpha, beta = map(per_neuron, self.leak.factors())
        if max(alpha.max(), beta.max()) >= 1.0:
            raise ParameterError("NIR needs a leak: every alpha and beta must lie below 1, got 1")
        try:
            nir = importlib.import_module("nir")
        except ImportError as error:
            raise BackendError(
                "NIR export needs the package 'nir', which is not installed: pip install nir"
            ) from error
        metadata = {name: getattr(self, name) for name in ("dt", *_OPTIONS)}
        neurons = nir.CubaLIF(
            tau_mem=-self.dt / np.log(alpha),
            tau_syn=-self.dt / np.log(beta),
            r=1.0 / (1.0 - alpha),
            v_leak=per_neuron(self.bias) / (1.0 - alpha),
            v_threshold=per_neuron(self.threshold),
            v_reset=np.zeros_like(alpha),
            w_in=beta / (1.0 - beta),
            metadata={**metadata, "reset": "subtract"},
        )
        return nir.NIRGraph.from_list(neurons)
