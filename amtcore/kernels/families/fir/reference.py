"""A finite impulse response at every `stride`-th sample, tap after tap.

    y[n] = sum over k of taps[k] x[first + n stride + K - 1 - k],  K taps, n = 0 .. count - 1

Samples outside x are 0, so a whole signal needs no padding; what a stream carries from chunk to
chunk is put before the chunk by the caller. Chunks then equal the whole exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_outputs(samples: int, taps: int, stride: int) -> int:
    """Outputs whose windows lie inside so many samples."""
    return max((samples - taps) // stride + 1, 0)


def windows(x: Tensor, first: int, samples: int) -> Tensor:
    """The `samples` samples of every row from `first` on, zeros where x has none."""
    length = x.shape[-1]
    begin, end = (min(max(edge, 0), length) for edge in (first, first + samples))
    before = min(max(-first, 0), samples)
    return torch.nn.functional.pad(x[..., begin:end], (before, samples - before - (end - begin)))


def fir(x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
    """Filter every row.

    Args:
        x: (row, time).
        taps: (K,).
        stride: Samples between outputs.
        first: Index in x of the first sample of the first window; below 0 it begins before x.
        count: Outputs of a row.
    """
    y, last = x.new_zeros(x.shape[0], count), len(taps) - 1
    seen = windows(x, first, max(count - 1, 0) * stride + len(taps))
    for k, tap in enumerate(taps.unbind()):
        begin = last - k
        y = y + tap * seen[:, begin : begin + (count - 1) * stride + 1 : stride] if count else y
    return y
