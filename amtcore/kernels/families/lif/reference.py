"""Leaky integrate-and-fire neurons with exponential synapses, as a plain loop over time.

    i_s = beta_s (i_s + x_s),   v = alpha v + sum_s i_s + bias
    n = floor(v / threshold) where v >= threshold, else 0, at most `max_spikes`
    v = v - n threshold

The count n has no derivative; its surrogate is that of v / threshold wherever v has come within
`window` of the threshold, and 0 elsewhere (`spike_count`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Coefficients of a neuron before those of its synapses: alpha, bias, threshold, window.
NEURON_COEFS = 4

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class _SpikeCount(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(vmem: Tensor, threshold: Tensor, window: Tensor, max_spikes: float) -> Tensor:
        count = torch.floor(vmem / threshold).clamp(max=max_spikes)
        return torch.where(vmem >= threshold, count, torch.zeros_like(count))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        vmem, threshold, window = ctx.saved_tensors
        slope = torch.where(vmem >= threshold - window, upstream[0] / threshold, 0.0)
        by_threshold = -slope * vmem / threshold
        return slope, by_threshold.reshape(-1, *threshold.shape).sum(0), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        vmem, threshold, window = ctx.saved_tensors
        change = tangents[0] / threshold - vmem * tangents[1] / threshold.square()
        return torch.where(vmem >= threshold - window, change, 0.0)


def spike_count(vmem: Tensor, threshold: Tensor, window: Tensor, max_spikes: float) -> Tensor:
    """Spikes of one step, with the surrogate gradient.

    Args:
        vmem: (.., neuron), before the reset.
        threshold: (neuron,).
        window: (neuron,), how far below the threshold the gradient starts.
        max_spikes: Most spikes of a neuron in one step; inf for no limit.
    """
    return _SpikeCount.apply(vmem, threshold, window, max_spikes)


def lif(x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool) -> Outputs:
    """Run the neurons.

    Args:
        x: (batch, time, neuron * synapse); a neuron's synapses lie side by side.
        coef: (neuron, 4 + synapse): alpha, bias, threshold, window, then beta of each synapse.
        state: (batch, neuron, 1 + synapse): membrane potential, synaptic currents.
        max_spikes: Most spikes of a neuron in one step; inf for no limit.
        record: Whether potentials and currents are returned as well.
    Returns:
        Spikes (batch, time, neuron); potentials after the reset, of the same shape, and currents
        (batch, time, neuron, synapse), both with 0 steps unless recorded; and the state after
        the last step.
    """
    alpha, bias, threshold, window = coef[:, :NEURON_COEFS].unbind(-1)
    beta = coef[:, NEURON_COEFS:]
    v, isyn = state[..., 0], state[..., 1:]
    spikes, potentials, currents = [], [], []
    for sample in x.unflatten(-1, beta.shape).unbind(1):
        isyn = beta * (isyn + sample)
        v = alpha * v + sum(isyn.unbind(-1)) + bias
        count = spike_count(v, threshold, window, max_spikes)
        v = v - count * threshold
        spikes.append(count)
        if record:
            potentials.append(v)
            currents.append(isyn)
    last = torch.cat((v.unsqueeze(-1), isyn), -1)
    return _stack(spikes, v), _stack(potentials, v), _stack(currents, isyn), last


def _stack(steps: list[Tensor], like: Tensor) -> Tensor:
    """(batch, time, ..); zero steps when there are none."""
    if steps:
        return torch.stack(steps, 1)
    return like.new_empty(like.shape[0], 0, *like.shape[1:])
