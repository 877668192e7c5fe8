"""Hilbert envelope of whole signals in torch: what has gradients, and the check for the kernel.

The analytic signal of scipy.signal.hilbert: a circular Hilbert transform over exactly the samples
there are. Two rows share one complex transform. Where the length has a large prime factor the
circular convolution is done as a linear one of a round length, folded back; same values, up to
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.vector.exporting import is_exporting

#: Samples of a block of rows: what its transforms use stays in the caches.
_BLOCK_SAMPLES = 2**19
#: The same for a GPU, which wants much at a time: its memory bounds it, about 30 bytes a sample.
_DEVICE_BLOCK_SAMPLES = 2**26
_FAST_FACTORS = (2, 3, 5, 7, 11)
_ODD_PARTS = (1, 3, 5, 9)


def _is_fast(n: int) -> bool:
    """Whether a transform of this length has only small factors."""
    for factor in _FAST_FACTORS:
        while n % factor == 0 and n > 1:
            n //= factor
    return n == 1


def _fast_length(least: int) -> int:
    """Smallest odd part times a power of two that is at least this long."""
    lengths = []
    for length in _ODD_PARTS:
        while length < least:
            length *= 2
        lengths.append(length)
    return min(lengths)


def _transformer(n: int, like: Tensor) -> Tensor:
    """Spectrum of the Hilbert transform of period n: -i above 0 Hz, +i below it."""
    # No slice depends on n, so that its axis may be dynamic in `torch.export`.
    twice = 2 * torch.arange(n, device=like.device)
    turn = torch.where(twice == 0, 0, torch.sign(twice - n)).to(like.dtype)
    return torch.complex(torch.zeros_like(turn), turn)


class Quadrature:
    """The Hilbert transform for signals of one length.

    `torch.export` records transforms of that length itself: the factors of a dynamic length are
    unknown.

    Args:
        n: Samples.
        like: A real tensor of the signals' type.
    """

    def __init__(self, n: int, like: Tensor) -> None:
        fast = is_exporting() or _is_fast(n)
        self._n, self._length = n, n if fast else _fast_length(2 * n - 1)
        self._spectrum = _transformer(n, like)
        if self._length != n:
            self._spectrum = torch.fft.fft(torch.fft.ifft(self._spectrum), self._length)

    def __call__(self, z: Tensor) -> Tensor:
        """Of the real and of the imaginary part of z, over the last axis."""
        n = self._n
        y = torch.fft.ifft(torch.fft.fft(z, self._length).mul_(self._spectrum))
        if self._length == n:
            return y
        return y[..., :n] + torch.nn.functional.pad(y[..., n : 2 * n - 1], (0, 1))


def are_finite(rows: Tensor) -> Tensor:
    """(row, 1): whether a row holds finite numbers only."""
    return torch.isfinite(rows).all(1, keepdim=True)


def _envelope_pairs(rows: Tensor, quadrature: Quadrature) -> Tensor:
    """(2 p, time) -> (2 p, time); row 2 i shares its transform with row 2 i + 1."""
    tiny = torch.finfo(rows.dtype).tiny
    z = torch.complex(rows[0::2], rows[1::2])
    own, turned = torch.view_as_real(z), torch.view_as_real(quadrature(z))
    squares = own.square()  # (p, time, 2)
    power = torch.addcmul(squares, turned, turned)
    scale = squares.mean(1) / power.mean(1).clamp(min=tiny)
    envelope = power.clamp(min=tiny).sqrt().unbind(-1)
    gains = scale.clamp(min=tiny).sqrt().unsqueeze(1).unbind(-1)
    both = torch.stack([part * gain for part, gain in zip(envelope, gains, strict=True)], 1)
    return both.flatten(0, 1)


def _envelope_alone(rows: Tensor) -> Tensor:
    """(row, time), same shape out: every row with a transform of its own."""
    tiny = torch.finfo(rows.dtype).tiny
    turned = Quadrature(rows.shape[1], rows)(torch.complex(rows, torch.zeros_like(rows))).real
    squares = rows.square()
    power = torch.addcmul(squares, turned, turned)
    scale = squares.mean(1, keepdim=True) / power.mean(1, keepdim=True).clamp(min=tiny)
    return power.clamp(min=tiny).sqrt() * scale.clamp(min=tiny).sqrt()


def hilbert_envelope(rows: Tensor) -> Tensor:
    """(row, time), same shape out; see `op.hilbert_envelope`.

    `torch.export` takes row by row, since pairs and blocks ask for the number of rows.
    """
    if is_exporting():
        return _envelope_alone(rows)
    quadrature = Quadrature(rows.shape[1], rows)
    envelopes = []
    samples = _BLOCK_SAMPLES if rows.device.type == "cpu" else _DEVICE_BLOCK_SAMPLES
    for block in rows.split(2 * max(1, samples // (2 * rows.shape[1]))):
        # One sample that is no finite number makes NaN of its row, gradient and all, but not of
        # the row that shares its transform: 0 times the square of what was left out is NaN or 0.
        fine = are_finite(block)
        left_out = torch.where(fine, 0.0, block).sum(1, keepdim=True)
        clean = torch.where(fine, block, 0.0)
        pairs = torch.nn.functional.pad(clean, (0, 0, 0, len(block) % 2))
        envelope = _envelope_pairs(pairs, quadrature)[: len(block)]
        envelopes.append(envelope + 0.0 * left_out.square())
    return torch.cat(envelopes)
