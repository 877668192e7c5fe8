"""Integrate-and-fire layers as JSON and as graphs of the Neuromorphic Intermediate Representation.

NIR states neurons as differential equations: tau_mem dv/dt = v_leak - v + R I and tau_syn dI/dt =
-I + w_in S. With an input held over a step their solution is

    v' = alpha v + (1 - alpha) (v_leak + R I),   I' = beta I + (1 - beta) w_in S.

Our layer follows with R = 1 / (1 - alpha), v_leak = bias R, w_in = beta / (1 - beta). NIR resets to
a potential and our layer subtracts the threshold; the metadata of the graph say so.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import BackendError, ParameterError
from amtcore.stages.lif_attributes import HasAttributes


def cuba_lif_arguments(layer: HasAttributes) -> dict[str, NDArray[np.float64]]:
    """Return the arguments of NIR's `CubaLIF` for a layer with one synapse a neuron."""
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
    """Return a NIR graph input -> CubaLIF -> output, with other settings as metadata."""
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


_JSON_CLASS = "LIFExodus"


class HasFiles(HasAttributes):
    """Files of `LIFExodus`."""

    learnable: bool
    dtype: torch.dtype

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, int]:
            """(inputs, neurons)."""

    def to_json(self) -> str:
        """Return options and constants as JSON, without states."""
        unlimited = self.max_spikes_per_dt == math.inf
        options: dict[str, Any] = {
            "class": _JSON_CLASS,
            "shape": list(self.shape),
            "dt": self.dt,
            "leak_mode": self.leak_mode,
            "learning_window": self.learning_window,
            "max_spikes_per_dt": None if unlimited else self.max_spikes_per_dt,
            "learnable": self.learnable,
            "dtype": str(self.dtype).removeprefix("torch."),
            "constants": {name: getattr(self, name).tolist() for name in self.constants},
        }
        return json.dumps(options)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the layer that `to_json` wrote, at rest."""
        try:
            options = json.loads(text)
            if options.pop("class") != _JSON_CLASS:
                raise ParameterError(f"expected JSON of a {_JSON_CLASS}")
            most, dtype = options.pop("max_spikes_per_dt"), getattr(torch, options.pop("dtype"))
            shape, constants = tuple(options.pop("shape")), options.pop("constants")
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
            raise ParameterError(f"expected what to_json wrote, got {text[:80]!r}") from error
        most = math.inf if most is None else most
        build: Any = cls
        layer: Self = build(shape, **options, **constants, dtype=dtype, max_spikes_per_dt=most)
        return layer

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
        options = ("learning_window", "max_spikes_per_dt")
        self.set_attributes({name: getattr(stored, name) for name in (*self.constants, *options)})
        return self

    def to_nir(self) -> Any:
        """Return the layer as a graph of the `nir` package."""
        return to_nir(self)
