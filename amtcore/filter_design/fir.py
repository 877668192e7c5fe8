"""Design of finite impulse responses: from gains at frequencies to taps.

All in float64 torch, so that learnable gains get their gradients through the design. Frequency
sampling as in MATLAB's fir2, minimum phase by the cepstrum (Oppenheim and Schafer, 1989, section
12.7), and the Kaiser-windowed low-pass that scipy.signal.resample_poly uses.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

#: Points of the frequency grid of `fir2` for orders up to twice as high.
_GRID_POINTS = 512
_RESAMPLE_BETA = 5.0
_RESAMPLE_HALF_LENGTH = 10  # in samples of the lower rate


def interpolate(at: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear function through (points, values); `points` ascend and span `at`."""
    low = (torch.searchsorted(points, at, right=True) - 1).clamp(0, len(points) - 2)
    weight = (at - points[low]) / (points[low + 1] - points[low])
    return values[low] + (values[low + 1] - values[low]) * weight


def fir2(order: int, f_hz: Tensor, gain: Tensor, fs_hz: float) -> Tensor:
    """Linear-phase FIR by frequency sampling.

    Gains are interpolated linearly on a grid from 0 to fs/2, given the delay order/2, transformed
    back, and the first order + 1 taps weighted with a Hamming window.

    Args:
        order: Number of taps less one.
        f_hz: (n,) ascending from 0 to fs/2.
        gain: (n,) amplitude gains.
        fs_hz: Sampling rate.
    """
    points = max(_GRID_POINTS, 2 ** math.ceil(math.log2(order)) if order > _GRID_POINTS else 0)
    steps = torch.arange(points + 1, dtype=torch.float64, device=gain.device)
    grid = interpolate(steps * (fs_hz / 2 / points), f_hz.double(), gain.double())
    delay = torch.polar(torch.ones_like(steps), -math.pi * order / 2 * steps / points)
    taps = torch.fft.irfft(grid * delay, 2 * points)[: order + 1]
    window = torch.hamming_window(order + 1, False, dtype=torch.float64, device=gain.device)
    return taps * window


def minimum_phase(taps: Tensor) -> Tensor:
    """The response of the same magnitude whose energy comes earliest.

    Its phase is minus the Hilbert transform of the log magnitude, on a grid of as many points as
    there are taps, 513 or more: on fewer, the cepstrum of a short filter folds onto itself, and the
    magnitude is up to 50 dB off. An odd order has a gain of exactly 0 at fs/2, whose logarithm is
    rounding, so the number of taps must be odd.
    """
    n = max(len(taps), _GRID_POINTS + 1)
    magnitude = torch.fft.fft(taps, n).abs().clamp(min=torch.finfo(torch.float64).tiny)
    signs = torch.zeros(n, dtype=torch.float64, device=taps.device)
    signs[1 : (n + 1) // 2], signs[n // 2 + 1 :] = 1.0, -1.0
    spectrum = torch.fft.fft(torch.log(magnitude))
    phase = torch.fft.ifft(-1j * signs * spectrum).real
    return torch.fft.ifft(torch.polar(magnitude, -phase)).real[: len(taps)]


def resample_taps(up: int, down: int) -> Tensor:
    """Low-pass at the lower of two rates: 2 * 10 * max(up, down) + 1 taps, gain `up` at 0 Hz."""
    most = max(up, down)
    half = _RESAMPLE_HALF_LENGTH * most
    steps = np.arange(-half, half + 1)
    taps = np.sinc(steps / most) * np.kaiser(2 * half + 1, _RESAMPLE_BETA)
    return torch.from_numpy(up * taps / taps.sum())
