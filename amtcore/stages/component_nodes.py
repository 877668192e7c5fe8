"""Nodes: a few frequencies that stand for the components between two channels.

Weights of the ear's filters are smooth in frequency between the centres of neighbouring channels.
Above 1.5 kHz many components f_i lie there. They are replaced by their Gauss nodes x_q, with the
Lagrange polynomials l_q of the nodes:

    sum_i I_i w(f_i) = sum_q J_q w(x_q),   J_q = sum_i I_i l_q(f_i).

This holds for every polynomial w of degree q - 1, and up to 2 q - 1 if all I_i are equal. At low
frequencies components are their own nodes. Some J_q may be negative, as weights of a quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.operations import excitation
from amtcore.kernels.operations.specific_loudness import NODES, NODES_OF_AUDIBLE, audible
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import can_compute
from amtcore.stages.spectrum import level_db
from amtcore.stages.stage import Stage, product

Array = NDArray[np.float64]

#: Components that are weighted together: the fastest size of matrices.
_PART_COMPONENTS = 120

#: First component, end, and weights (component, node); None if components are their own nodes.
Part = tuple[int, int, Array | None]

_nodes_of_audible = operator(NODES_OF_AUDIBLE)
_erb_levels = operator(excitation.ERB_LEVELS)


@dataclass(frozen=True)
class Nodes:
    """Nodes of components.

    Args:
        f_hz: Frequencies of the nodes, ascending.
        starts: First component of every group, and the end of the last group.
        weights: (component, nodes of a group); unused for components that are their own nodes.
    """

    f_hz: Array
    starts: NDArray[np.int64]
    weights: Array

    def parts(self) -> list[Part]:
        """Return the weights as matrices of a few groups each; first the groups without weights."""
        sizes, most = np.diff(self.starts), self.weights.shape[1]
        many = np.flatnonzero(sizes > most)
        alone = int(many[0]) if len(many) else len(sizes)
        parts: list[Part] = [(0, int(self.starts[alone]), None)]
        while alone < len(sizes):
            first = self.starts[alone]
            end = int(np.searchsorted(self.starts, first + _PART_COMPONENTS, "right")) - 1
            end = max(end, alone + 1)
            blocks = [
                np.eye(b - a) if b - a <= most else self.weights[a:b]
                for a, b in pairwise(self.starts[alone : end + 1])
            ]
            whole = torch.block_diag(*map(torch.from_numpy, blocks)).numpy()
            parts.append((int(first), int(self.starts[end]), whole))
            alone = end
        return parts


def nodes_of(f_hz: Array, fc_hz: Array, most: int = NODES) -> Nodes:
    """Return the nodes of components between channels.

    Args:
        f_hz: Frequencies of the components, ascending.
        fc_hz: Frequencies of the channels; a component at a channel belongs to the group above.
        most: Most nodes between two channels.
    """
    starts = np.unique(np.concatenate(([0], np.searchsorted(f_hz, fc_hz), [len(f_hz)])))
    nodes_hz, weights = [f_hz[:0]], np.zeros((len(f_hz), most))
    for first, last in pairwise(starts):
        own = f_hz[first:last]
        if last - first > most:
            own, weights[first:last] = _gauss(own, most)
        nodes_hz.append(own)
    return Nodes(np.concatenate(nodes_hz), starts.astype(np.int64), weights)


def _gauss(f_hz: Array, nodes: int) -> tuple[Array, Array]:
    """Return Gauss nodes of more components than nodes, and the weights (component, node)."""
    middle, half = (f_hz[0] + f_hz[-1]) / 2, (f_hz[-1] - f_hz[0]) / 2
    places = (f_hz - middle) / half
    basis, _ = np.linalg.qr(np.vander(places, nodes, increasing=True))
    at = np.linalg.eigvalsh(basis.T @ (places[:, None] * basis))
    others = at - at[:, None] + np.eye(nodes)
    weights = np.ones((len(f_hz), nodes))
    for q in range(nodes):
        for r in range(nodes):
            if r != q:
                weights[:, q] *= (places - at[r]) / others[r, q]
    return middle + half * at, weights


class ComponentStage(Stage):
    """A stage that weights components by filters: in float32 at their nodes, in float64 every one.

    Args:
        fs: Sampling rate in Hz.
        frequencies: Of the components in Hz, ascending.
        learnable: Whether constants are parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.
    """

    frequencies: Tensor
    nodes_hz: Tensor
    #: The buffer of the channels' centre frequencies.
    centres = ""
    _parts: list[Part]

    def __init__(
        self,
        fs: float,
        frequencies: Tensor,
        learnable: bool,
        dtype: torch.dtype,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self._components_hz = frequencies.detach().cpu().clone()

    def _nodes(self) -> Nodes:
        f_hz = self._components_hz.double().numpy()
        if self.dtype == torch.float64:
            alone = np.arange(len(f_hz) + 1)
            return Nodes(f_hz, alone, np.zeros((len(f_hz), 1)))
        return nodes_of(f_hz, self.get_buffer(self.centres).detach().cpu().double().numpy())

    def tables(self) -> dict[str, Tensor]:
        nodes = self._nodes()
        self._parts = nodes.parts()
        weights = {
            f"to_nodes_{i}": torch.from_numpy(weights).to(self.dtype)
            for i, (_, _, weights) in enumerate(self._parts)
            if weights is not None
        }
        groups = {
            "group_starts": torch.from_numpy(nodes.starts),
            "group_weights": torch.from_numpy(nodes.weights).to(self.dtype),
        }
        return {"frequencies": self._components_hz.to(self.dtype), **groups, **weights}

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        return {"nodes_hz": lambda: torch.from_numpy(self._nodes().f_hz).to(self.dtype)}

    def at_nodes(self, intensity: Tensor, least: Tensor | None = None) -> Tensor:
        """Return (.., component) at the nodes, (.., node).

        Components must be above `least` (.., 1) to count; None counts all.
        """
        self.derived("nodes_hz", self.centres)  # updates all tables
        if can_compute(intensity):
            limits = intensity.new_full((1,), -math.inf) if least is None else least
            return _nodes_of_audible(intensity, limits, *self.groups(), len(self.nodes_hz))
        heard = intensity if least is None else audible(intensity, least)
        parts = [
            heard[..., first:last]
            if weights is None
            else product(heard[..., first:last], self.get_buffer(f"to_nodes_{i}"))
            for i, (first, last, weights) in enumerate(self._parts)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def groups(self) -> tuple[Tensor, Tensor]:
        """Return `Nodes.starts` and `Nodes.weights` as tensors."""
        self.derived("nodes_hz", self.centres)  # updates all tables
        return self.get_buffer("group_starts"), self.get_buffer("group_weights")

    def by_kernel(self, *tensors: Tensor) -> bool:
        """Return True if the kernel without gradients may take these tensors and tables."""
        return self.backend is None and can_compute(*tensors)

    def blocks_of(self, weights: Tensor) -> Tensor:
        """Convert (node, place) to the kernel's layout; empty in float64, which has no kernel."""
        single = self.dtype == torch.float32
        return excitation.blocks_of(weights) if single else weights.new_empty(0)

    def weighting(self, name: str, make: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
        """Return entries of `derive` for weights (node, place) that `levels_db` takes by name."""
        return {name: make, f"{name}_blocks": lambda: self.blocks_of(make())}

    def levels_db(self, nodes: Tensor, name: str, *of: str) -> Tensor:
        """Return the level at every place of `weighting`; `of` as for `derived`."""
        weights = self.derived(name, *of)
        if self.by_kernel(nodes, weights):
            return _erb_levels(nodes, weights, self.derived(f"{name}_blocks", *of))
        return level_db(product(nodes, weights))
