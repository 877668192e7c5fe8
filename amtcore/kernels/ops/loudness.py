"""What the loudness models compute between their products: by a kernel where nobody asks for more
than numbers, else by torch.

The kernels have no gradient and no second lowering; float64 takes torch's own functions, which are
exact to the type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.loudness import reference, runner
from amtcore.kernels.families.loudness.cpu import NODES as NODES
from amtcore.kernels.families.loudness.reference import audible as audible
from amtcore.kernels.families.loudness.reference import law_rows as law_rows
from amtcore.kernels.ops.autograd import wants_derivative
from amtcore.kernels.vector.exporting import is_exporting


def can_compute(*tensors: Tensor) -> bool:
    """Whether the kernels may: float32 in the processor's memory, no derivative, no tensor that
    only looks like one. Exported programs may run elsewhere, so they get torch's operators."""
    if is_exporting() or wants_derivative(*tensors):
        return False
    return all(
        type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"
        and t.dtype == torch.float32
        for t in tensors
    )  # fmt: skip


@torch.library.custom_op("amtcore::loudness_nodes", mutates_args=(), device_types="cpu")
def _nodes(intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int) -> Tensor:
    return runner.at_nodes(intensity, least, starts, weights, count).contiguous()


@_nodes.register_fake
def _(intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int) -> Tensor:
    return intensity.new_empty(intensity.shape[0], count)


@torch.library.custom_op("amtcore::specific_loudness", mutates_args=(), device_types="cpu")
def _law(level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float) -> Tensor:
    return runner.specific_loudness(level_db, rows, high_divisor, high_exponent)


@_law.register_fake
def _(level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float) -> Tensor:
    return level_db.new_empty(level_db.shape)


def nodes_of_audible(
    intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int
) -> Tensor:
    """(.., component) and (.., 1), the least that counts -> (.., node), see `runner.at_nodes`."""
    least = least.detach().expand(*intensity.shape[:-1], 1)
    rows, limits = intensity.detach().flatten(0, -2), least.flatten()
    # A compiler needs an operator; outside of one that would cost more than small blocks take.
    call = _nodes if torch.compiler.is_compiling() else runner.at_nodes
    return call(rows, limits, starts, weights, count).unflatten(0, intensity.shape[:-1])


def specific_loudness(
    level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float
) -> Tensor:
    """Excitation to specific loudness; arguments as in `reference.specific_loudness`."""
    if can_compute(level_db, rows):
        call = _law if torch.compiler.is_compiling() else runner.specific_loudness
        return call(level_db.detach(), rows.detach(), high_divisor, high_exponent)
    return reference.specific_loudness(level_db, rows, high_divisor, high_exponent)
