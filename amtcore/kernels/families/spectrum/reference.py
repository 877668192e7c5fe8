"""Powers of the components of every frame from factors of their transforms, plainly.

    a[r, b] = sum over n of basis[r, n] x[b hop + n]              of block b, a hop of samples
    E[m, r], O[m, r] = a[r, c + m] +- a[r, c - 1 - m]             about the instant of a frame
    E', O' = V E, W O;   power of component k = (P[k] . E')^2 + (Q[k] . O')^2

Basis functions are even or odd about the middle of a block: the block before an instant, reversed,
has the same coefficients, those of odd functions negative (E and O change places).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Columns of a plan, a row for every group of components: blocks of half a window, its first basis
#: function, how many are even and how many odd, how many rows V and W have (0: there are none),
#: where factors begin, first component, components.
REACH, FIRST, EVEN, ODD, RANK, AT, COMPONENT, COUNT = range(8)
#: Rows of factors lie side by side so many at a time, of P (or V) and then of Q (or W); missing
#: ones are 0.
SIDE = 4


class Factors(NamedTuple):
    """Transforms of all windows.

    Args:
        basis: (function, sample of a block), whole multiples of SIDE functions.
        values: Flat: of every group V and W, then P and Q, as (SIDE rows, column, 2 SIDE).
        plan: (group, 8), int64, groups of a window beside each other.
    """

    basis: Tensor
    values: Tensor
    plan: Tensor


def _rows(values: Tensor, at: int, rows: int, columns: int) -> tuple[Tensor, Tensor, int]:
    """Two matrices (row, column) from `at` on, and where they end."""
    sides = -(-rows // SIDE)
    end = at + sides * columns * 2 * SIDE
    both = values[at:end].view(sides, columns, 2, SIDE).permute(2, 0, 3, 1).flatten(1, 2)
    return both[0, :rows], both[1, :rows], end


def powers(x: Tensor, factors: Factors) -> Tensor:
    """(row, sample) -> (row, frame, component); the first frame's instant is as many blocks from
    the start as the longest half window has."""
    hop, reach = factors.basis.shape[1], int(factors.plan[:, REACH].max())
    blocks = x[:, : x.shape[1] // hop * hop].unflatten(1, (-1, hop)) @ factors.basis.T
    frames, made = blocks.shape[1] - 2 * reach + 1, []
    for group in factors.plan.tolist():
        own = blocks[..., group[FIRST] : group[FIRST] + group[EVEN] + group[ODD]]
        sign = torch.ones(group[EVEN] + group[ODD]).to(own)
        sign[group[EVEN] :] = -1.0
        even, odd = [], []
        for m in range(group[REACH]):
            after, before = (own[:, reach + i : reach + i + frames] for i in (m, -1 - m))
            even.append(after + sign * before)
            odd.append(after - sign * before)
        e, o, at = torch.cat(even, -1), torch.cat(odd, -1), group[AT]
        if group[RANK]:
            v, w, at = _rows(factors.values, at, group[RANK], e.shape[-1])
            e, o = e @ v.T, o @ w.T
        p, q, _ = _rows(factors.values, at, group[COUNT], e.shape[-1])
        made.append((e @ p.T).square() + (o @ q.T).square())
    return torch.cat(made, -1)
