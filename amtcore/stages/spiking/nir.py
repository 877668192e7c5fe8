"""Integrate-and-fire layers as graphs of the Neuromorphic Intermediate Representation (NIR).

NIR states neurons as differential equations: tau_mem dv/dt = v_leak - v + R I and
tau_syn dI/dt = -I + w_in S. Held over a step, their solution is v' = alpha v + (1 - alpha)
(v_leak + R I), I' = beta I + (1 - beta) w_in S; ours follows with R = 1 / (1 - alpha),
v_leak = bias R, w_in = beta / (1 - beta). NIR resets to a potential, ours subtracts: see metadata.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import BackendError, ParameterError
from amtcore.stages.spiking.attributes import HasAttributes


def cuba_lif_arguments(layer: HasAttributes) -> dict[str, NDArray[np.float64]]:
    """Arguments of NIR's `CubaLIF` for a layer with one synapse a neuron."""
    if layer.n_synapses != 1:
        raise ParameterError(
            f"NIR neurons have one synapse, this layer's have {layer.n_synapses}; "
            "split it into layers of one synapse"
        )

    def per_neuron(values: Tensor) -> NDArray[np.float64]:
        flat = values.detach().double().flatten().expand(layer.size_out)
        return flat.cpu().numpy().copy()

    alpha, beta = (per_neuron(factor) for factor in layer.leak.factors(layer.dt))
    if max(alpha.max(), beta.max()) >= 1.0:
        raise ParameterError("NIR needs a leak: every alpha and beta must lie below 1, got 1")
    threshold = per_neuron(layer.threshold)
    return {
        "tau_mem": -layer.dt / np.log(alpha),
        "tau_syn": -layer.dt / np.log(beta),
        "r": 1.0 / (1.0 - alpha),
        "v_leak": per_neuron(layer.bias) / (1.0 - alpha),
        "v_threshold": threshold,
        "v_reset": np.zeros_like(threshold),
        "w_in": beta / (1.0 - beta),
    }


def to_nir(layer: HasAttributes) -> Any:
    """A NIR graph input -> CubaLIF -> output; its metadata hold what NIR has no place for."""
    arguments = cuba_lif_arguments(layer)
    try:
        nir = importlib.import_module("nir")
    except ImportError as error:
        raise BackendError(
            "NIR export needs the package 'nir', which is not installed: pip install nir"
        ) from error
    metadata = {
        "dt": layer.dt,
        "reset": "subtract",
        "max_spikes_per_dt": layer.max_spikes_per_dt,
        "learning_window": layer.learning_window,
    }
    return nir.NIRGraph.from_list(nir.CubaLIF(**arguments, metadata=metadata))
