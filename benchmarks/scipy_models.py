"""Dau1997, Osses2021 and King2019 written with scipy: `lfilter` channel by channel.

Constants come from earmill's models. The filters are scipy's, in float64 on one thread. numpy
computes the broken stick, and the adaptation loops sample by sample over all channels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.signal
from numpy.typing import NDArray

from amtcore import AdaptLoop, Dau1997, King2019, Osses2021
from amtcore.kernels.operations.modulation_filters import BANK_MODULUS, BANK_STATE_VARIABLE

Wave = NDArray[np.float64]
_FRAMES_PER_S = 100


def _pooled(y: Wave, fs_hz: float) -> Wave:
    """Return means over whole frames, (.., frame)."""
    count = int(y.shape[-1] * _FRAMES_PER_S / fs_hz)
    edges = np.ceil(np.arange(count + 1) * fs_hz / _FRAMES_PER_S).astype(int)
    sums = np.add.reduceat(y[..., : edges[-1]], edges[:-1], axis=-1)
    return sums / np.diff(edges)


def _gammatone(wave: Wave, model: Dau1997 | Osses2021 | King2019) -> Wave:
    bands = []
    for re, im, gain in model.filterbank.coefficients().double().tolist():
        y = wave.astype(complex)
        for _ in range(model.filterbank.n):
            y = scipy.signal.lfilter([1.0], [1.0, -complex(re, im)], y)
        bands.append(gain * y.real)
    return np.array(bands)


def _envelope(bands: Wave, model: Dau1997 | Osses2021 | King2019) -> Wave:
    y = np.maximum(bands, 0.0)
    for _ in range(model.ihc.iterations):
        y = scipy.signal.lfilter(model.ihc.b.double().numpy(), model.ihc.a.double().numpy(), y)
    return y


def _adapted(x: Wave, stage: AdaptLoop) -> Wave:
    rows = stage.recurrences(len(x))[0].coef.double().numpy().T
    floor, offset, scale = rows[:3]
    rise, overshoot, steepness = rows[3::3], rows[4::3], rows[5::3]
    divisors, out = stage.rest_state(1, len(x))[0].double().numpy().T.copy(), np.empty_like(x)
    for t in range(x.shape[1]):
        y = np.maximum(x[:, t], floor)
        for j, divisor in enumerate(divisors):
            y = y / divisor
            if (y > 1.0).any():
                soft = 2.0 * overshoot[j] / (1.0 + np.exp(steepness[j] * (y - 1.0)))
                y = np.where(y > 1.0, soft - (overshoot[j] - 1.0), y)
            divisors[j] += rise[j] * (y - divisor)
        out[:, t] = (y - offset) * scale
    return out


def _modulated(x: Wave, model: Dau1997 | Osses2021) -> Wave:
    """Return pooled outputs of every modulation filter."""
    bank, columns = model.modulation, []
    if bank.lowpass_cutoff:
        x = scipy.signal.lfilter(*scipy.signal.butter(1, bank.lowpass_cutoff, fs=model.fs), x)
    rows = bank.coefficients().double().tolist()
    low = scipy.signal.butter(2, float(bank.lp_cutoff), fs=model.fs, output="sos")
    for channel, signal in enumerate(x):
        begin, end = bank.offsets[channel : channel + 2]
        for kind, (re, im, gain, factor, *_) in zip(bank.kinds, rows[begin:end], strict=False):
            if kind == BANK_STATE_VARIABLE:
                y = scipy.signal.sosfilt(low, signal)
            else:
                z = scipy.signal.lfilter([gain], [1.0, -complex(re, im)], signal.astype(complex))
                y = factor * (np.abs(z) if kind == BANK_MODULUS else z.real)
            columns.append(_pooled(y, model.fs))
    return np.array(columns)


def dau1997(model: Dau1997, wave: Wave) -> Wave:
    """Return pooled features, (filter, frame)."""
    envelope = _envelope(_gammatone(wave, model), model)
    return _modulated(_adapted(envelope, model.adaptation), model)


def osses2021(model: Osses2021, wave: Wave) -> Wave:
    """Return pooled features, (filter, frame)."""
    for ear in (model.headphone, model.middleear):
        filtered = scipy.signal.oaconvolve(wave, ear.applied_taps().double().numpy())
        wave = filtered[ear.advance : ear.advance + len(wave)]
    envelope = _envelope(_gammatone(wave, model), model)
    return _modulated(_adapted(envelope, model.adaptation), model)


def king2019(model: King2019, wave: Wave) -> Wave:
    """Return pooled features, (filter, frame), one modulation filter after the other."""
    bands = _gammatone(wave, model)
    a, b, c, knee = model.compression.coefficients(1)[0].double().tolist()
    size = np.abs(bands)
    bands = np.where(size > knee, np.sign(bands) * b * size**c, a * bands)
    high = scipy.signal.butter(1, float(model.adaptation_filter.fc), "high", fs=model.fs)
    adapted = scipy.signal.lfilter(*high, _envelope(bands, model))
    bank, columns = model.modulation_filterbank, []
    for m, edges in enumerate(np.transpose([edge.numpy() for edge in bank.edges()])):
        sos = scipy.signal.butter(2, edges, "bandpass", fs=model.fs, output="sos")
        y = scipy.signal.sosfilt(sos, adapted)
        if bank.insensitive[m]:
            rms = np.sqrt(np.mean(y**2, -1, keepdims=True))
            y = np.abs(scipy.signal.hilbert(y))
            y *= rms / np.sqrt(np.mean(y**2, -1, keepdims=True))
        columns.append(_pooled(y, model.fs))
    return np.array(columns).swapaxes(0, 1).reshape(-1, columns[0].shape[-1])


PIPELINES: dict[str, Callable[..., Wave]] = {
    "dau1997": dau1997,
    "osses2021": osses2021,
    "king2019": king2019,
}
