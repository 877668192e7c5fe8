"""The drawing of the first page: a short sound and its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes

from amtcore.features.registry import build_extractor
from docs.builder.figures.style import SHADES, figure
from earmill.jobs.demo_audio import speech

FS = 16000
SECONDS = 2.5
#: Pa of one unit of samples whose RMS of 1 is 100 dB SPL.
PA = 2.0


def _panels(wave: Axes, seen: Axes, modulated: Axes, loud: Axes) -> None:
    signal = speech(np.random.default_rng(4), FS, SECONDS)[: int(SECONDS * FS)]
    signal = (0.05 * signal / np.sqrt(np.mean(signal**2))).astype(np.float32)  # 74 dB SPL
    time_s = np.arange(len(signal)) / FS
    streams = {"modulation": {"frame_rate_hz": 100}, "envelope": {"frame_rate_hz": 100}}
    extractor = build_extractor("dau1997", fs_hz=FS, params={"fhigh": 7000.0}, streams=streams)
    made = extractor.extract([signal])[0]
    wave.plot(time_s, signal, linewidth=0.4)
    wave.set(title="in: samples", ylabel="digital")
    extent = (0, SECONDS, 0, made["envelope"].shape[1])
    _image(seen, 20 * np.log10(made["envelope"].T + 1e-5), extent)
    seen.set(title="envelope: 31 channels of the ear, 100 frames a second", ylabel="channel")
    rates = np.stack([made["modulation"][:, i::8] for i in range(8)])
    _image(modulated, np.log10(np.abs(rates).mean(2) + 1), (0, SECONDS, 0, 8))
    modulated.set(title="modulation: eight rates, 0 to 129 Hz, mean over channels", ylabel="filter")
    loudness = build_extractor("glasberg2002", fs_hz=FS, streams={"short_term_loudness": {}})
    (trace,) = loudness.extract([signal * PA])[0].values()
    loud.plot(np.arange(len(trace)) / 1000, trace)
    loud.set(title="loudness, 1000 frames a second", ylabel="sone", xlabel="time (s)")
    for axes in (wave, seen, modulated, loud):
        axes.set_xlim(0, SECONDS)
        axes.grid(False)


def _image(axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float]) -> None:
    axes.imshow(
        values, aspect="auto", origin="lower", cmap=SHADES, extent=extent, interpolation="nearest",
        vmin=np.percentile(values, 20), vmax=np.percentile(values, 99.5),
    )  # fmt: skip


FIGURES: Mapping[str, Callable[[], str]] = {
    "home": lambda: figure("home", _panels, rows=4, height=1.3)
}
