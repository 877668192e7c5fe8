"""Means over frames of the Hilbert envelopes of filtered whole signals, at a reduced rate.

    signal -> one transform -> times the response of a filter, up to `BAND_HZ`
           -> analytic signal at a reduced rate -> envelope -> means over frames.

A band-pass is linear, so its output needs no transform of its own. Its recurrence is cut at the end
of the signal: what would follow is known from the filter's state there, and is taken out of the
spectrum. The power that the envelope is scaled to is a sum over the spectrum. Means are differences
of the running sum of the envelope between the ends of a frame.

Against means of the envelope at full rate, the error is 2e-4 of the norm for noise and speech
(3e-4 for the root mean square). It lies at the ends of the signal, where the envelope jumps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amtcore.kernels.operations.envelope import fast_length

#: Highest frequency of the analytic signals; higher for bands that reach up to a 20th of it.
BAND_HZ, BAND_RATIO = 3000.0, 20.0


def responses(rows: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return the responses of filters of two sections to the input, and to their states.

    A section with its states s is s' = A s + B x, y = C s + D x. At z = exp(i omega) the responses
    are D + C (z - A)^-1 B and C (1 - A / z)^-1.

    Args:
        rows: (filter, 12), as of `bandpass2_rows`.
        omega: (bin,), radians a sample.
    Returns:
        (filter, bin) and (filter, state, bin), complex128.
    """
    delay = torch.polar(torch.ones_like(omega), -omega)

    def section(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a1, a2, a3, m0, m1, m2 = (each.unsqueeze(1) for each in part.double().unbind(-1))
        p, q, r, s = 2 * a1 - 1, -2 * a2, 2 * a2, 1 - 2 * a3  # A, row by row
        c1, c2 = m1 * a1 + m2 * a2, m2 * (1 - a3) - m1 * a2
        determinant = 1 - (p + s) * delay + (p * s - q * r) * delay**2
        first = (c1 * (1 - s * delay) + c2 * r * delay) / determinant
        second = (c1 * q * delay + c2 * (1 - p * delay)) / determinant
        through = m0 + m1 * a2 + m2 * a3 + (2 * a2 * first + 2 * a3 * second) * delay
        return through, first, second

    one, *of_one = section(rows[:, :6])
    other, *of_other = section(rows[:, 6:])
    states = [other * each for each in of_one] + of_other
    return one * other, torch.stack(states, 1)


def _power(z: Tensor) -> Tensor:
    return torch.view_as_real(z).square().sum(-1)


def envelope_means(
    x: Tensor, rows: Tensor, states: Tensor, edges: Tensor, fs_hz: float, square: bool
) -> Tensor:
    """Return the mean over frames of the envelopes of all filters.

    Args:
        x: (channel, time).
        rows: (filter, 12), band-passes that pass little above `BAND_HZ`.
        states: (channel, filter, 4), after the last sample.
        edges: (frame + 1,), the first sample of each frame, and the one after the last.
        fs_hz: Sampling rate.
        square: Take root mean squares.
    Returns:
        (filter, frame, channel).
    """
    samples, omega_step = x.shape[-1], 2.0 * math.pi / x.shape[-1]
    bins = min(samples // 2, math.ceil(BAND_HZ / fs_hz * samples)) + 1
    points = fast_length(2 * bins)
    omega = omega_step * torch.arange(bins, dtype=torch.float64, device=x.device)
    kind = torch.complex64 if x.dtype == torch.float32 else torch.complex128
    spectrum = torch.fft.rfft(x)[:, :bins]
    # Point j stands for samples j - 1/2 to j + 1/2 of the reduced rate.
    ends = (edges.double() - 0.5) * (points / samples) + 0.5
    cell = ends.floor().long().clamp(0, points - 1)
    share, length = ends - cell, ends.diff()
    means = []
    for number, (through, of_states) in enumerate(zip(*responses(rows, omega), strict=True)):
        band = spectrum * through.to(kind) - states[:, number].to(kind) @ of_states.to(kind)
        power = _power(band)
        constant, rest = power[:, :1], power[:, 1:].sum(1, keepdim=True)
        scaled = (constant + 2 * rest) / (constant + 4 * rest).clamp(min=torch.finfo(x.dtype).tiny)
        analytic = x.new_zeros(len(x), points, dtype=kind)
        analytic[:, :bins] = band * (2.0 * points / samples)
        analytic[:, 0] *= 0.5
        envelope = _power(torch.fft.ifft(analytic)) * scaled
        if not square:
            envelope = envelope.sqrt()
        total = torch.nn.functional.pad(envelope.cumsum(-1, dtype=torch.float64), (1, 0))
        at_ends = torch.lerp(total[:, cell], total[:, cell + 1], share)
        mean = (at_ends.diff() / length).to(x.dtype).T
        means.append(mean.clamp(min=0).sqrt() if square else mean)
    return torch.stack(means)
