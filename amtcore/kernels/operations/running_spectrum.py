"""Powers of the components of every frame from factors of their transforms.

    a[r, b] = sum over n of basis[r, n] x[b hop + n]              of block b, a hop of samples
    E[m, r], O[m, r] = a[r, c + m] +- a[r, c - 1 - m]             about the instant of a frame
    E', O' = V E, W O;   power of component k = (P[k] . E')^2 + (Q[k] . O')^2

Basis functions are even or odd about the middle of a block. A reversed block therefore has the
coefficients of the block, with the sign changed for odd functions: E and O change places.

The kernel computes float32 on the CPU without gradients. The plain form has gradients and runs
everywhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.vector.arrays import ITEM_FRAMES, new_rows
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, transpose
from amtcore.kernels.vector.simd import LANES, fma, four_sums, vload, vstore
from amtcore.kernels.vector.threads import parallel_for

#: Columns of a plan, which has a row for every group of components. They are: blocks of half a
#: window, first basis function, even functions, odd functions, rows of V and W (or 0), start of the
#: factors, first component, and number of components.
REACH, FIRST, EVEN, ODD, RANK, AT, COMPONENT, COUNT = range(8)
#: Rows of P (or V) that lie side by side in memory, followed by as many of Q (or W), padded with 0.
SIDE = 4


class Factors(NamedTuple):
    """Factors of the transforms of all windows.

    Args:
        basis: (function, sample of a block), whole multiples of SIDE functions.
        values: V and W, then P and Q of every group, flat, as (SIDE rows, column, 2 SIDE).
        plan: (group, 8), int64; groups of a window beside each other.
    """

    basis: Tensor
    values: Tensor
    plan: Tensor


def _rows(values: Tensor, at: int, rows: int, columns: int) -> tuple[Tensor, Tensor, int]:
    """Return the two matrices (row, column) at `at`, and the place after them."""
    sides = -(-rows // SIDE)
    end = at + sides * columns * 2 * SIDE
    both = values[at:end].view(sides, columns, 2, SIDE).permute(2, 0, 3, 1).flatten(1, 2)
    return both[0, :rows], both[1, :rows], end


def reference(x: Tensor, factors: Factors) -> Tensor:
    """Return powers: (row, sample) -> (row, frame, component).

    The first frame is the first whose longest window lies inside the signal.
    """
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


@part
def _fold(
    made: Any, pitch: int, instant: int, reach: int, first: int, even: int, odd: int, e: Any, o: Any
) -> None:
    """Compute E and O of LANES frames: even and odd parts about their instants."""
    place = 0
    for m in range(reach):
        for r in range(even + odd):
            at = (first + r) * pitch + instant
            after, before = vload(made, at + m), vload(made, at - 1 - m)
            total, difference = after + before, after - before
            if r < even:
                vstore(e, place, total)
                vstore(o, place, difference)
            else:
                vstore(e, place, difference)
                vstore(o, place, total)
            place += LANES


@part
def _products(
    e: Any, o: Any, columns: int, values: Any, at: int, of_e: Any, of_o: Any, to: int
) -> None:
    """Multiply SIDE rows of P (or V) with E, and SIDE rows of Q (or W) with O."""
    pair = 2 * SIDE
    four_sums(e, 0, LANES, columns, values, at, pair, 1, 0.0, of_e, to, LANES)
    four_sums(o, 0, LANES, columns, values, at + SIDE, pair, 1, 0.0, of_o, to, LANES)


@part
def _powers_of_group(
    e: Any, o: Any, columns: int, count: int, values: Any, at: int, real: Any, imaginary: Any,
    out: Any, to: int, pitch: int,
) -> None:  # fmt: skip
    """Write the powers of a group of components to rows of `out`."""
    for k in range(0, count, SIDE):
        _products(e, o, columns, values, at, real, imaginary, 0)
        at += 2 * SIDE * columns
        for i in range(min(SIDE, count - k)):
            x, y = vload(real, i * LANES), vload(imaginary, i * LANES)
            vstore(out, to + (k + i) * pitch, fma(y, y, x * x))


@part
def room(columns: int, like: Any) -> Any:
    """Allocate scratch for `powers_of_frames`: E and O, E' and O', and SIDE rows of products."""
    size, side = columns * LANES, SIDE * LANES
    return (
        aligned(size, like), aligned(size, like), aligned(size, like), aligned(size, like),
        aligned(side, like), aligned(side, like),
    )  # fmt: skip


@part
def blocks_of(frames: int, reach: int) -> int:
    """Return the number of blocks under the windows of `frames` frames, in whole vectors."""
    count = frames + 2 * reach
    return count + -count % LANES


@part
def coefficients_of(x: Any, begin: int, count: int, basis: Any, made: Any) -> None:
    """Compute coefficients of `count` blocks from block `begin` on, flat (function, block)."""
    functions, hop = basis.shape
    blocks, known = aligned(count * hop, x), min(len(x) // hop - begin, count)
    transpose(x, begin * hop, hop, known, hop, blocks, count, count)
    flat = basis.reshape(-1)
    for r in range(0, functions, SIDE):
        for b in range(0, count, LANES):
            at = r * count + b
            four_sums(blocks, b, count, hop, flat, r * hop, 1, hop, 0.0, made, at, count)


@part
def powers_of_frames(
    made: Any, count: int, instant: int, values: Any, plan: Any, work: Any, out: Any, to: int,
    pitch: int,
) -> None:  # fmt: skip
    """Compute powers of LANES frames, from `count` blocks of coefficients in `made`.

    Block `instant` begins at the instant of the first frame; `work` comes from `room`. The output
    is flat (component, frame), in rows of `pitch` frames; the first frame goes to `to`.
    """
    e, o, fewer_e, fewer_o, real, imaginary = work
    folded = -1
    for g in range(plan.shape[0]):
        group = plan[g]
        if group[FIRST] != folded:
            folded = group[FIRST]
            _fold(made, count, instant, group[REACH], folded, group[EVEN], group[ODD], e, o)
        size, at = group[REACH] * (group[EVEN] + group[ODD]), group[AT]
        place = to + group[COMPONENT] * pitch
        if group[RANK] == 0:
            _powers_of_group(
                e, o, size, group[COUNT], values, at, real, imaginary, out, place, pitch
            )
            continue
        for r in range(0, group[RANK], SIDE):
            _products(e, o, size, values, at, fewer_e, fewer_o, r * LANES)
            at += 2 * SIDE * size
        _powers_of_group(
            fewer_e, fewer_o, group[RANK], group[COUNT], values, at, real, imaginary, out, place,
            pitch,
        )  # fmt: skip


@kernel
def _run_powers(
    x: Any, begin: int, end: int, reach: int, basis: Any, values: Any, plan: Any, columns: int,
    out: Any, to: int, pitch: int,
) -> None:  # fmt: skip
    """Compute powers of frames begin..end of a signal `x`, LANES at a time.

    `reach` is the number of blocks before the instant of frame 0; E has at most `columns` columns.
    `out` is flat (component, frame), in rows of `pitch` frames; frame `begin` goes to `to`.
    """
    work = room(columns, x)
    count = blocks_of(end - begin, reach)
    made = aligned(count * basis.shape[0], x)
    coefficients_of(x, begin, count, basis, made)
    for frame in range(0, end - begin, LANES):
        powers_of_frames(made, count, frame + reach, values, plan, work, out, to + frame, pitch)


def _cpu(device: Device, x: Tensor, tables: list[Tensor], components: int, frames: int) -> Tensor:
    leading, x = x.shape[:-1], x.detach().flatten(0, -2)
    basis, values, plan = (table.numpy() for table in tables)
    reach, rows = int(plan[:, REACH].max()), x.contiguous().numpy()
    columns = int((plan[:, REACH] * (plan[:, EVEN] + plan[:, ODD])).max()) + SIDE
    padded = frames + -frames % LANES
    parts, every = -(-padded // ITEM_FRAMES), len(rows) * padded
    out, pitch, made = new_rows(components, every)

    def one(item: int) -> None:
        row, begin = item // parts, item % parts * ITEM_FRAMES
        end = min(begin + ITEM_FRAMES, padded)
        _run_powers(
            rows[row], begin, end, reach, basis, values, plan, columns, out,
            row * padded + begin, pitch,
        )  # fmt: skip

    parallel_for(one, len(rows) * parts)
    return made.unflatten(0, (len(rows), padded))[:, :frames].unflatten(0, leading)


#: (.., time), `Factors` as a list, components, frames that lie wholly in the signal -> (.., frame,
#: component).
RUNNING_POWERS = RowOperation(
    name="running_powers",
    run=_cpu,
    on_gpu=False,
    fake=lambda x, tables, components, frames: x.new_empty(*x.shape[:-1], frames, components),
)
