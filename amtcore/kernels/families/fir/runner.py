"""From tensors to the kernel: rows and segments of them go to threads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from amtcore.kernels.families.fir.cpu import TILE, run_fir
from amtcore.kernels.vector.result_pool import empty
from amtcore.kernels.vector.threads import parallel_for

#: Outputs of one work item.
_SEGMENT = 256 * TILE


def forward(x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
    """Values of `reference.fir`."""
    inputs, y = x.detach().contiguous().numpy(), empty((x.shape[0], count), x)
    out = y.numpy()
    response = np.ascontiguousarray(taps.detach().flip(0).numpy())
    segments = -(-count // _SEGMENT)

    def one(item: int) -> None:
        row, begin = item // segments, item % segments * _SEGMENT
        end = min(begin + _SEGMENT, count)
        run_fir(inputs[row], response, stride, first, begin, end, out[row])

    parallel_for(one, x.shape[0] * segments)
    return y
