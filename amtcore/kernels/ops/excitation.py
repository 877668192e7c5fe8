"""Level per ERB and excitation patterns by the kernel for numbers alone: neither gradients nor a
second lowering, and what a compiler sees is torch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.excitation import runner
from amtcore.kernels.families.excitation.reference import Tables as Tables
from amtcore.kernels.families.excitation.runner import blocks_of as blocks_of
from amtcore.kernels.ops import loudness


def can_compute(*tensors: Tensor) -> bool:
    """Whether the kernel may: as for those of loudness, and outside of a compiler."""
    return not torch.compiler.is_compiling() and loudness.can_compute(*tensors)


def levels_db(intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """(.., source) -> (.., place) in dB; weights as for `runner.levels_db`."""
    made = runner.levels_db(intensity.detach().flatten(0, -2), weights, blocks)
    return made.unflatten(0, intensity.shape[:-1])


def pattern(intensity: Tensor, levels_db: Tensor, tables: Tables) -> Tensor:
    """(.., source) and (.., level) -> (.., channel) in dB, see `reference.pattern`."""
    sources, levels = (values.detach().flatten(0, -2) for values in (intensity, levels_db))
    return runner.pattern(sources, levels, tables).unflatten(0, intensity.shape[:-1])
