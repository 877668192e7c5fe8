"""Feature streams of one row over time: one panel a stream; traces of one unit share a panel.

The description of a stream chooses its panel. One column is a trace. Columns by channel are an
image against centre frequency. Modulation filters are the RMS over channels against modulation
centre frequency. Events are a raster. Values of a whole clip go into the title.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.text import visible
from earmill.pipeline.formats.stream_layout import EventLayout, layout_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from amtcore.features.stream_info import StreamInfo
    from earmill.pipeline.loader.rows import Row

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
ENVELOPE_RANGE_DB = 50.0
PANEL_INCHES = (10.0, 2.1)
COLORS = ("#33658a", "#d1495b", "#66a182", "#8d6a9f")


@contextmanager
def written_figure(path: Path, rows: int, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure and its (row, column) axes, and write the figure as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, layout="constrained", squeeze=False, **options)
        yield figure, axes
        with warnings.catch_warnings():
            # A script that the font lacks is drawn as boxes; the warning is not printed.
            warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)
            figure.savefig(path, dpi=140)
        plt.close(figure)


def draw_row(path: Path, row: Row, streams: Mapping[str, StreamInfo]) -> None:
    """Write the figure of a row, or of a slice of it, as PNG."""
    panels: dict[str, list[StreamInfo]] = {}
    title = [visible(row.row_id)]
    for name, info in streams.items():
        if info.frame_rate_hz > 0:
            panel = f"trace in {info.unit}" if info.width == 1 else name
            panels.setdefault(panel, []).append(info)
        else:
            columns = info.columns or [f"{k}" for k in range(info.width)]
            values = zip(columns, row.features[name][0], strict=True)
            title.append(f"{', '.join(f'{c} {v:.3g}' for c, v in values)} {info.unit}")
    width, height = PANEL_INCHES
    rows = max(1, len(panels))
    size = (width, height * rows + 0.6)
    with written_figure(path, rows, figsize=size, sharex=True) as (figure, axes):
        for axis, infos in zip(axes[:, 0], panels.values(), strict=False):
            _draw_streams(axis, row, infos)
        axes[-1, 0].set_xlabel("time (s)")
        # A row id may hold `$` and control characters; they are shown as text.
        figure.suptitle("\n".join(title), fontsize=11, parse_math=False)


def _draw_streams(panel: Axes, row: Row, infos: Sequence[StreamInfo]) -> None:
    """Draw one panel: a stream, or several traces of one unit."""
    info = infos[0]
    if info.width == 1:
        for color, trace in zip(COLORS * len(infos), infos, strict=False):
            values = np.asarray(row.features[trace.name], np.float64)[:, 0]
            label = f"{trace.model} {trace.name.replace('_', ' ')}"
            panel.plot(_times_s(row, trace, len(values)), values, color=color, lw=1, label=label)
        panel.set_ylabel(info.unit)
        panel.legend(loc="upper right", frameon=False)
        return
    panel.set_title(f"{info.model} {info.name.replace('_', ' ')}", loc="left")
    if isinstance(layout_of(info), EventLayout):
        draw_raster(panel, row.features[info.name], info)
        return
    values, label = np.asarray(row.features[info.name], np.float64).T, info.unit
    rates_hz: NDArray[np.float64] | None = None
    if info.mfc_hz:
        columns = np.asarray(info.mfc_hz)
        rates_hz = np.unique(columns)
        values = np.stack([np.sqrt((values[columns == r] ** 2).mean(axis=0)) for r in rates_hz])
        label = f"RMS, {info.unit}"
    elif info.name == "envelope":
        values = decibels(values)
        values, label = np.maximum(values - values.max(), -ENVELOPE_RANGE_DB), "dB re maximum"
    time_s = _times_s(row, info, values.shape[1])
    image = panel.pcolormesh(
        time_s, np.arange(len(values)), values, cmap="magma", shading="nearest", rasterized=True
    )
    panel.figure.colorbar(image, ax=panel, label=label, pad=0.01)
    if rates_hz is None:
        frequency_axis(panel, info.fc_hz)
    else:
        panel.set_yticks(range(len(rates_hz)), [f"{rate:.3g}" for rate in rates_hz])
        panel.set_ylabel("modulation (Hz)")


def _times_s(row: Row, info: StreamInfo, frames: int) -> NDArray[np.float64]:
    """Return the middle of each frame."""
    first = row.first_frame[info.name] + 0.5
    return np.arange(first, first + frames) / info.frame_rate_hz


def draw_raster(panel: Axes, events: Any, info: StreamInfo) -> None:
    """Draw one mark an event; marks grow with the spikes of a step."""
    time_s = (np.asarray(events.frame) + 0.5) / info.frame_rate_hz
    neurons_per_channel = info.width / len(info.fc_hz)
    size = 1.5 * np.sqrt(np.asarray(events.count, np.float64))
    channel = np.asarray(events.channel) / neurons_per_channel
    panel.scatter(time_s, channel, s=size, c=COLORS[0], marker="|", linewidths=0.6, rasterized=True)
    panel.set_ylim(-0.5, len(info.fc_hz) - 0.5)
    frequency_axis(panel, info.fc_hz)


def modulation_rms(
    values: NDArray[np.float64], info: StreamInfo
) -> tuple[list[float], NDArray[np.float64]]:
    """Return the rates of modulation filters, and the RMS over time of (channel, rate).

    NaN marks a filter that a channel lacks.
    """
    rates_hz = sorted(set(info.mfc_hz))
    rms = np.full((len(info.channel_offsets) - 1, len(rates_hz)), np.nan)
    of_columns = np.sqrt(np.mean(values**2, axis=0))
    for channel, (first, last) in enumerate(pairwise(info.channel_offsets)):
        for column in range(first, last):
            rms[channel, rates_hz.index(info.mfc_hz[column])] = of_columns[column]
    return rates_hz, rms


def decibels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the level of a magnitude, at least -180 dB."""
    level: NDArray[np.float64] = 20 * np.log10(np.maximum(np.abs(values), 1e-9))
    return level


def frequency_axis(axes: Axes, fc_hz: Sequence[float]) -> None:
    """Label channels by centre frequency; channels are equally spaced on the ERB scale."""
    shown = np.linspace(0, len(fc_hz) - 1, 7).round().astype(int)
    labels = [f"{fc_hz[k] / 1000:.2g}" if fc_hz[k] >= 1000 else f"0.{fc_hz[k] / 10:02.0f}"
              for k in shown]  # fmt: skip
    axes.set_yticks(shown, labels)
    axes.set_ylabel("centre frequency (kHz)")
