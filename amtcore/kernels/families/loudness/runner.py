"""From tensors to the kernels: frames go to threads."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.families.loudness.cpu import run_law, run_nodes
from amtcore.kernels.vector.frames import new_rows, rows_of
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

#: Frames of one work item.
_ITEM_FRAMES = 128


def at_nodes(
    intensity: Tensor, least: Tensor, starts: Tensor, weights: Tensor, count: int
) -> Tensor:
    """Components above the least of their frame at the nodes of their groups.

    Args:
        intensity: (frame, component); quickest where a component's frames lie together.
        least: (frame,).
        starts: Of every group its first component, and the end of the last; int64.
        weights: (component, NODES), those of groups of more components than NODES.
        count: Nodes of all groups.
    Returns:
        (frame, node); a node's frames lie together.
    """
    frames = len(intensity)
    rows, pitch = rows_of(intensity)
    padded = frames + -frames % LANES
    limits = torch.nn.functional.pad(least, (0, padded - frames)).contiguous().numpy()
    groups, of_groups = starts.numpy(), weights.numpy().ravel()
    out, out_pitch, made = new_rows(count, frames)

    def one(item: int) -> None:
        begin, end = item * _ITEM_FRAMES, min((item + 1) * _ITEM_FRAMES, padded)
        run_nodes(rows, pitch, begin, end, limits, groups, of_groups, out, out_pitch)

    parallel_for(one, -(-padded // _ITEM_FRAMES))
    return made


def specific_loudness(
    level_db: Tensor, rows: Tensor, high_divisor: float, high_exponent: float
) -> Tensor:
    """Values of `reference.specific_loudness`."""
    channels = level_db.shape[-1]
    missing = max(LANES - channels, 0)
    levels = torch.nn.functional.pad(level_db, (0, missing)).contiguous().numpy()
    law = torch.nn.functional.pad(rows, (0, missing), value=1.0).contiguous().numpy().ravel()
    out, high = np.empty_like(levels), np.array([math.log(high_divisor), high_exponent])
    flat, made, size = levels.reshape(-1), out.reshape(-1), _ITEM_FRAMES * (channels + missing)

    def one(item: int) -> None:
        part = slice(item * size, (item + 1) * size)
        run_law(flat[part], channels + missing, law, high, made[part])

    parallel_for(one, -(-len(flat) // size))
    return torch.from_numpy(out)[..., :channels].contiguous()
