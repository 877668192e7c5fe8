"""The drawing of the first page: a short sound and its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from amtcore.features.registry import build_extractor
from docs.builder.figures.style import SHADES, figure
from earmill.jobs.demo_audio import speech

FS = 16000
SECONDS = 2.5
#: Pa of one unit of samples whose RMS of 1 is 100 dB SPL.
PA = 2.0


#: Width of the drawing on a phone, in inches.
NARROW = 4.1


def _panels(wave: Axes, seen: Axes, modulated: Axes, loud: Axes) -> None:
    signal = speech(np.random.default_rng(4), FS, SECONDS)[: int(SECONDS * FS)]
    signal = (0.05 * signal / np.sqrt(np.mean(signal**2))).astype(np.float32)  # 74 dB SPL
    time_s = np.arange(len(signal)) / FS
    streams = {"modulation": {"frame_rate_hz": 100}, "envelope": {"frame_rate_hz": 100}}
    extractor = build_extractor("dau1997", fs_hz=FS, streams=streams)
    made = extractor.extract([signal])[0]
    modulation, envelope = extractor.streams
    wave.plot(time_s, signal, linewidth=0.4)
    wave.set(title="samples", ylabel="amplitude")
    _image(seen, 20 * np.log10(made["envelope"].T + 1e-5))
    _ticks(seen, envelope.fc_hz, slice(2, None, 8))
    seen.set(title=f"envelope in {envelope.width} channels of the ear", ylabel="channel (Hz)")
    rates_hz = modulation.mfc_hz[:8]
    rates = np.stack([made["modulation"][:, i::8] for i in range(8)])
    _image(modulated, np.log10(np.abs(rates).mean(2) + 1))
    _ticks(modulated, rates_hz, slice(1, None, 3))
    modulated.set(title="modulation, mean over channels", ylabel="filter (Hz)")
    loudness = build_extractor("glasberg2002", fs_hz=FS, streams={"short_term_loudness": {}})
    (trace,) = loudness.extract([signal * PA])[0].values()
    loud.plot(np.arange(len(trace)) / 1000, trace)
    loud.set(title="loudness", ylabel="sone", xlabel="time (s)")
    for axes in (wave, seen, modulated, loud):
        axes.set_xlim(0, SECONDS)
        axes.grid(False)


def _image(axes: Axes, values: np.ndarray) -> None:
    axes.imshow(
        values, aspect="auto", origin="lower", cmap=SHADES, interpolation="nearest",
        extent=(0, SECONDS, -0.5, len(values) - 0.5),
        vmin=np.percentile(values, 20), vmax=np.percentile(values, 99.5),
    )  # fmt: skip


def _ticks(axes: Axes, centres_hz: Sequence[float], shown: slice) -> None:
    """Label some rows of an image with their centre frequencies."""
    places = range(len(centres_hz))[shown]
    axes.set_yticks(places, [f"{centres_hz[place]:.0f}" for place in places])


def _home() -> str:
    """Return two drawings; the style sheet shows one, by the width of the window."""
    forms = {"wide": 7.6, "narrow": NARROW}
    return "".join(
        figure(f"home-{form}", _panels, rows=4, height=1.3, width=width).replace(
            "<svg ", f'<svg class="{form}" ', 1
        )
        for form, width in forms.items()
    )


FIGURES: Mapping[str, Callable[[], str]] = {"home": _home}
