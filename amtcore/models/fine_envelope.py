"""Envelopes of bands at every sample, and weighted sums of them, from few samples of each band.

A band is narrow, so its complex samples z need a rate of OVERSAMPLING times its width. A window w
of TAPS samples interpolates them.

    z(i + u) = sum over k of w[k](u) z[i + k].

Frame m is the sum over t of weights[m, t] |z(t)|. The window is short because the spectrum is
divided by its transform beforehand (Barnett, Magland and af Klinteberg, 2019, SIAM J. Sci. Comput.
41, C479: exponential of semicircle). The result differs from the transform at every sample by at
most 1e-6 of the largest value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.kernels.operations.envelope import fast_length
from amtcore.kernels.torch_state import can_compute
from amtcore.kernels.vector.arrays import empty
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned, copy_row, transpose
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    four_sums,
    vload,
    vsplat,
    vsqrt,
    vstore,
    where_greater_or_nan,
)

#: Samples per Hz of a band, taps of the window, terms of its polynomials, and its exponent.
OVERSAMPLING, TAPS, TERMS, BETA = 2, 8, 8, 18.6
#: Index of the tap at u = 0.
_CENTRE = TAPS // 2 - 1


def frame_weights(taps: Tensor, ahead: int, up: int, down: int) -> tuple[Tensor, Any, int]:
    """Return weights of groups of four frames, which repeat after a cycle of groups.

    Frame m is the sum of taps[ahead + m down - t up] x[t] over t.

    Returns:
        Weights (group, sample, 4), first samples (group,), and samples of a cycle.
    """
    groups = up // math.gcd(up, 4)
    m = np.arange(4 * groups).reshape(groups, 1, 4)
    firsts = -((len(taps) - 1 - ahead - m[:, 0, 0] * down) // up)
    window = int(((ahead + m[:, 0, -1] * down) // up - firsts).max()) + 1
    t = firsts[:, None, None] + np.arange(window)[:, None]
    at = torch.from_numpy(ahead + m * down - t * up)
    weights = torch.where((at >= 0) & (at < len(taps)), taps[at.clamp(0, len(taps) - 1)], 0.0)
    return weights, firsts, 4 * groups * down // up


def _window(x: Any) -> Any:
    return np.exp(BETA * (np.sqrt(np.maximum(1.0 - (2.0 * x / TAPS) ** 2, 0.0)) - 1.0))


@functools.cache
def _polynomials() -> Any:
    """Return float32 (TERMS, TAPS): the window's values at all taps, by powers of u - 1/2."""
    u = 0.5 * np.cos(np.pi * (np.arange(48) + 0.5) / 48)
    values = _window(u[:, None] + 0.5 + _CENTRE - np.arange(TAPS))
    return np.polynomial.polynomial.polyfit(u, values, TERMS - 1).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _correction(length: int) -> Tensor:
    """Return one over the window's transform at the bins of a transform, (length,)."""
    nodes, shares = np.polynomial.legendre.leggauss(32)
    x = (nodes + 1) * TAPS / 4
    turns = 2 * np.pi * np.outer(np.arange(length // 2 + 1) / length, x)
    half = 1.0 / (np.cos(turns) @ (shares * _window(x) * TAPS / 2))
    return torch.from_numpy(np.concatenate((half, half[1 : (length + 1) // 2][::-1]))).float()


@part
def _side_by_side(z: Any, length: int, line: Any) -> None:
    """Transpose z, flat (band, length, 2), to rows of LANES real and LANES imaginary parts.

    The line begins with the last rows, and ends with the first rows.
    """
    row, numbers = 2 * LANES, 2 * length
    bands = z.shape[0] // numbers
    transpose(z, 0, numbers, bands, numbers, line[_CENTRE * row :], LANES, LANES)
    copy_row(line, length * row, line, 0, _CENTRE * row)
    copy_row(line, _CENTRE * row, line, (_CENTRE + length) * row, (TAPS - 1 - _CENTRE) * row)


@part
def _interpolate(
    line: Any, step: float, begin: int, end: int, taps: Any, floor: float, out: Any, to: int,
    room: Any,
) -> None:  # fmt: skip
    """Write the magnitudes at samples begin..end-1, rows of LANES numbers."""
    places, u, values = np.empty(LANES, np.int64), room[:LANES], room[LANES:]
    least = vsplat(line, floor)
    for n in range(begin, end, LANES):
        for lane in range(LANES):
            at = (n + lane) * step
            places[lane] = int(at)
            u[lane] = at - int(at) - 0.5
        x = vload(u, 0)
        for k in range(TAPS):
            value = vsplat(x, taps[(TERMS - 1) * TAPS + k])
            for d in range(TERMS - 2, -1, -1):
                value = fma(value, x, vsplat(x, taps[d * TAPS + k]))
            vstore(values, k * LANES, value)
        for lane in range(min(LANES, end - n)):
            at, a, b = places[lane] * 2 * LANES, vsplat(x, 0.0), vsplat(x, 0.0)
            for k in range(TAPS):
                tap = vsplat(x, values[k * LANES + lane])
                a = fma(tap, vload(line, at + 2 * k * LANES), a)
                b = fma(tap, vload(line, at + (2 * k + 1) * LANES), b)
            a = vsqrt(fma(a, a, b * b))
            a = where_greater_or_nan(a, least, a, least)
            vstore(out, to + (n - begin + lane) * LANES, a)


@kernel
def run_bands(
    z: Any, length: int, n_fft: int, samples: int, taps: Any, floor: float, weights: Any,
    phases: int, starts: Any, envelopes: Any, frames: Any,
) -> None:  # fmt: skip
    """Write envelopes (sample, LANES) and groups of frames (group, 4, LANES), all flat.

    The samples z are flat (band, length, 2). Empty `envelopes` are not written. Samples outside of
    the signal are 0.
    """
    rows, groups = weights.shape[0] // (4 * phases), starts.shape[0]
    line = aligned((length + TAPS - 1) * 2 * LANES, z)
    _side_by_side(z, length, line)
    size = 2 * rows
    block, room = aligned(size * LANES, z), aligned((TAPS + 1) * LANES, z)
    begin, known, group = (starts[0] if groups else 0), 0, 0
    while group < groups or begin < samples * min(envelopes.shape[0], 1):
        low = min(max(begin + known, 0), begin + size)
        high, to = max(min(begin + size, samples), low), (low - begin) * LANES
        block[known * LANES : to] = 0.0
        block[(high - begin) * LANES :] = 0.0
        _interpolate(line, length / n_fft, low, high, taps, floor, block, to, room)
        if envelopes.shape[0]:
            copy_row(block, to, envelopes, low * LANES, (high - low) * LANES)
        while group < groups and starts[group] + rows <= begin + size:
            four_sums(
                block, (starts[group] - begin) * LANES, LANES, rows, weights,
                group % phases * rows * 4, 4, 1, 0.0, frames, group * 4 * LANES, LANES,
            )  # fmt: skip
            group += 1
        after = min(begin + size, starts[group]) if group < groups else begin + size
        known = begin + size - after
        copy_row(block, (after - begin) * LANES, block, 0, known * LANES)
        begin = after


def can_interpolate(spectrum: Tensor, bins: int, n_fft: int) -> bool:
    """Return True if the kernel may compute a band: float32 on a CPU, without gradients."""
    fast = spectrum.dtype == torch.complex64 and can_compute(spectrum.real)
    return fast and fast_length(max(OVERSAMPLING * bins, TAPS)) <= n_fft


def bands_to_frames(
    bands: Sequence[Tensor], n_fft: int, samples: int, floor: float, weights: Tensor, starts: Any,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return envelopes (sample, band), if `keep`, and frames (frame, band); see `can_interpolate`.

    Args:
        bands: At most LANES one-sided bands (bin,).
        n_fft: Length of their transform.
        samples: Samples of the signal.
        floor: Least value of an envelope.
        weights: Weights of groups of frames, see `frame_weights`.
        starts: First sample of each group, ascending from 0 or below.
        keep: Whether envelopes are wanted.
    """
    length = fast_length(max(TAPS, *(OVERSAMPLING * len(band) for band in bands)))
    spectrum = torch.zeros(len(bands), length, dtype=torch.complex64)
    for row, band in zip(spectrum, bands, strict=True):
        half = len(band) // 2
        row[: len(band) - half] = band[half:]
        row[length - half :] = band[:half]
    z = torch.view_as_real(torch.fft.ifft(spectrum.mul_(_correction(length)), norm="forward"))
    envelopes = empty((samples if keep else 0, LANES), z)
    frames = empty((4 * len(starts), LANES), z)
    flat = (each.flatten().numpy() for each in (z, weights, envelopes, frames))
    of_z, of_weights, of_envelopes, of_frames = flat
    run_bands(
        of_z, length, n_fft, samples, _polynomials().reshape(-1), floor, of_weights, len(weights),
        starts, of_envelopes, of_frames,
    )  # fmt: skip
    return envelopes[:, : len(bands)], frames[:, : len(bands)]
