"""Components between two channels as a few that stand for them: nodes.

Weights of the ear's filters are smooth in frequency between the centres of neighbouring channels,
where above 1.5 kHz many components lie. With the Gauss nodes x_q of these components f_i, each
counted once, and the Lagrange polynomials l_q of the nodes,

    sum_i I_i w(f_i) = sum_q J_q w(x_q),   J_q = sum_i I_i l_q(f_i)

for every w that is a polynomial of degree q - 1, and up to 2 q - 1 where all I_i are alike. Below,
components are their own nodes. Some J_q may be negative: they are weights of a rule, no sounds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import block_diag
from torch import Tensor

from amtcore.stages.base import Stage, product

Array = NDArray[np.float64]

#: Nodes of the components between two channels. Loudness changes by 1e-6 (traces of speech, noise
#: and tones; 6e-6 for a tone at 9 kHz near threshold), a tenth of that with four.
NODES = 3
#: Components that are weighted together: matrices of this size cost least.
_PART_COMPONENTS = 120

#: Components from the first to before the last, and their weights (component, node); None where
#: they are their own nodes.
Part = tuple[int, int, Array | None]


def node_parts(f_hz: Array, fc_hz: Array, nodes: int = NODES) -> tuple[Array, list[Part]]:
    """Nodes of components.

    Args:
        f_hz: Of the components, ascending.
        fc_hz: Of the channels; one at a component's frequency belongs to what is above.
        nodes: Nodes of the components between two channels, where there are more of these.
    Returns:
        Frequencies of the nodes, ascending; and which components add to which, nodes in order.
    """
    edges = np.unique(np.concatenate(([0], np.searchsorted(f_hz, fc_hz), [len(f_hz)])))
    groups = [(int(a), int(b)) for a, b in pairwise(edges)]
    alone = next((i for i, (a, b) in enumerate(groups) if b - a > nodes), len(groups))
    first = groups[alone][0] if alone < len(groups) else len(f_hz)
    frequencies: list[Array] = [f_hz[:first]]
    parts: list[Part] = [(0, first, None)]
    for together in _batches(groups[alone:]):
        made = [_gauss(f_hz[a:b], nodes) for a, b in together]
        frequencies += [x for x, _ in made]
        weights = block_diag(*(weights for _, weights in made))
        parts.append((together[0][0], together[-1][1], weights))
    return np.concatenate(frequencies), parts


def _batches(groups: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Successive groups, a few together."""
    batches: list[list[tuple[int, int]]] = []
    for first, last in groups:
        if batches and last - batches[-1][0][0] <= _PART_COMPONENTS:
            batches[-1].append((first, last))
        else:
            batches.append([(first, last)])
    return batches


def _gauss(f_hz: Array, nodes: int) -> tuple[Array, Array]:
    """Gauss nodes of some components, and the weights (component, node); no more than components
    there are, which then are their own."""
    if len(f_hz) <= nodes:
        return f_hz, np.eye(len(f_hz))
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

    def _plan(self) -> tuple[Array, list[Part]]:
        f_hz = self._components_hz.double().numpy()
        if self.dtype == torch.float64:
            return f_hz, [(0, len(f_hz), None)]
        return node_parts(f_hz, self.get_buffer(self.centres).detach().cpu().double().numpy())

    def tables(self) -> dict[str, Tensor]:
        """The frequencies of the components, and what these add to their nodes."""
        _, self._parts = self._plan()
        weights = {
            f"to_nodes_{i}": torch.from_numpy(weights).to(self.dtype)
            for i, (_, _, weights) in enumerate(self._parts)
            if weights is not None
        }
        return {"frequencies": self._components_hz.to(self.dtype), **weights}

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """The frequencies of the nodes."""
        return {"nodes_hz": lambda: torch.from_numpy(self._plan()[0]).to(self.dtype)}

    def at_nodes(self, intensity: Tensor) -> Tensor:
        """(.., component) -> (.., node)."""
        self.derived("nodes_hz", self.centres)  # all tables are true from here on
        parts = [
            intensity[..., first:last]
            if weights is None
            else product(intensity[..., first:last], self.get_buffer(f"to_nodes_{i}"))
            for i, (first, last, weights) in enumerate(self._parts)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
