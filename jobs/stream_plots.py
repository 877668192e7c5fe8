"""Feature streams of one row over time: one panel a stream; traces of one unit share a panel.

The description of a stream chooses its panel. One column is a trace. Columns by channel are an
image against centre frequency. Modulation filters are the RMS over channels against modulation
centre frequency. Events are a raster. Values of a whole clip go into the title.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.text import visible
from earmill.pipeline.formats.stream_layout import EventLayout, layout_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amtcore.features.base import StreamInfo
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


def draw_row(path: Path, row: Row, streams: Mapping[str, StreamInfo]) -> None:
    """Write the figure of a row, or of a slice of it, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = panels_of(streams)
    width, height = PANEL_INCHES
    size = (width, height * max(1, len(panels)) + 0.6)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            max(1, len(panels)), figsize=size, layout="constrained", sharex=True, squeeze=False
        )
        for panel, infos in zip(axes[:, 0], panels, strict=False):
            draw_streams(panel, row, infos)
        axes[-1, 0].set_xlabel("time (s)")
        # A row id may hold `$` and control characters; they are shown as text.
        title = "\n".join([visible(row.row_id), *clip_values(row, streams)])
        figure.suptitle(title, fontsize=11, parse_math=False)
        with warnings.catch_warnings():
            # A script that the font lacks is drawn as boxes; the warning is not printed.
            warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)
            figure.savefig(path, dpi=140)
        plt.close(figure)


def panels_of(streams: Mapping[str, StreamInfo]) -> list[list[StreamInfo]]:
    """Group streams by panel: traces of one unit share one; streams of whole clips have none."""
    panels: dict[str, list[StreamInfo]] = {}
    for name, info in streams.items():
        if info.frame_rate_hz > 0:
            panels.setdefault(f"trace in {info.unit}" if is_trace(info) else name, []).append(info)
    return list(panels.values())


def is_trace(info: StreamInfo) -> bool:
    """Return True if a stream has one number a frame."""
    return info.width == 1


def clip_values(row: Row, streams: Mapping[str, StreamInfo]) -> list[str]:
    """Return one line for each stream of whole clips."""
    lines = []
    for name, info in streams.items():
        if info.frame_rate_hz == 0:
            columns = info.columns or [f"{k}" for k in range(info.width)]
            values = zip(columns, row.features[name][0], strict=True)
            lines.append(f"{', '.join(f'{c} {v:.3g}' for c, v in values)} {info.unit}")
    return lines


def draw_streams(panel: Axes, row: Row, infos: Sequence[StreamInfo]) -> None:
    """Draw one panel: a stream, or several traces of one unit."""
    info = infos[0]
    if is_trace(info):
        for color, trace in zip(COLORS * len(infos), infos, strict=False):
            values = np.asarray(row.features[trace.name], np.float64)[:, 0]
            label = f"{trace.model} {trace.name.replace('_', ' ')}"
            panel.plot(times_s(row, trace, len(values)), values, color=color, lw=1, label=label)
        panel.set_ylabel(info.unit)
        panel.legend(loc="upper right", frameon=False)
        return
    panel.set_title(f"{info.model} {info.name.replace('_', ' ')}", loc="left")
    if isinstance(layout_of(info), EventLayout):
        draw_raster(panel, row.features[info.name], info)
    elif info.mfc_hz:
        _modulation(panel, row, info)
    else:
        _channels(panel, row, info)


def draw_raster(panel: Axes, events: Any, info: StreamInfo) -> None:
    """Draw one mark an event; marks grow with the spikes of a step."""
    time_s = (np.asarray(events.frame) + 0.5) / info.frame_rate_hz
    neurons_per_channel = info.width / len(info.fc_hz)
    size = 1.5 * np.sqrt(np.asarray(events.count, np.float64))
    channel = np.asarray(events.channel) / neurons_per_channel
    panel.scatter(time_s, channel, s=size, c=COLORS[0], marker="|", linewidths=0.6, rasterized=True)
    panel.set_ylim(-0.5, len(info.fc_hz) - 0.5)
    frequency_axis(panel, info.fc_hz)


def times_s(row: Row, info: StreamInfo, frames: int) -> NDArray[np.float64]:
    """Return the middle of each frame."""
    first = row.first_frame[info.name] + 0.5
    return np.arange(first, first + frames) / info.frame_rate_hz


def _channels(panel: Axes, row: Row, info: StreamInfo) -> None:
    """Draw values against centre frequency; an envelope in dB."""
    values = np.asarray(row.features[info.name], np.float64).T
    label = info.unit
    if info.name == "envelope":
        values = decibels(values)
        values, label = np.maximum(values - values.max(), -ENVELOPE_RANGE_DB), "dB re maximum"
    _image(panel, row, info, values, label)
    frequency_axis(panel, info.fc_hz)


def _modulation(panel: Axes, row: Row, info: StreamInfo) -> None:
    """Draw the RMS over the channels with a filter, against modulation centre frequency."""
    values = np.asarray(row.features[info.name], np.float64)
    columns = np.asarray(info.mfc_hz)
    rates_hz = np.unique(columns)
    rms = np.stack([np.sqrt((values[:, columns == r] ** 2).mean(axis=1)) for r in rates_hz])
    _image(panel, row, info, rms, f"RMS, {info.unit}")
    panel.set_yticks(range(len(rates_hz)), [f"{rate:.3g}" for rate in rates_hz])
    panel.set_ylabel("modulation (Hz)")


def _image(
    panel: Axes, row: Row, info: StreamInfo, values: NDArray[np.float64], label: str
) -> None:
    time_s = times_s(row, info, values.shape[1])
    image = panel.pcolormesh(
        time_s, np.arange(len(values)), values, cmap="magma", shading="nearest", rasterized=True
    )
    panel.figure.colorbar(image, ax=panel, label=label, pad=0.01)


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
