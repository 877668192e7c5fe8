"""A finite impulse response at every `stride`-th sample, tap after tap.

    y[n] = sum over k of taps[k] x[n stride + K - 1 - k],  K taps, n = 0 .. (T - K) // stride

Only outputs whose whole window lies inside x exist: what comes before and after a signal (the
carried history, zeros) is put there by the caller. That makes chunks equal the whole exactly.
"""

from __future__ import annotations

from torch import Tensor


def count_outputs(samples: int, taps: int, stride: int) -> int:
    """Outputs of so many samples: windows that fit."""
    return max((samples - taps) // stride + 1, 0)


def fir(x: Tensor, taps: Tensor, stride: int = 1) -> Tensor:
    """Filter every row.

    Args:
        x: (row, time).
        taps: (K,).
        stride: Samples between outputs.
    """
    count, last = count_outputs(x.shape[-1], len(taps), stride), len(taps) - 1
    y = x.new_zeros(x.shape[0], count)
    for k, tap in enumerate(taps.unbind()):
        first = last - k
        y = y + tap * x[:, first : first + (count - 1) * stride + 1 : stride] if count else y
    return y
