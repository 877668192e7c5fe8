"""Drawings of the time-domain models: filters, adaptation, modulation filters, compression."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes

from amtcore import (
    AdaptLoop,
    BrokenStickCompression,
    Dau1997,
    DRNLFilterbank,
    HeadphoneFilter,
    IHCEnvelope,
    King2019ModulationFilterbank,
    MiddleEarFilter,
    ModulationFilterbank,
    Osses2021,
    Paulick2024,
)
from docs.builder.figures.signals import click, decibels, spectrum_db, tone
from docs.builder.figures.style import COLOURS, SHADES, figure, frequency_axis, rate_axis

FS = 44100
#: Pa of one unit of the models in "rms1=100dB".
PA = 2.0


def _shades(n: int) -> np.ndarray:
    return colormaps[SHADES](np.linspace(0.1, 0.85, n))


def _gammatone(axes: Axes) -> None:
    model = Dau1997(FS)
    with torch.no_grad():
        response = model.filterbank(click(FS)[None])[0]
    hz = np.fft.rfftfreq(FS, 1 / FS)
    for band, colour in zip(spectrum_db(response)[::3], _shades(11), strict=True):
        axes.plot(hz, band, color=colour, linewidth=1.1)
    frequency_axis(axes)
    axes.set(ylim=(-60, 3), ylabel="gain (dB)", title="Gammatone filters, every third of 31")


def _adaptation(left: Axes, right: Axes) -> None:
    fs, levels = 4000, (40, 60, 80)
    time_s = np.arange(fs) / fs
    for axes, preset in ((left, "dau1997"), (right, "dau1996")):
        loops = AdaptLoop(fs, preset=preset)
        for level, colour in zip(levels, _shades(3), strict=True):
            envelope = torch.full((fs,), 10 ** ((level - 100) / 20))
            envelope[: fs // 10] = envelope[fs * 6 // 10 :] = 0
            with torch.no_grad():
                out = loops(envelope[None, None])[0, 0]
            axes.plot(time_s, out, color=colour, label=f"{level} dB SPL")
        axes.set_xlabel("time (s)")
    left.set(ylabel="model units", title="Five loops, overshoot limited to 10")
    right.set_title("The same without a limit")
    right.set_yscale("symlog", linthresh=100)
    right.set_yticks([-100, 0, 100, 1e4, 1e6], ["-100", "0", "100", "10,000", "1 million"])
    right.legend()


def _modulation(axes: Axes) -> None:
    fs = 2000
    bank = ModulationFilterbank(fs, [4000.0], max_mfc=150.0)
    with torch.no_grad():
        response = bank(click(8 * fs)[None, None])[0][0]
    hz = np.fft.rfftfreq(8 * fs, 1 / fs)
    for index, colour in enumerate(_shades(len(response))):
        # Above 10 Hz the output is an envelope: its filter is drawn from the bank's own constants.
        centre = float(bank.mfc[0][index])
        if centre <= 10:
            gain = spectrum_db(response[index])
        else:
            radius = np.exp(-np.pi * float(bank.bandwidth_hz[index]) / fs)
            pole = radius * np.exp(2j * np.pi * centre / fs)
            z = np.exp(2j * np.pi * hz / fs)
            gain = 20 * np.log10(np.abs((1 - radius) / (1 - pole / z)))
        gain = gain - gain.max()
        axes.semilogx(hz[1:], gain[1:], color=colour, label=f"{centre:.3g} Hz")
    axes.set(xlim=(0.5, 500), ylim=(-30, 2), xlabel="modulation frequency (Hz)")
    rate_axis(axes)
    axes.set(ylabel="gain re maximum (dB)", title="Modulation filters of one channel")
    axes.legend(title="centre", loc="center left", bbox_to_anchor=(1, 0.5))


def _answers_to_modulation(axes: Axes) -> None:
    """Draw the response of modulation filters to a modulated tone, over the rate."""
    fs, rates = 16000, np.geomspace(2, 150, 15)
    model = Dau1997(fs, 900, 1150)
    time_s = torch.arange(2 * fs) / fs
    carrier = tone(70, hz=1000, seconds=2, fs=fs) / PA
    signals = torch.stack([carrier * (1 + torch.sin(2 * np.pi * r * time_s)) for r in rates])
    with torch.no_grad():
        answer = model(signals.float())[len(model.fc) // 2][..., fs:]
    size = answer.square().mean(-1).sqrt()
    for index, colour in enumerate(_shades(size.shape[1])):
        centre = float(model.modulation.mfc[0][index])
        axes.semilogx(
            rates, size[:, index], "o-", markersize=3, color=colour, label=f"{centre:.3g}"
        )
    axes.set(xlabel="rate of the amplitude modulation (Hz)", ylabel="RMS (model units)")
    rate_axis(axes)
    axes.set_title("Output of eight modulation filters: 1 kHz, 70 dB SPL, fully modulated")
    axes.legend(title="filter (Hz)", loc="center left", bbox_to_anchor=(1, 0.5))


def _ears(axes: Axes) -> None:
    for ear, label in (
        (HeadphoneFilter(FS), "headphones and outer ear"),
        (MiddleEarFilter(FS), "middle ear, largest gain 0 dB"),
    ):
        hz, response = ear.get_frequency_response()
        axes.plot(hz[1:], decibels(response)[1:], label=label)
    frequency_axis(axes)
    axes.set(ylim=(-30, 12), ylabel="gain (dB)", title="The ears of Osses2021")
    axes.legend()


def _osses_onset(axes: Axes) -> None:
    """Draw the response of both models to a tone: their limits of the overshoot are 5 and 10."""
    signal = tone(70, hz=1000, seconds=0.4, fs=FS) / PA
    padded = torch.nn.functional.pad(signal, (FS // 10, FS // 10))
    time_s = np.arange(len(padded)) / FS
    for kind, label in ((Dau1997, "Dau1997, limit 10"), (Osses2021, "Osses2021, limit 5")):
        model = kind(FS, 900, 1150, return_stages=True)
        with torch.no_grad():
            _, stages = model(padded[None])
        axes.plot(time_s, stages["adaptation"][0, len(model.fc) // 2], label=label, linewidth=0.8)
    axes.set(xlabel="time (s)", ylabel="model units", title="After adaptation: 1 kHz, 70 dB SPL")
    axes.legend()


def _broken_stick(left: Axes, right: Axes) -> None:
    levels = np.arange(0, 101, 2)
    with torch.no_grad():
        amplitudes = torch.tensor(10 ** ((levels - 100) / 20)).float()
        out = BrokenStickCompression()(amplitudes[None])[0]
    left.plot(levels, 100 + decibels(out), color=COLOURS[0])
    left.plot(levels, levels, color="#808080", linewidth=0.8, linestyle="--")
    left.set(xlabel="level in (dB SPL)", ylabel="level out (dB)", title="Broken stick, knee 30 dB")
    fs = 2000
    bank = King2019ModulationFilterbank(fs, phase_insens="none")
    with torch.no_grad():
        response = bank(click(8 * fs)[None, None])[0, 0]
    hz = np.fft.rfftfreq(8 * fs, 1 / fs)
    for band, centre, colour in zip(response, bank.mfc, _shades(len(response)), strict=True):
        right.semilogx(hz[1:], spectrum_db(band)[1:], color=colour, label=f"{float(centre):.3g} Hz")
    right.set(xlim=(0.5, 500), ylim=(-30, 2), xlabel="modulation frequency (Hz)")
    rate_axis(right)
    right.set(ylabel="gain (dB)")
    right.set_title("Modulation filters, Q = 1")
    right.legend(fontsize=7)


def _drnl(left: Axes, right: Axes) -> None:
    levels = np.arange(0, 101, 10)
    ear = MiddleEarFilter(FS, normalize_gain=False)
    for subject, label in (("NH", "normal hearing"), ("HIx", "no gain (HIx)")):
        bank = DRNLFilterbank([1000.0], FS, subject=subject)
        tones = torch.stack([tone(level, hz=1000, seconds=0.1, fs=FS) for level in levels])
        with torch.no_grad():
            moved = bank(ear(tones))[:, 0, FS // 20 : FS * 9 // 100]
        left.plot(levels, decibels(moved.square().mean(-1).sqrt()), label=label)
    left.set(xlabel="level of a 1 kHz tone (dB SPL)", ylabel="velocity (dB re 1 m/s)")
    left.set_title("DRNL at 1 kHz: input and output")
    left.legend()
    bank = DRNLFilterbank([1000.0], FS)
    hz = np.geomspace(300, 2500, 25)
    for level, colour in zip((30, 60, 90), _shades(3), strict=True):
        tones = torch.stack([tone(level, hz=f, seconds=0.1, fs=FS) for f in hz])
        with torch.no_grad():
            moved = bank(ear(tones))[:, 0, FS // 20 : FS * 9 // 100]
        gain = decibels(moved.square().mean(-1).sqrt()) - level
        right.plot(hz, gain, color=colour, label=f"{level} dB SPL")
    frequency_axis(right, low=300, high=2500)
    right.set(ylabel="velocity re input (dB)", title="Its tuning widens with level")
    right.legend()


def _hair_cells(axes: Axes) -> None:
    """Draw the fine structure that both kinds of hair cell pass, over frequency."""
    hz = np.array([250, 500, 1000, 2000, 4000, 8000])
    tones = torch.stack([tone(60, hz=f, seconds=0.1, fs=FS) for f in hz])[:, None]
    for method, label in (
        ("dau1996", "one low-pass at 1 kHz (dau1996)"),
        ("breebaart2001", "five at 2 kHz (breebaart2001)"),
    ):
        with torch.no_grad():
            out = IHCEnvelope(FS, method=method)(tones)[:, 0, FS // 20 : FS * 9 // 100]
        left = out.std(-1) / out.mean(-1)
        axes.plot(hz, left, "o-", label=label)
    frequency_axis(axes, low=200)
    axes.set_ylabel("deviation / mean")
    axes.set_title("Hair cell: how much of the fine structure stays")
    axes.legend()


def _paulick_stages(*panels: Axes) -> None:
    signal = torch.nn.functional.pad(tone(60, hz=1000, seconds=0.2, fs=FS), (FS // 20, FS // 10))
    model = Paulick2024(FS, 900, 1100, 3, return_stages=True)
    with torch.no_grad():
        _, stages = model(signal[None])
    shown = {
        "drnl": "basilar membrane (m/s)",
        "ihc": "receptor potential (V)",
        "adaptation": "after adaptation (model units)",
    }
    for axes, (name, title) in zip(panels, shown.items(), strict=True):
        values = stages[name][0, 1]
        axes.plot(np.arange(len(values)) / FS, values, linewidth=0.6)
        axes.set(title=title, xlabel="time (s)")


def _of(name: str, draw: Callable[..., None], **layout: float) -> Callable[[], str]:
    return lambda: figure(name, draw, **layout)  # type: ignore[arg-type]


FIGURES: Mapping[str, Callable[[], str]] = {
    "gammatone": _of("gammatone", _gammatone),
    "adaptation": _of("adaptation", _adaptation, columns=2),
    "modulation": _of("modulation", _modulation),
    "modulated": _of("modulated", _answers_to_modulation, height=3),
    "ears": _of("ears", _ears),
    "osses": _of("osses", _osses_onset),
    "king": _of("king", _broken_stick, columns=2),
    "drnl": _of("drnl", _drnl, columns=2, height=3),
    "haircell": _of("haircell", _hair_cells, height=2.4),
    "paulick": _of("paulick", _paulick_stages, columns=3, height=2.2),
}
