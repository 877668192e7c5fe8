"""Envelope of a band at every sample, interpolated from a few complex samples of the band.

A band is narrow, so its analytic signal needs few samples: twice its width a second. Between two of
these samples the real and the imaginary part are polynomials. They differ from the signal by at
most 1e-6 of its largest value. With u from 0 to 1:

    z(i + u) = sum over k and d of coefficients[k, d] (u - 1/2)^d z[i + k].
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    narrow_lanes,
    vload_narrow,
    vmax,
    vsplat,
    vsqrt,
    vstore,
)

#: Samples per Hz of a band, taps, and terms of the polynomials.
OVERSAMPLING, TAPS, TERMS = 2, 16, 8
#: Index of the tap at u = 0.
_CENTRE = TAPS // 2 - 1
_SMOOTH = (4, 5, 6)


@functools.cache
def coefficients() -> Any:
    """Return float32 (tap, LANES): least squares over the band, of TERMS terms, then zeros."""
    u = 0.5 - 0.5 * np.cos(np.pi * (np.arange(48) + 0.5) / 48)
    cycles = np.linspace(0.0, 0.5 / OVERSAMPLING, 200)
    taps = 2 * np.pi * np.outer(cycles, np.arange(TAPS) - _CENTRE)
    wanted = 2 * np.pi * np.outer(cycles, u)
    matrix = np.concatenate([np.cos(taps), np.sin(taps)])
    by_u = np.linalg.lstsq(matrix, np.concatenate([np.cos(wanted), np.sin(wanted)]))[0]
    powers = (u[:, None] - 0.5) ** np.arange(TERMS)
    found = np.zeros((TAPS, LANES), np.float32)
    found[:, :TERMS] = np.linalg.lstsq(powers, by_u.T)[0].T
    return found


@kernel
def interpolate_envelope(
    z: Any, taps: Any, ramp: Any, spacing: float, floor: float, samples: int, out: Any
) -> None:
    """Write the magnitude at every sample.

    Shapes: z flat (2 time) with TAPS - 1 more samples, taps flat (TAPS LANES), ramp (LANES) of 0,
    1, .., out (samples + LANES), whose last LANES numbers are scratch.
    """
    real, imaginary = aligned(LANES, z), aligned(LANES, z)
    step = vload_narrow(ramp, 0)
    zero, least = vsplat(step, 0.0), vsplat(step, floor)
    step = step * vsplat(step, 1.0 / spacing)
    n, i = 0, 0
    while n < samples:
        a = b = zero
        for k in range(TAPS):
            tap = vload_narrow(taps, k * LANES)
            a = fma(vsplat(zero, z[2 * (i + k)]), tap, a)
            b = fma(vsplat(zero, z[2 * (i + k) + 1]), tap, b)
        vstore(real, 0, a)
        vstore(imaginary, 0, b)
        i += 1
        # Samples beyond the interval are written by the next interval again.
        while n < samples and n < i * spacing:
            u = vsplat(zero, n / spacing - i + 0.5) + step
            x, y = vsplat(zero, real[TERMS - 1]), vsplat(zero, imaginary[TERMS - 1])
            for d in range(TERMS - 2, -1, -1):
                x, y = fma(x, u, vsplat(zero, real[d])), fma(y, u, vsplat(zero, imaginary[d]))
            vstore(out, n, vmax(vsqrt(fma(x, x, y * y)), least))
            n += narrow_lanes()
        n = min(n, int(np.ceil(i * spacing)))


def coarse_length(bins: int) -> int:
    """Return a length of fast transforms of at least OVERSAMPLING `bins`."""
    least = max(OVERSAMPLING * bins, TAPS)
    doublings = max((least - 1).bit_length() - 3, 0)
    return min(m << d for m in _SMOOTH for d in (doublings, doublings + 1) if m << d >= least)


def can_interpolate(spectrum: Tensor, bins: int, n_fft: int) -> bool:
    """Return True if the kernel may compute a band: float32 on a CPU, without gradients."""
    plain = spectrum.device.type == "cpu" and not torch.compiler.is_compiling()
    without_gradient = not (torch.is_grad_enabled() and spectrum.requires_grad)
    fast = plain and without_gradient and spectrum.dtype == torch.complex64
    return fast and 2 * coarse_length(bins) <= n_fft


def fine_envelope(band: Tensor, n_fft: int, samples: int, floor: float) -> Tensor:
    """Return the envelope (row, sample) of one-sided bands (row, bin); see `can_interpolate`."""
    bins, length = band.shape[1], coarse_length(band.shape[1])
    spectrum = band.new_zeros(len(band), length)
    half = bins // 2
    spectrum[:, : bins - half] = band[:, half:]
    spectrum[:, length - half :] = band[:, :half]
    z = torch.fft.ifft(spectrum, norm="forward")
    around = torch.cat((z[:, length - _CENTRE :], z, z[:, : TAPS - _CENTRE]), 1)
    out = torch.empty(len(band), samples + LANES)
    taps, ramp = coefficients().reshape(-1), np.arange(LANES, dtype=np.float32)
    for row, made in zip(torch.view_as_real(around), out, strict=True):
        flat = row.flatten().numpy()
        interpolate_envelope(flat, taps, ramp, n_fft / length, floor, samples, made.numpy())
    return out[:, :samples]
