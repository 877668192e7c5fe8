"""Drawings of the loudness models: growth, gain controls over time, patterns, two ears."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from amtcore import Glasberg2002, Moore2016
from docs.builder.figures.hearing import _of, _shades
from docs.builder.figures.signals import tone

FS = 32000


def _traces(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Draw short-term and long-term loudness of Moore2016, with equal signals at both ears."""
    with torch.no_grad():
        short, long, _ = Moore2016()(signal)
    return short, long


def _growth(axes: Axes) -> None:
    levels = np.arange(0, 101, 10)
    tones = torch.stack([tone(level, hz=1000, seconds=0.4, fs=FS) for level in levels])
    with torch.no_grad():
        glasberg = Glasberg2002(FS, return_stages=True)(tones)[1]["stl"][:, 300]
    moore = _traces(tones[:, None].expand(-1, 2, -1))[0][:, 300]
    axes.semilogy(levels, moore.clamp(min=1e-4), label="Moore2016")
    axes.semilogy(levels, glasberg.clamp(min=1e-4), label="Glasberg2002")
    rule = 2.0 ** ((levels - 40) / 10)
    axes.semilogy(levels, rule, "--", color="#808080", linewidth=0.8, label="twice every 10 dB")
    axes.set(ylim=(1e-3, 100), xlabel="level of a 1 kHz tone (dB SPL)", ylabel="loudness (sone)")
    axes.set_title("Loudness growth, free field, both ears")
    axes.legend()


def _over_time(axes: Axes) -> None:
    burst = tone(60, hz=1000, seconds=0.2, fs=FS)
    signal = torch.nn.functional.pad(burst, (FS // 10, FS * 7 // 10))
    short, long = _traces(signal)
    axes.axvspan(0.1, 0.3, color="#808080", alpha=0.2, linewidth=0)
    axes.plot(np.arange(len(short)) / 1000, short, label="short-term loudness")
    axes.plot(np.arange(len(long)) / 1000, long, label="long-term loudness")
    axes.set(xlabel="time (s)", ylabel="loudness (sone)")
    axes.set_title("Moore2016 to 200 ms of 1 kHz at 60 dB SPL (grey)")
    axes.legend()


def _patterns(axes: Axes) -> None:
    model = Glasberg2002(FS, return_stages=True)
    for level, colour in zip((20, 40, 60, 80), _shades(4), strict=True):
        with torch.no_grad():
            _, stages = model(tone(level, hz=1000, seconds=0.3, fs=FS))
        pattern = stages["specific_loudness"][200]
        cams = 21.366 * np.log10(0.004368 * model.fc.numpy() + 1)
        axes.plot(cams, pattern, color=colour, label=f"{level} dB SPL")
    axes.set(xlabel="place on the ERB scale (Cam)", ylabel="specific loudness (sone/Cam)")
    axes.set_title("Specific loudness of a 1 kHz tone (Glasberg2002, one ear)")
    axes.legend()


def _two_ears(axes: Axes) -> None:
    differences = np.arange(0, 41, 4)
    left = tone(60, hz=1000, seconds=0.4, fs=FS)
    right = torch.stack([tone(60 - d, hz=1000, seconds=0.4, fs=FS) for d in differences])
    short, _ = _traces(torch.stack((left.expand_as(right), right), 1))
    axes.plot(differences, short[:, 300], "o-", markersize=3)
    axes.set(xlabel="how much softer the right ear's tone is (dB)", ylabel="loudness (sone)")
    axes.set(title="Moore2016: 60 dB SPL at the left ear, less at the right", ylim=(0, None))


FIGURES: Mapping[str, Callable[[], str]] = {
    "growth": _of("growth", _growth, height=3),
    "loudness_time": _of("loudness_time", _over_time),
    "patterns": _of("patterns", _patterns),
    "two_ears": _of("two_ears", _two_ears, height=2.3),
}
