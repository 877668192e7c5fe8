"""A drawing of a leaky integrate-and-fire neuron, and of the spikes of a tone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from matplotlib.axes import Axes

from amtcore import LIFExodus
from docs.builder.figures.hearing import _of


def _membrane(axes: Axes) -> None:
    layer = LIFExodus((1, 1), tau_mem=0.02, tau_syn=0.005, learnable=False)
    drive = torch.zeros(1, 200, 1)
    drive[:, 20:90] = 0.02
    drive[:, 130:180] = 0.06
    _, _, records = layer.evolve(drive, record=True)
    fired = np.flatnonzero(records["spikes"][0, :, 0].numpy())
    axes.plot(records["vmem"][0, :, 0].detach(), label="membrane after the reset")
    axes.plot(10 * drive[0, :, 0], color="#808080", linewidth=0.9, label="input, ten times")
    axes.vlines(fired, 1.05, 1.2, color="#c8642b", linewidth=1, label="spikes")
    axes.axhline(1, color="#808080", linestyle="--", linewidth=0.8)
    axes.set(xlabel="time (ms)", ylabel="units of the threshold", ylim=(-0.1, 1.6))
    axes.set_title("One neuron, two steps of input")
    axes.legend(ncols=3, loc="upper left")


FIGURES: Mapping[str, Callable[[], str]] = {"neuron": _of("neuron", _membrane)}
