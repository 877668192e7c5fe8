"""From tensors to the kernel: stretches of every signal go to threads."""

from __future__ import annotations

from torch import Tensor

from amtcore.kernels.families.spectrum.cpu import run_powers
from amtcore.kernels.families.spectrum.reference import EVEN, ODD, REACH, SIDE, Factors
from amtcore.kernels.vector.frames import new_rows
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

#: Frames of one work item.
_ITEM_FRAMES = 128


def powers(x: Tensor, factors: Factors, components: int) -> Tensor:
    """Values of `reference.powers`; a component's frames lie together.

    Args:
        x: (row, sample).
        factors: Of the transforms.
        components: Of all groups.
    """
    basis, values, plan = (table.numpy() for table in factors)
    reach, rows = int(plan[:, REACH].max()), x.contiguous().numpy()
    frames = rows.shape[1] // basis.shape[1] - 2 * reach + 1
    columns = int((plan[:, REACH] * (plan[:, EVEN] + plan[:, ODD])).max()) + SIDE
    padded = frames + -frames % LANES
    parts, every = -(-padded // _ITEM_FRAMES), len(rows) * padded
    out, pitch, made = new_rows(components, every)

    def one(item: int) -> None:
        row, begin = item // parts, item % parts * _ITEM_FRAMES
        end = min(begin + _ITEM_FRAMES, padded)
        run_powers(
            rows[row], begin, end, reach, basis, values, plan, columns, out,
            row * padded + begin, pitch,
        )  # fmt: skip

    parallel_for(one, len(rows) * parts)
    return made.unflatten(0, (len(rows), padded))[:, :frames]
