"""Leaky integrate-and-fire neurons with exponential synapses, as a layer for learning.

One step is a synaptic decay, a membrane decay, any number of threshold crossings, and a reset by
subtraction (equations in `kernels.operations.lif`). The gradient of the spike count is a surrogate:
v / threshold within a window below the threshold, and everywhere above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.operations.lif import LIF, spike_count
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import is_exporting, is_transformed
from amtcore.stages.constants import Range, outside_inference
from amtcore.stages.lif_attributes import STATES, Leak, check_max_spikes, check_shape, checked
from amtcore.stages.lif_files import HasFiles
from amtcore.stages.stage import Stage

#: Default time step in s.
DEFAULT_DT_S = 1e-3
_THRESHOLDS = Range(1e-9, 1e9)

_lif = operator(LIF)


class LIFExodus(HasFiles, Stage):
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

    Instantiate 2 neurons with 2 synapses each (4 input channels):

    >>> mod = LIFExodus((4, 2))

    Specify the membrane and synapse time constants, as well as the time step:

    >>> mod = LIFExodus((4, 2), tau_mem=30e-3, tau_syn=10e-3, dt=10e-3)

    Model and data go to one device, any:

    >>> data = torch.ones((1, 10, 4))
    >>> device = "cpu"
    >>> mod = mod.to(device)
    >>> data = data.to(device)
    >>> output = mod(data)
    >>> output[0, :, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    state_form = Tensor

    bias: Tensor
    threshold: Tensor
    vmem: Tensor
    isyn: Tensor
    spikes: Tensor
    #: The layer takes spikes and sends spikes.
    spiking_input = spiking_output = True
    #: No recurrent weights and no noise, ever.
    w_rec: None = None
    noise_std = 0.0
    shown = (
        "shape={0.shape}, n_synapses={0.n_synapses}, leak_mode={0.leak_mode}, dt={0.dt:g} s, "
        "learning_window={0.learning_window:g}, max_spikes_per_dt={0.max_spikes_per_dt:g}, "
        "learnable={0.learnable}"
    )

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
        self.constant("threshold", self.check_constant("threshold", threshold), _THRESHOLDS)
        self.learning_window = float(checked("learning_window", learning_window, above=0.0))
        self.max_spikes_per_dt = check_max_spikes(max_spikes_per_dt)
        for name in STATES:
            self.register_buffer(name, torch.zeros(0, dtype=dtype), persistent=False)
        self.reset_state()
        self.remember_constants()

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
        if name in ("bias", "threshold"):
            above = 0.0 if name == "threshold" else -math.inf
            return checked(name, value, ((self.size_out,),), above=above)
        return self.leak.check(name, value)

    def coefficients(self) -> Tensor:
        """Return (neuron, 4 + synapse), the rows of the recurrence."""
        alpha, beta = self.leak.factors(self.dt)
        if beta.ndim:
            beta = beta.reshape(self.size_out, -1)
        window = torch.full_like(alpha, self.learning_window)
        columns = (alpha, self.bias.double(), self.threshold.double(), window)
        rows = torch.stack([column.expand(self.size_out) for column in columns], -1)
        beta = beta.expand(self.size_out, self.n_synapses)
        return torch.cat((rows, beta), -1).to(self.dtype)

    def rest_state(self, batch: int) -> Tensor:
        """Return the state before the first step: zeros, (batch, neuron, 1 + synapse)."""
        return self.bias.new_zeros(batch, self.size_out, 1 + self.n_synapses)

    def _run(self, data: Tensor, state: Tensor | None, record: bool) -> tuple[Tensor, ...]:
        """Return spikes, vmem and isyn of a batched signal, and the state after it."""
        return _lif(
            data,
            self.coefficients(),
            self.rest_state(data.shape[0]) if state is None else state,
            self.max_spikes_per_dt,
            record,
            self.backend,
        )

    def _as_batch(self, data: Tensor) -> Tensor:
        if isinstance(data, Tensor) and not (data.is_complex() or data.is_floating_point()):
            data = data.to(self.dtype)  # spikes may be counted in integers, or be true or false
        data = self.as_input(data, (2, 3), "(batch, time, inputs) or (time, inputs)")
        if data.shape[-1] != self.size_in:
            raise ShapeError(
                f"data must have {self.size_in} inputs on its last axis, got {tuple(data.shape)}"
            )
        return data if data.ndim == 3 else data.unsqueeze(0)

    def stream(self, data: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next chunk with explicit state; the layer's own state is not used.

        Args:
            data: (batch, time, inputs) or (time, inputs).
            state: State after the previous chunk, (batch, neuron, 1 + synapse) with vmem first;
                None at the start. Gradients flow through it.
        """
        spikes, _, _, state = self._run(self._as_batch(data), state, False)
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
