"""Hilbert envelope of whole signals.

The analytic signal equals scipy.signal.hilbert: a circular Hilbert transform of the length of the
signal. Two rows share one complex transform. For a length with a large prime factor, a linear
convolution of a rounder length is folded back, with equal values up to rounding.

The kernel computes two rows in two passes. The first pass sums the powers of the samples and of the
analytic signals; the second writes the envelopes. On a GPU torch's functions do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.operation import Device, RowOperation
from amtcore.kernels.torch_state import (
    by_item,
    is_exporting,
    rows_of,
    use_reference,
    wants_derivative,
)
from amtcore.kernels.vector.arrays import empty
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import LANES, fma, vload, vmax, vsplat, vsqrt, vstore
from amtcore.kernels.vector.threads import parallel_for

#: Samples of a block of rows on a CPU, whose transforms then stay in the caches.
_BLOCK_SAMPLES = 2**19
#: Samples of a block on a GPU, about 30 bytes of memory each.
_DEVICE_BLOCK_SAMPLES = 2**26
_FAST_FACTORS = (2, 3, 5, 7, 11)
_ODD_PARTS = (1, 3, 5, 9)


def _is_fast(n: int) -> bool:
    """Return True if a transform length has only small factors."""
    for factor in _FAST_FACTORS:
        while n % factor == 0 and n > 1:
            n //= factor
    return n == 1


def fast_length(least: int) -> int:
    """Return the smallest length of at least `least`, an odd part times a power of two."""
    lengths = []
    for length in _ODD_PARTS:
        while length < least:
            length *= 2
        lengths.append(length)
    return min(lengths)


class Quadrature:
    """The Hilbert transform for signals of `n` samples, of the type of `like`.

    `torch.export` records transforms of length n, since the factors of a dynamic n are unknown.
    """

    def __init__(self, n: int, like: Tensor) -> None:
        fast = is_exporting() or _is_fast(n)
        self._n, self._length = n, n if fast else fast_length(2 * n - 1)
        # The spectrum is -i above 0 Hz and +i below it. No slice depends on n, so that the axis may
        # be dynamic in `torch.export`.
        twice = 2 * torch.arange(n, device=like.device)
        turn = torch.where(twice == 0, 0, torch.sign(twice - n)).to(like.dtype)
        self._spectrum = torch.complex(torch.zeros_like(turn), turn)
        if self._length != n:
            self._spectrum = torch.fft.fft(torch.fft.ifft(self._spectrum), self._length)

    def __call__(self, z: Tensor) -> Tensor:
        """Transform the real and the imaginary part of z, over the last axis."""
        n = self._n
        y = torch.fft.ifft(torch.fft.fft(z, self._length).mul_(self._spectrum))
        if self._length == n:
            return y
        return y[..., :n] + torch.nn.functional.pad(y[..., n : 2 * n - 1], (0, 1))


def quadrature_of(x: Tensor) -> Tensor:
    """Return the Hilbert transform of real signals (.., time), one transform for each."""
    spectrum = torch.fft.rfft(x).mul_(-1j)
    spectrum[..., 0] = 0.0
    return torch.fft.irfft(spectrum, x.shape[-1])


def are_finite(rows: Tensor) -> Tensor:
    """Return (row, 1), True for rows of finite numbers."""
    return torch.isfinite(rows).all(1, keepdim=True)


def _envelopes(first: Tensor, second: Tensor, quadrature: Quadrature) -> Tensor:
    """Return the envelopes (p, 2, time) of two tensors (p, time), whose rows share transforms."""
    tiny, z = torch.finfo(first.dtype).tiny, torch.complex(first, second)
    own, turned = torch.view_as_real(z), torch.view_as_real(quadrature(z))
    squares = own.square()  # (p, time, 2)
    power = torch.addcmul(squares, turned, turned)
    scale = squares.mean(1) / power.mean(1).clamp(min=tiny)
    envelope = power.clamp(min=tiny).sqrt().unbind(-1)
    gains = scale.clamp(min=tiny).sqrt().unsqueeze(1).unbind(-1)
    return torch.stack([part * gain for part, gain in zip(envelope, gains, strict=True)], 1)


def reference(rows: Tensor) -> Tensor:
    """Return the envelopes of (row, time); see `_call`.

    `torch.export` takes row by row, since pairs and blocks depend on the number of rows.
    """
    quadrature = Quadrature(rows.shape[1], rows)
    if is_exporting():
        return _envelopes(rows, torch.zeros_like(rows), quadrature)[:, 0]
    envelopes = []
    samples = _BLOCK_SAMPLES if rows.device.type == "cpu" else _DEVICE_BLOCK_SAMPLES
    for block in rows.split(2 * max(1, samples // (2 * rows.shape[1]))):
        # A non-finite sample must make its row and gradient NaN, but not the row that shares its
        # transform. So such rows are replaced by zeros, and 0 times the square of their sum, which
        # is NaN, is added to the result.
        fine = are_finite(block)
        left_out = torch.where(fine, 0.0, block).sum(1, keepdim=True)
        clean = torch.where(fine, block, 0.0)
        pairs = torch.nn.functional.pad(clean, (0, 0, 0, len(block) % 2))
        envelope = _envelopes(pairs[0::2], pairs[1::2], quadrature).flatten(0, 1)[: len(block)]
        envelopes.append(envelope + 0.0 * left_out.square())
    return torch.cat(envelopes)


#: Numbers that are summed in the working type before their sum is added to a float64 total.
_PART = 128 * LANES


@part
def _powers(z: Any, turned: Any, begin: int, end: int, sums: Any) -> None:
    """Sum z^2 in the first LANES of `sums`, and z^2 + turned^2 in the next LANES.

    `turned` becomes z^2 + turned^2. Lanes with an even index belong to the first row, lanes with an
    odd index to the second.
    """
    own = both = vsplat(z, 0.0)
    for i in range(begin, end, LANES):
        value, quadrature = vload(z, i), vload(turned, i)
        square = value * value
        power = fma(quadrature, quadrature, square)
        vstore(turned, i, power)
        own, both = own + square, both + power
    vstore(sums, 0, own)
    vstore(sums, LANES, both)


@kernel
def run_envelope(z: Any, turned: Any, tiny: float, first: Any, second: Any) -> None:
    """Write the envelopes of two rows, each scaled to the power of its row, at least `tiny`.

    Shapes: z and turned flat (2 time), first and second (time). The kernel overwrites turned.
    """
    count, samples = z.shape[0], first.shape[0]
    whole = count - count % LANES
    sums, totals = aligned(2 * LANES, z), np.zeros((2, 2))
    for begin in range(0, whole, _PART):
        _powers(z, turned, begin, min(begin + _PART, whole), sums)
        for lane in range(2 * LANES):
            totals[lane // LANES, lane % 2] += sums[lane]
    for i in range(whole, count):
        totals[0, i % 2] += z[i] * z[i]
        turned[i] = z[i] * z[i] + turned[i] * turned[i]
        totals[1, i % 2] += turned[i]
    gains = aligned(LANES, z)
    for lane in range(LANES):
        own, both = totals[0, lane % 2] / samples, totals[1, lane % 2] / samples
        gains[lane] = math.sqrt(max(own / max(both, tiny), tiny))
    gain, least = vload(gains, 0), vsplat(z, tiny)
    for i in range(0, whole, LANES):
        vstore(turned, i, gain * vsqrt(vmax(vload(turned, i), least)))
    for i in range(whole, count):
        turned[i] = gains[i % 2] * math.sqrt(max(turned[i], tiny))
    for t in range(samples):
        first[t] = turned[2 * t]
        second[t] = turned[2 * t + 1]


def _cpu(device: Device, rows: Tensor) -> Tensor:
    """Pairs of rows go to threads."""
    count, samples = rows.shape
    fine = are_finite(rows)
    inputs = rows.detach() if bool(fine.all()) else torch.where(fine, rows.detach(), 0.0)
    out = empty((count + count % 2, samples), rows)
    out_np = out.numpy()
    quadrature, tiny = Quadrature(samples, inputs), torch.finfo(rows.dtype).tiny

    def pair(i: int) -> None:
        first = inputs[2 * i]
        second = inputs[2 * i + 1] if 2 * i + 1 < count else torch.zeros_like(first)
        z = torch.complex(first, second)
        own, turned = (torch.view_as_real(part).flatten().numpy() for part in (z, quadrature(z)))
        run_envelope(own, turned, tiny, out_np[2 * i], out_np[2 * i + 1])

    parallel_for(pair, -(-count // 2))
    return out[:count].masked_fill_(~fine, torch.nan)


def _call(kernel: Any, x: Tensor, backend: str | None = None) -> Tensor:
    """Return the magnitude of the analytic signal over the last axis, scaled to the RMS of `x`.

    Silence stays silence, with gradient 0. Two channels may share a transform, but two items of a
    batch never do, so an item has the same bits alone and in a batch.

    Args:
        x: (batch, channel, time), (channel, time) or (time,).
        backend: Kernel choice; None picks.
    """
    if x.numel() == 0:
        return x
    items = x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    channels = items.shape[1]
    pairs = torch.nn.functional.pad(items, (0, 0, 0, channels % 2))
    if use_reference(x, backend) or wants_derivative(x):
        made = by_item(lambda item: _by_rows(reference, item), pairs)
    else:
        made = _by_rows(kernel, pairs)
    return made[:, :channels].reshape(x.shape)


def _by_rows(function: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
    return function(rows_of(items)).reshape(items.shape)


#: The kernel has no gradient: `_call` runs the plain form if a derivative may be requested.
HILBERT_ENVELOPE = RowOperation(
    name="hilbert_envelope",
    run=_cpu,
    on_gpu=False,
    fake=torch.empty_like,
    reference=reference,
    call=_call,
)
