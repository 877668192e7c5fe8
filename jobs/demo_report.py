"""Figure and table of the demo, made from the stored features.

The figure has a column for a clip of speech and a column for a clip of music. Its four rows are the
waveform in Pa, the auditory spectrogram (hair-cell envelope against centre frequency), a raster of
spikes (one neuron a channel), and the modulation spectrum (RMS over time of each modulation filter
against centre frequency).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile

from earmill.jobs.stream_plots import (
    decibels,
    draw_raster,
    frequency_axis,
    modulation_rms,
    written_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from amtcore.features.stream_info import StreamInfo
    from earmill.pipeline.loader.rows import Row

# Digital RMS of 1 is 100 dB SPL, which is 2 Pa.
PA_PER_UNIT = 2.0
SPECTROGRAM_RANGE_DB = 50.0
MODULATION_RANGE_DB = 30.0
WAVE_COLOR = "#33658a"


@dataclass(frozen=True)
class Example:
    """One clip of the figure: its title, its audio file and its row."""

    title: str
    audio: Path
    row: Row


def draw(path: Path, examples: Sequence[Example], streams: Mapping[str, StreamInfo]) -> None:
    """Write the figure as PNG."""
    shape = {"ncols": len(examples), "figsize": (11, 11), "height_ratios": (1, 2, 2, 2)}
    with written_figure(path, 4, **shape) as (figure, axes):
        _waveforms(axes[0], examples)
        _spectrograms(figure, axes[1], examples, streams["envelope"])
        _rasters(axes[2], examples, streams["spikes"])
        _modulation_spectra(figure, axes[3], examples, streams["modulation"])
        figure.suptitle("earmill demo: Dau 1997 features, read back from the dataset", fontsize=12)


def _waveforms(axes: Sequence[Axes], examples: Sequence[Example]) -> None:
    highest_pa = 0.0
    for panel, example in zip(axes, examples, strict=True):
        samples, rate_hz = soundfile.read(example.audio, always_2d=True)
        pressure_pa = samples.mean(axis=1) * PA_PER_UNIT
        time_s = np.arange(len(pressure_pa)) / rate_hz
        panel.plot(time_s, pressure_pa, color=WAVE_COLOR, linewidth=0.4, rasterized=True)
        panel.set(
            title=f"{example.title}: {example.row.row_id}, {rate_hz / 1000:g} kHz",
            xlabel="time (s)",
            ylabel="pressure (Pa)",
            xlim=(0, time_s[-1]),
        )
        highest_pa = max(highest_pa, float(np.abs(pressure_pa).max()))
    for panel in axes:
        panel.set_ylim(-1.1 * highest_pa, 1.1 * highest_pa)


def _spectrograms(
    figure: Figure, axes: Sequence[Axes], examples: Sequence[Example], stream: StreamInfo
) -> None:
    levels_db = [decibels(np.asarray(e.row.features[stream.name], np.float64).T) for e in examples]
    top_db = max(level.max() for level in levels_db)
    image: Any = None
    for panel, example, level_db in zip(axes, examples, levels_db, strict=True):
        frames = level_db.shape[1]
        image = panel.pcolormesh(
            (np.arange(frames) + 0.5) / stream.frame_rate_hz,
            np.arange(len(stream.fc_hz)),
            level_db - top_db,
            vmin=-SPECTROGRAM_RANGE_DB,
            vmax=0,
            cmap="magma",
            shading="nearest",
            rasterized=True,
        )
        panel.set(title="auditory spectrogram", xlabel="time (s)", xlim=(0, example.row.seconds))
        frequency_axis(panel, stream.fc_hz)
    figure.colorbar(image, ax=list(axes), label="hair-cell envelope (dB re maximum)", pad=0.01)


def _rasters(axes: Sequence[Axes], examples: Sequence[Example], stream: StreamInfo) -> None:
    for panel, example in zip(axes, examples, strict=True):
        events = example.row.features[stream.name]
        draw_raster(panel, events, stream)
        title = f"{events.n_spikes} spikes in steps of {1000 / stream.frame_rate_hz:g} ms"
        panel.set(title=title, xlabel="time (s)", xlim=(0, example.row.seconds))


def _modulation_spectra(
    figure: Figure, axes: Sequence[Axes], examples: Sequence[Example], stream: StreamInfo
) -> None:
    spectra = [
        modulation_rms(np.asarray(example.row.features[stream.name], np.float64), stream)
        for example in examples
    ]
    rates_hz = spectra[0][0]
    levels_db = [decibels(rms) for _, rms in spectra]
    top_db = max(np.nanmax(level) for level in levels_db)
    image: Any = None
    for panel, level_db in zip(axes, levels_db, strict=True):
        image = panel.imshow(
            level_db - top_db,
            origin="lower",
            aspect="auto",
            vmin=-MODULATION_RANGE_DB,
            vmax=0,
            cmap="viridis",
            interpolation="nearest",
        )
        panel.set(title="modulation spectrum", xlabel="modulation centre frequency (Hz)")
        panel.set_xticks(range(len(rates_hz)), [f"{rate:.3g}" for rate in rates_hz])
        frequency_axis(panel, stream.fc_hz)
    figure.colorbar(image, ax=list(axes), label="RMS over time (dB re maximum)", pad=0.01)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, for terminals too."""
    widths = [max(len(line[k]) for line in [header, *rows]) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
