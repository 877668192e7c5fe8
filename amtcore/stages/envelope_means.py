"""Means over frames of the Hilbert envelopes of whole signals, at a reduced rate.

1. The fused kernel computes the bands, and their means over cells of `cell_samples` samples. A
   filter passes little above some multiples of its centre, so its band needs few cells.
2. Values divide the signal evenly. The transforms then have the period of the signal, and the
   number of values has small factors for every length of the signal. A value comes from the
   polynomial that has the same means as the `TAPS` cells around it.
3. A real transform of the values and one inverse transform give the envelope.
4. Means over frames weigh the values by their share in the frame.

The reference is the mean of the envelope at full rate. The error is at most 3e-4 of the norm for a
second of noise, speech or a tone, and 5e-4 for a tenth of a second. The greatest errors lie at the
ends of the signal, where the envelope jumps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from amtcore.kernels.chain import FilterBank
from amtcore.kernels.operations.envelope import fast_length, quadrature_of

#: The least number of cells in a second, in a period of the highest band edge, and in a frame.
CELL_RATE_HZ, CELLS_PER_PERIOD, CELLS_PER_FRAME = 2000.0, 26.0, 20.0
#: Cells around a value, an even number.
TAPS = 12
#: Values and rows of a block, which stays in the caches of a CPU.
_BLOCK_VALUES, _BLOCK_ROWS = 2048, 8


@dataclass(frozen=True)
class EnvelopeFilters:
    """The modulation filters with and without a Hilbert envelope after them.

    Args:
        is_envelope: True for each filter of a channel that a Hilbert envelope follows.
        plain: The other filters, of all channels.
        enveloped: The filters that an envelope follows, of all channels.
        upper_hz: Upper band edge of each filter of a channel that an envelope follows.
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
    """Return the weights of cells as polynomials, (power, tap), of the distance to a middle cell.

    A polynomial in time of a degree below `TAPS` is the weighted sum of its means over cells.
    """
    cells = torch.arange(TAPS, dtype=torch.float64) - (TAPS // 2 - 1)
    times = cells.unsqueeze(1) + (torch.arange(step) - (step - 1) / 2) / step
    means = (times ** torch.arange(TAPS)[:, None, None]).mean(-1)  # (power, tap)
    return torch.linalg.inv(means).T


def _values(cells: Tensor, samples: int, step: int, points: int) -> Tensor:
    """Return (column, point): the values at the middles of equal parts of the signal."""
    device, values = cells.device, cells.new_empty(cells.shape[1], points)
    polynomials = _polynomials(step).to(device, non_blocking=True)
    taps, size = torch.arange(TAPS, device=device), _BLOCK_VALUES if values.is_cpu else points
    for begin in range(0, points, size):
        end = min(begin + size, points)
        middle = torch.arange(begin, end, dtype=torch.float64, device=device) + 0.5
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
    turned = quadrature_of(values)
    own = values.square_()
    power = own.mean(1, keepdim=True)
    both = own.addcmul_(turned, turned)
    least = torch.finfo(values.dtype).tiny
    return both.mul_(power / both.mean(1, keepdim=True).clamp(min=least))


def _means(cells: Tensor, samples: int, step: int, edges: Tensor, square: bool) -> Tensor:
    """Return (frame, column): the means of envelopes; arguments as of `envelope_means`."""
    points = fast_length(-(-samples // step))
    ends = (edges.double() * (points / samples)).unsqueeze(1)
    begin, end = ends[:-1], ends[1:]
    point = begin.floor() + torch.arange(int((end.ceil() - begin.floor()).max()))
    inside = (torch.minimum(point + 1, end) - torch.maximum(point, begin)).clamp(min=0)
    shares = (inside / (end - begin)).to(cells.device, cells.dtype, non_blocking=True)
    point = point.long().clamp(max=points - 1).to(cells.device, non_blocking=True)
    means, values = [], _values(cells, samples, step, points)
    for rows in values.split(_BLOCK_ROWS if values.is_cpu else len(values)):
        envelope = _powers(rows) if square else _powers(rows).sqrt_()
        by_point = envelope.T.contiguous()
        means.append(embedding_bag(point, by_point, mode="sum", per_sample_weights=shares))
    mean = torch.cat(means, 1)
    return mean.sqrt_() if square else mean


def envelope_means(
    cells: Tensor, samples: int, steps: Sequence[int], edges: Tensor, square: bool
) -> Tensor:
    """Return the means over frames of all envelopes, (frame, channel, filter).

    Args:
        cells: (cell, channel * filter), means over the least of the steps, of a signal with
            `zeros_around` it.
        samples: Length of the signal, at least one.
        steps: Samples of each filter's cells, see `cell_samples`.
        edges: (frame + 1,), the first sample of each frame, and the sample after the last frame;
            on the CPU, so that no shape waits for a device.
        square: Take root mean squares.
    """
    by_filter, means = cells.unflatten(1, (-1, len(steps))), []
    for step, group in groupby(range(len(steps)), key=steps.__getitem__):
        numbers, ratio = list(group), step // min(steps)
        begin = TAPS // 2 * (max(steps) - step) // min(steps)
        wide = by_filter[begin:, :, numbers[0] : numbers[-1] + 1].flatten(1)
        if ratio > 1:
            wide = wide.unflatten(0, (-1, ratio)).mean(1)
        made = _means(wide.contiguous(), samples, step, edges, square)
        means.append(made.unflatten(1, (-1, len(numbers))))
    return torch.cat(means, 2)
