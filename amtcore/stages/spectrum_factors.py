"""Transforms of windows by what blocks of a hop, and neighbours in frequency, have in common.

What a window takes from a block of samples, for all of its components, lies in a few functions of
that block; and what many neighbouring components take from all blocks in a few sums. Both are found
by singular values, as few as leave of no component more than `LEFT_OUT` of the length of its
transform: for no signal more than that share of what float32 has in its digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from amtcore.kernels.operations.running_spectrum import SIDE, Factors

Array = NDArray[np.float64]

#: Half of the last digit of float32.
LEFT_OUT = 2.0**-25
#: Components that share their sums.
_TOGETHER = 40


def can_factor(windows: Sequence[int], hop: int) -> bool:
    """Whether half of every window is whole blocks of a hop."""
    return all(length // 2 % hop == 0 for length in windows)


def _few(unit: Array) -> Array:
    """Orthonormal (function, column) that span rows but for `LEFT_OUT` of each.

    Args:
        unit: (row, part, column), each row of length 1 at most over parts and columns.
    """
    rows = unit.reshape(-1, unit.shape[-1])
    if len(rows) > rows.shape[1]:
        _, rows = np.linalg.qr(rows)  # has the same singular values and functions
    _, _, every = np.linalg.svd(rows, full_matrices=False)
    shares = np.square(unit @ every.T).sum(1)
    left = np.flip(np.cumsum(np.flip(shares, 1), 1), 1).max(0)  # without the functions from here on
    return every[: int((left > LEFT_OUT**2).sum())]


def _basis(cosines: Array, sines: Array, hop: int) -> tuple[Array, Array]:
    """Even and odd functions of a block, (function, sample)."""
    both = np.concatenate((cosines, sines))
    blocks = (both / np.linalg.norm(both, axis=1)[:, None]).reshape(len(both), -1, hop)
    return _few((blocks + blocks[..., ::-1]) / 2), _few((blocks - blocks[..., ::-1]) / 2)


def _side_by_side(p: Array, q: Array) -> Array:
    """Two matrices (row, column) as `Factors` has them, flat."""
    missing = -len(p) % SIDE
    both = np.pad(np.stack((p, q)), ((0, 0), (0, missing), (0, 0)))
    return both.reshape(2, -1, SIDE, p.shape[1]).transpose(1, 3, 0, 2).ravel()


def _reduced(p: Array, q: Array) -> tuple[int, list[Array]]:
    """Rank (0: as they are) and matrices one after another: V and W, then P and Q."""
    v, w = (_few((m / np.linalg.norm(m, axis=1)[:, None])[:, None]) for m in (p, q))
    rank = max(len(v), len(w))
    size = p.shape[1]
    if (rank + -rank % SIDE) * size + len(p) * rank >= len(p) * size:
        return 0, [p, q]
    v, w = (np.pad(m, ((0, rank - len(m)), (0, 0))) for m in (v, w))
    return rank, [v, w, p @ v.T, q @ w.T]


def factors_of(transforms: Sequence[tuple[Array, Array]], hop: int) -> Factors:
    """Factors of all windows.

    Args:
        transforms: Of every window cosines and sines, (component, sample from the instant on).
        hop: Samples of a block, of which half a window has a whole number.
    """
    functions, values, plan = [np.zeros((0, hop))], [np.zeros(0)], []
    first = component = at = 0
    for cosines, sines in transforms:
        if not len(cosines):
            continue
        even, odd = _basis(cosines, sines, hop)
        basis = np.concatenate((even, odd))
        reach, size = cosines.shape[1] // hop, cosines.shape[1] // hop * len(basis)
        p, q = ((m.reshape(-1, hop) @ basis.T).reshape(-1, size) for m in (cosines, sines))
        for group in np.array_split(np.arange(len(p)), -(-len(p) // _TOGETHER)):
            rank, parts = _reduced(p[group], q[group])
            plan.append((reach, first, len(even), len(odd), rank, at, component, len(group)))
            made = [_side_by_side(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            values, at = [*values, *made], at + sum(map(len, made))
            component += len(group)
        functions, first = [*functions, basis], first + len(basis)
    every = np.concatenate(functions)
    padded = np.pad(every, ((0, -len(every) % SIDE), (0, 0)))
    return Factors(
        torch.from_numpy(padded), torch.from_numpy(np.concatenate(values)), torch.tensor(plan)
    )
