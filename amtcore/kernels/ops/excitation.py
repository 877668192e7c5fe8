"""Level per ERB and excitation patterns by the kernel for numbers alone: neither gradients nor a
second lowering. A compiler sees one operator for each, which computes the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.excitation import runner
from amtcore.kernels.families.excitation.reference import Tables as Tables
from amtcore.kernels.families.excitation.runner import blocks_of as blocks_of


@torch.library.custom_op("amtcore::erb_levels", mutates_args=(), device_types="cpu")
def _levels(intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    return runner.levels_db(intensity, weights, blocks).contiguous()


@_levels.register_fake
def _(intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    return intensity.new_empty(intensity.shape[0], weights.shape[1])


@torch.library.custom_op("amtcore::excitation_pattern", mutates_args=(), device_types="cpu")
def _pattern(intensity: Tensor, levels_db: Tensor, tables: list[Tensor]) -> Tensor:
    return runner.pattern(intensity, levels_db, Tables(*tables)).contiguous()


@_pattern.register_fake
def _(intensity: Tensor, levels_db: Tensor, tables: list[Tensor]) -> Tensor:
    return intensity.new_empty(intensity.shape[0], tables[0].shape[0])


def levels_db(intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """(.., source) -> (.., place) in dB; weights as for `runner.levels_db`."""
    call = _levels if torch.compiler.is_compiling() else runner.levels_db
    made = call(intensity.detach().flatten(0, -2), weights, blocks)
    return made.unflatten(0, intensity.shape[:-1])


def pattern(intensity: Tensor, levels_db: Tensor, tables: Tables) -> Tensor:
    """(.., source) and (.., level) -> (.., channel) in dB, see `reference.pattern`."""
    sources, levels = (values.detach().flatten(0, -2) for values in (intensity, levels_db))
    if torch.compiler.is_compiling():
        made = _pattern(sources, levels, list(tables))
    else:
        made = runner.pattern(sources, levels, tables)
    return made.unflatten(0, intensity.shape[:-1])
