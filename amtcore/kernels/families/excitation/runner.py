"""From tensors to the kernels: frames go to threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.families.excitation import reference
from amtcore.kernels.families.excitation.cpu import GROUP, SUMS, run_levels, run_pattern
from amtcore.kernels.families.excitation.reference import Tables
from amtcore.kernels.vector.frames import new_rows, rows_of
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

Array = NDArray[Any]

#: Frames of one work item.
_ITEM_FRAMES = 128


def blocks_of(weights: Tensor) -> Tensor:
    """Weights as `cpu.weigh` reads them.

    Args:
        weights: (source, target), float32.
    Returns:
        (block, group, 2 + GROUP SUMS) of SUMS targets and GROUP sources: the number of the group,
        the largest magnitude of these weights, and the weights (source, target). Groups with the
        largest come first.
    """
    values = weights.detach().cpu().numpy()
    missing = -np.array(values.shape) % (GROUP, SUMS)
    padded = np.pad(values, [(0, n) for n in missing])
    shape = padded.shape[0] // GROUP, GROUP, padded.shape[1] // SUMS, SUMS
    blocks = padded.reshape(shape).transpose(2, 0, 1, 3).reshape(shape[2], shape[0], GROUP * SUMS)
    peaks = np.abs(blocks).max(2)
    groups = np.broadcast_to(np.arange(shape[0], dtype=values.dtype), peaks.shape)
    rows = np.concatenate((groups[..., None], peaks[..., None], blocks), 2)
    order = np.argsort(-peaks, 1, "stable")
    return torch.from_numpy(np.take_along_axis(rows, order[..., None], 1))


def _strange(*parts: Tensor) -> Array:
    """Which frames of (frame, value) hold something else than finite numbers: the kernels, which
    leave out what adds nothing, would pass over it."""
    with np.errstate(all="ignore"):
        sums = sum(part.T.numpy().sum(0) for part in parts)
    return np.flatnonzero(~np.isfinite(sums))


def _over_frames(one: Callable[[int, int], None], frames: int) -> None:
    def item(i: int) -> None:
        one(i * _ITEM_FRAMES, min((i + 1) * _ITEM_FRAMES, frames))

    parallel_for(item, -(-frames // _ITEM_FRAMES))


def levels_db(intensity: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Values of `reference.levels_db`; a place's frames lie together.

    Args:
        intensity: (frame, source); quickest where a source's frames lie together.
        weights: (source, place).
        blocks: The same as `blocks_of` has it.
    """
    (rows, pitch), tables = rows_of(intensity), blocks.numpy()
    (frames, sources), places = intensity.shape, weights.shape[1]
    out, out_pitch, made = new_rows(places, frames)

    def one(begin: int, end: int) -> None:
        run_levels(rows, pitch, begin, end, sources, tables, places, out, out_pitch)

    _over_frames(one, frames + -frames % LANES)
    strange = _strange(intensity)
    if len(strange):
        with torch.autocast("cpu", enabled=False):  # it would take half of the digits
            made[strange] = reference.levels_db(intensity[strange], weights)
    return made


def pattern(intensity: Tensor, levels_db: Tensor, tables: Tables) -> Tensor:
    """Values of `reference.pattern`; arguments as there, quickest as in `levels_db`."""
    (rows, pitch), (levels, level_pitch) = rows_of(intensity), rows_of(levels_db)
    frames, sources = intensity.shape
    constants = [table.contiguous().numpy() for table in tables if table is not tables.upper]
    padded = frames + -frames % LANES
    out = np.empty((padded, len(tables.away)), np.float32)

    def one(begin: int, end: int) -> None:
        run_pattern(
            rows, pitch, levels, level_pitch, begin, end, sources, *constants, out.reshape(-1)
        )

    _over_frames(one, padded)
    made = torch.from_numpy(out[:frames])
    strange = _strange(intensity, levels_db)
    if len(strange):
        with torch.autocast("cpu", enabled=False):
            made[strange] = reference.pattern(intensity[strange], levels_db[strange], tables)
    return made
