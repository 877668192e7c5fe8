"""Filter design: from frequencies in Hz to coefficient rows and taps, in float64 torch.

Gradients of learnable frequencies and gains go through the design; stages convert the result to
their working type. IIR: Butterworth by the bilinear transform, in state-variable form. FIR:
frequency sampling as in MATLAB's fir2, minimum phase by the cepstrum (Oppenheim and Schafer 1989,
section 12.7), and the Kaiser-windowed low-pass of scipy.signal.resample_poly. It may import only
`amtcore.errors`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from amtcore.errors import ParameterError


def butter1(cutoff_hz: float, fs_hz: float, kind: str = "low") -> tuple[list[float], list[float]]:
    """First-order Butterworth, b and a: low- or high-pass by the bilinear transform."""
    w = math.tan(math.pi * cutoff_hz / fs_hz)
    a = [1.0, (w - 1.0) / (w + 1.0)]
    b = [w / (1.0 + w)] * 2 if kind == "low" else [1.0 / (1.0 + w), -1.0 / (1.0 + w)]
    return b, a


def butter2(cutoff_hz: float, fs_hz: float) -> tuple[list[float], list[float]]:
    """Second-order Butterworth low-pass, b and a, by the bilinear transform."""
    w = math.tan(math.pi * cutoff_hz / fs_hz)
    norm = 1.0 / (1.0 + math.sqrt(2.0) * w + w * w)
    b0 = w * w * norm
    a1, a2 = 2.0 * (w * w - 1.0) * norm, (1.0 - math.sqrt(2.0) * w + w * w) * norm
    return [b0, 2.0 * b0, b0], [1.0, a1, a2]


def first_order_rows(b: Tensor, a: Tensor) -> Tensor:
    """(2,) numerator and denominator -> (3,): b0, b1, a1 with a0 = 1."""
    return torch.stack((b[0], b[1], a[1])) / a[0]


def state_variable_rows(g: Tensor, k: Tensor, m0: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """Rows of the second-order section: a1, a2, a3, m0, m1, m2 along a new last axis."""
    a1 = 1.0 / (1.0 + g * (g + k))
    a2 = g * a1
    return torch.stack((a1, a2, g * a2, m0, m1, m2), -1)


def section_rows(b: Tensor, a: Tensor) -> Tensor:
    """Return the rows (.., 6) of second-order filters in state-variable form.

    Let D(z) = 1 + a1/z + a2/z^2 be the denominator, B(z) the numerator, and s = 1/(1 + g k + g^2).
    The poles agree if D(1) = 4 g^2 s, D(-1) = 4 s and 1 - a2 = 2 g k s. The zeros agree if
    B(-1) = m0 D(-1) and B(1) = (m0 + m2) D(1). They also need b0 - b2 = m0 (1 - a2) + 2 m1 g s.

    Args:
        b: Numerators (.., 3), which broadcast with the denominators.
        a: Denominators (.., 3).
    """
    first = a[..., :1]
    b, a = torch.broadcast_tensors(b.double() / first, a.double() / first)
    (b0, b1, b2), (_, a1, a2) = b.unbind(-1), a.unbind(-1)
    at_one, at_minus = 1 + a1 + a2, 1 - a1 + a2
    g, s = torch.sqrt(at_one / at_minus), at_minus / 4
    k = (1 - a2) / (2 * g * s)
    m0 = (b0 - b1 + b2) / at_minus
    m1 = (b0 - b2 - m0 * (1 - a2)) / (2 * g * s)
    return state_variable_rows(g, k, m0, m1, (b0 + b1 + b2) / at_one - m0)


def lowpass2_rows(cutoff_hz: Tensor, fs_hz: float) -> Tensor:
    """Second-order Butterworth low-pass rows for each cutoff."""
    g = torch.tan(math.pi * cutoff_hz.double() / fs_hz)
    zero = torch.zeros_like(g)
    return state_variable_rows(g, zero + math.sqrt(2.0), zero, zero, zero + 1.0)


def butterworth_rows(cutoff_hz: Tensor, fs_hz: float, order: int, kind: str) -> list[Tensor]:
    """Butterworth low- or high-pass of any order as sections in series.

    The analog poles lie at equal angles on a half circle: pairs give second-order sections with
    1/Q = 2 cos(angle), an odd order one first-order section besides.

    Returns:
        Rows of each section, (6,) or, last, (3,).
    """
    g = torch.tan(math.pi * cutoff_hz.double() / fs_hz)
    one, zero = torch.ones_like(g), torch.zeros_like(g)
    sections = []
    for i in range(order // 2):
        k = one * (2.0 * math.cos(math.pi * (order - 1 - 2 * i) / (2 * order)))
        mix = (zero, zero, one) if kind == "low" else (one, -k, -one)
        sections.append(state_variable_rows(g, k, *mix))
    if order % 2:
        b0 = (g if kind == "low" else one) / (1.0 + g)
        b1 = b0 if kind == "low" else -b0
        sections.append(torch.stack((b0, b1, (g - 1.0) / (g + 1.0)), -1))
    return sections


def bandpass2_rows(low_hz: Tensor, high_hz: Tensor, fs_hz: float) -> Tensor:
    """Second-order Butterworth band-pass rows (two sections in series, 12) for each pair of edges.

    Let B be the width and c the centre in prewarped frequency. Each pole p of the analog low-pass
    becomes the roots of s^2 - p B s + c^2. A root and its conjugate (from the conjugate p) give the
    section B s / (s^2 + k g s + g^2), g = |s|, k = -2 Re(s) / g. The section peaks at B / (k g).
    """
    w_low, w_high = (torch.tan(math.pi * f.double() / fs_hz) for f in (low_hz, high_hz))
    width, centre = w_high - w_low, w_low * w_high
    pole = torch.polar(torch.ones_like(width), torch.full_like(width, 0.75 * math.pi))
    root = torch.sqrt((pole * width) ** 2 - 4.0 * centre)
    zero, sections = torch.zeros_like(width), []
    for s in ((pole * width - root) / 2, (pole * width + root) / 2):
        g = s.abs()
        k = -2.0 * s.real / g
        sections.append(state_variable_rows(g, k, zero, width / g, zero))
    return torch.cat(sections, -1)


def bandpass1_rows(low_hz: Tensor, high_hz: Tensor, fs_hz: float) -> Tensor:
    """First-order Butterworth band-pass rows (one second-order section) for each pair of edges."""
    w_low, w_high = (torch.tan(math.pi * f.double() / fs_hz) for f in (low_hz, high_hz))
    g = torch.sqrt(w_low * w_high)
    k = (w_high - w_low) / g
    zero = torch.zeros_like(g)
    return state_variable_rows(g, k, zero, k, zero)


#: Points of the frequency grid of `fir2` for orders up to twice as high.
_GRID_POINTS = 512
_RESAMPLE_HALF_LENGTH = 10  # in samples of the lower rate


def interpolate(at: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear function through (points, values); `points` ascend and span `at`."""
    low = (torch.searchsorted(points, at, right=True) - 1).clamp(0, len(points) - 2)
    weight = (at - points[low]) / (points[low + 1] - points[low])
    return values[low] + (values[low + 1] - values[low]) * weight


def fir2(order: int, f_hz: Tensor, gain: Tensor, fs_hz: float) -> Tensor:
    """Linear-phase FIR by frequency sampling.

    Gains are interpolated linearly on a grid from 0 to fs/2, given the delay order/2, and
    transformed back. The first order + 1 taps are weighted with a Hamming window.

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

    The phase is minus the Hilbert transform of the log magnitude, on a grid of at least 513 points.
    On fewer points the cepstrum of a short filter aliases, with errors of up to 50 dB. The number
    of taps must be odd: an odd order has a gain of exactly 0 at fs/2, whose logarithm is rounding.
    """
    n = max(len(taps), _GRID_POINTS + 1)
    magnitude = torch.fft.fft(taps, n).abs().clamp(min=torch.finfo(torch.float64).tiny)
    signs = torch.zeros(n, dtype=torch.float64, device=taps.device)
    signs[1 : (n + 1) // 2], signs[n // 2 + 1 :] = 1.0, -1.0
    spectrum = torch.fft.fft(torch.log(magnitude))
    phase = torch.fft.ifft(-1j * signs * spectrum).real
    return torch.fft.ifft(torch.polar(magnitude, -phase)).real[: len(taps)]


def resample_taps(up: int, down: int, half: int | None = None, beta: float = 5.0) -> Tensor:
    """Low-pass at the lower of two rates: 2 * half + 1 taps, gain `up` at 0 Hz.

    Args:
        up: Numerator of the output rate over the input rate.
        down: Denominator.
        half: Taps on each side; None takes 10 samples of the lower rate.
        beta: Parameter of the Kaiser window.
    """
    most = max(up, down)
    half = _RESAMPLE_HALF_LENGTH * most if half is None else half
    steps = np.arange(-half, half + 1)
    taps = np.sinc(steps / most) * np.kaiser(2 * half + 1, beta)
    return torch.from_numpy(up * taps / taps.sum())


def resample_ratio(fs: float, fs_out: float) -> tuple[int, int]:
    """Return (up, down) of a change of rate; ParameterError unless both are small integers."""
    ratio = Fraction(str(fs_out)) / Fraction(str(fs))
    if max(ratio.numerator, ratio.denominator) >= 4096:
        raise ParameterError(
            f"{fs_out:g} Hz from {fs:g} Hz is no ratio of small integers; use a rounder rate"
        )
    return ratio.numerator, ratio.denominator


def gammatone_polynomials(fc_hz: Tensor, width_hz: Tensor, fs: float) -> tuple[Tensor, Tensor]:
    """Return numerators (section, channel, 3) of gain 1 at fc, and denominators (channel, 3).

    Slaney (1993), Apple TR 35, describes the filters. Bandwidths are in Hz.

    Section k is (1 - q_k / z) / (1 - 2 r cos(theta) / z + r^2 / z^2).
    Here q_k is r (cos(theta) + s_k sin(theta)), and s is +-sqrt(3 + 2^1.5), +-sqrt(3 - 2^1.5).
    """
    theta = 2.0 * math.pi * fc_hz / fs
    r = torch.exp(-2.0 * math.pi * width_hz / fs)
    one, zero = torch.ones_like(r), torch.zeros_like(r)
    denominator = torch.stack((one, -2.0 * r * theta.cos(), r * r), -1)
    roots = [math.sqrt(3.0 + 2.0**1.5), math.sqrt(3.0 - 2.0**1.5)]
    numerators = []
    for s in (roots[0], -roots[0], roots[1], -roots[1]):
        numerator = torch.stack((one, -r * (theta.cos() + s * theta.sin()), zero), -1)
        gain = polynomial(numerator, theta).abs() / polynomial(denominator, theta).abs()
        numerators.append(numerator / gain.unsqueeze(-1))
    return torch.stack(numerators), denominator


def polynomial(b: Tensor, theta: Tensor) -> Tensor:
    """Return b0 + b1 / z + b2 / z^2 at z = exp(i theta), for coefficients (.., 3)."""
    turn = torch.polar(torch.ones_like(theta), -theta)
    return b[..., 0] + turn * (b[..., 1] + turn * b[..., 2])
