"""Means over frames of the Hilbert envelopes of whole signals, at a reduced rate.

    signal -> bands, and their means over cells of `cell_samples` samples, by the fused kernel
           -> values at times that divide the signal evenly -> Hilbert envelope
           -> means over frames.

A filter passes little above some multiples of its centre, so its band needs few values. A value
comes from the polynomial that has the same means as the `TAPS` cells around it. The values divide
the signal evenly, so that transforms have the period of the signal, and their number has small
factors whatever the length of the signal. An envelope takes one real transform and one inverse.

Against means of the envelope at full rate, the error is 1e-4 of the norm for a second of noise or
a tone, and 3e-4 for a tenth of a second. It lies at the ends of the signal, where the envelope
jumps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from amtcore.kernels.chain import FilterBank
from amtcore.kernels.operations.envelope import fast_length

#: The least number of cells in a second, in a period of the highest band edge, and in a frame.
CELL_RATE_HZ, CELLS_PER_PERIOD, CELLS_PER_FRAME = 2000.0, 26.0, 20.0
#: Cells around a value, an even number.
TAPS = 12
#: Values and rows of a block, which stays in the caches of a CPU.
_BLOCK_VALUES, _BLOCK_ROWS = 2048, 8


@dataclass(frozen=True)
class EnvelopeFilters:
    """The filters of all channels, without the Hilbert envelopes that some outputs become.

    - `is_envelope` is True for each filter of a channel whose output becomes an envelope.
    - `plain` holds the other filters, and `enveloped` these.
    - `upper_hz` are the upper band edges of a channel's filters with envelopes.
    """

    is_envelope: Sequence[bool]
    plain: FilterBank
    enveloped: FilterBank
    upper_hz: Sequence[float]


def cell_samples(fs_hz: float, upper_hz: Sequence[float], frame_rate_hz: float) -> list[int]:
    """Return the samples of each filter's cells, the least of them times powers of two."""
    least_hz = max(CELL_RATE_HZ, CELLS_PER_FRAME * frame_rate_hz)
    rates_hz = [max(least_hz, CELLS_PER_PERIOD * edge_hz) for edge_hz in upper_hz]
    step = max(int(fs_hz / max(rates_hz)), 1)
    return [step << max(int(math.log2(fs_hz / step / rate_hz)), 0) for rate_hz in rates_hz]


def zeros_around(samples: int, steps: Sequence[int]) -> tuple[int, int]:
    """Return how many zeros lie before and after a signal in the cells of `envelope_means`."""
    around = TAPS // 2 * max(steps)
    return around, around + -samples % max(steps)


def _polynomials(step: int) -> Tensor:
    """Return the weights (power, tap) of cells, by powers of the distance from cell TAPS/2 - 1.

    Sums of the cells' means of the first `TAPS` powers of time, so weighted, are the powers.
    """
    cells = torch.arange(TAPS, dtype=torch.float64) - (TAPS // 2 - 1)
    times = cells.unsqueeze(1) + (torch.arange(step) - (step - 1) / 2) / step
    means = (times ** torch.arange(TAPS)[:, None, None]).mean(-1)  # (power, tap)
    return torch.linalg.inv(means).T


def _values(cells: Tensor, samples: int, step: int, points: int) -> Tensor:
    """Return (column, point): the values at the middles of equal parts of the signal."""
    values = cells.new_empty(cells.shape[1], points)
    polynomials, taps = _polynomials(step).to(cells.device), torch.arange(TAPS, device=cells.device)
    for begin in range(0, points, _BLOCK_VALUES):
        end = min(begin + _BLOCK_VALUES, points)
        middle = torch.arange(begin, end, dtype=torch.float64, device=cells.device) + 0.5
        place = middle * (samples / points / step) + 0.5
        first = place.floor()
        weights = torch.linalg.vander(place - first, N=TAPS) @ polynomials
        near = first.long().unsqueeze(1) + taps
        block = embedding_bag(near, cells, mode="sum", per_sample_weights=weights.to(cells.dtype))
        values[:, begin:end] = block.T
    return values


def _powers(values: Tensor) -> Tensor:
    """Return the squares of the Hilbert envelopes of rows, scaled to the power of the rows.

    `values` is overwritten.
    """
    spectrum = torch.fft.rfft(values).mul_(-1j)
    spectrum[:, 0] = 0
    turned = torch.fft.irfft(spectrum, n=values.shape[1])
    own = values.square_()
    power = own.mean(1, keepdim=True)
    both = own.addcmul_(turned, turned)
    least = torch.finfo(values.dtype).tiny
    return both.mul_(power / both.mean(1, keepdim=True).clamp(min=least))


def _means(cells: Tensor, samples: int, step: int, edges: Tensor, square: bool) -> Tensor:
    """Return (frame, column): the means of one filter's envelopes, see `envelope_means`."""
    points = fast_length(-(-samples // step))
    ends = (edges.double() * (points / samples)).unsqueeze(1)
    begin, end = ends[:-1], ends[1:]
    most = int((end.ceil() - begin.floor()).max())
    point = begin.floor() + torch.arange(most, device=cells.device)
    inside = torch.minimum(point + 1, end) - torch.maximum(point, begin)
    shares = (inside.clamp(min=0) / (end - begin)).to(cells.dtype)
    point = point.long().clamp(max=points - 1)
    means = []
    for rows in _values(cells, samples, step, points).split(_BLOCK_ROWS):
        envelope = _powers(rows) if square else _powers(rows).sqrt_()
        by_point = envelope.T.contiguous()
        means.append(embedding_bag(point, by_point, mode="sum", per_sample_weights=shares))
    mean = torch.cat(means, 1)
    return mean.sqrt_() if square else mean


def envelope_means(
    cells: Tensor, samples: int, steps: Sequence[int], edges: Tensor, square: bool
) -> list[Tensor]:
    """Return for each filter the means over frames of its envelopes, (frame, channel).

    Args:
        cells: (cell, channel * filter), means over the least of the steps, of a signal with
            `zeros_around` it.
        samples: Length of the signal, at least one.
        steps: Samples of each filter's cells, see `cell_samples`.
        edges: (frame + 1,), the first sample of each frame, and the sample after the last frame.
        square: Take root mean squares.
    """
    means, most = [], max(steps) // min(steps)
    for step, of_filter in zip(steps, cells.unflatten(1, (-1, len(steps))).unbind(2), strict=True):
        ratio = step // min(steps)
        around = of_filter[TAPS // 2 * (most - ratio) :]
        wide = around.contiguous() if ratio == 1 else around.unflatten(0, (-1, ratio)).mean(1)
        means.append(_means(wide, samples, step, edges, square))
    return means
