"""What the loudness models compute between their products: by a kernel where nobody asks for more
than numbers, else by torch.

The kernels have no gradient and no second lowering; float64 takes torch's own functions, which are
exact to the type.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.families.loudness import reference, runner
from amtcore.kernels.families.loudness.cpu import NODES as NODES
from amtcore.kernels.families.loudness.reference import audible as audible
from amtcore.kernels.families.loudness.reference import law_rows as law_rows
from amtcore.kernels.ops.autograd import wants_derivative


def can_compute(*tensors: Tensor) -> bool:
    """Whether the kernels may: float32 in the processor's memory, no derivative, no compiler, no
    tensor that only looks like one."""
    if torch.compiler.is_compiling() or wants_derivative(*tensors):
        return False
    return all(
        type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"
        and t.dtype == torch.float32
        for t in tensors
    )  # fmt: skip


def nodes_of_audible(
    intensity: Tensor, least: Tensor, starts: NDArray[np.int64], weights: NDArray[np.float32]
) -> Tensor:
    """(.., component) and (.., 1), the least that counts -> (.., node), see `runner.at_nodes`."""
    least = least.detach().expand(*intensity.shape[:-1], 1)
    rows, limits = intensity.detach().flatten(0, -2), least.flatten()
    made = runner.at_nodes(rows, limits, starts, weights)
    return made.unflatten(0, intensity.shape[:-1])


def specific_loudness(
    level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float
) -> Tensor:
    """Excitation to specific loudness; arguments as in `reference.specific_loudness`."""
    if can_compute(level_db, rows):
        given = level_db.detach(), rows.detach()
        return runner.specific_loudness(*given, high_divisor, high_exponent)
    return reference.specific_loudness(level_db, rows, high_divisor, high_exponent)
