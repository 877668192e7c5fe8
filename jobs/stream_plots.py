"""Feature streams of rows over time: one panel a stream; traces of one unit share a panel.

The description of a stream chooses its panel. One column is a trace. Columns by channel are an
image against centre frequency. Modulation filters are the RMS over channels against modulation
centre frequency. Events are a raster. Values of a whole clip go into the title.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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


def draw_rows(path: Path, rows: Sequence[Row], streams: Mapping[str, StreamInfo]) -> None:
    """Write the figure of rows, or of slices of them, as PNG: one column a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[StreamInfo]] = {}
    for name, info in streams.items():
        if info.frame_rate_hz > 0:
            panel = f"trace in {info.unit}" if info.width == 1 else name
            panels.setdefault(panel, []).append(info)
    width, height = PANEL_INCHES
    count = max(1, len(panels))
    with plt.rc_context(STYLE):
        figure = plt.figure(layout="constrained", figsize=(width, height * count + 0.6))
        for part, row in zip(figure.subfigures(1, len(rows), squeeze=False)[0], rows, strict=True):
            axes = part.subplots(count, sharex=True, squeeze=False)[:, 0]
            for axis, infos in zip(axes, panels.values(), strict=False):
                _draw_streams(axis, row, infos)
            axes[-1].set_xlabel("time (s)")
            # A row id may hold `$` and control characters; they are shown as text.
            part.suptitle(_title(row, streams), fontsize=11, parse_math=False)
        with warnings.catch_warnings():
            # A script that the font lacks is drawn as boxes; the warning is not printed.
            warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)
            figure.savefig(path, dpi=140)
        plt.close(figure)


def _title(row: Row, streams: Mapping[str, StreamInfo]) -> str:
    lines = [visible(row.row_id)]
    for name, info in streams.items():
        if info.frame_rate_hz == 0:
            columns = info.columns or [f"{k}" for k in range(info.width)]
            values = zip(columns, row.features[name][0], strict=True)
            lines.append(f"{', '.join(f'{c} {v:.3g}' for c, v in values)} {info.unit}")
    return "\n".join(lines)


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
        _draw_raster(panel, row.features[info.name], info)
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
        _frequency_axis(panel, info.fc_hz)
    else:
        panel.set_yticks(range(len(rates_hz)), [f"{rate:.3g}" for rate in rates_hz])
        panel.set_ylabel("modulation (Hz)")


def _times_s(row: Row, info: StreamInfo, frames: int) -> NDArray[np.float64]:
    first = row.first_frame[info.name] + 0.5
    return np.arange(first, first + frames) / info.frame_rate_hz


def _draw_raster(panel: Axes, events: Any, info: StreamInfo) -> None:
    """Draw one mark an event; marks grow with the spikes of a step."""
    time_s = (np.asarray(events.frame) + 0.5) / info.frame_rate_hz
    channel = np.asarray(events.channel) * len(info.fc_hz) / info.width
    size = 1.5 * np.sqrt(np.asarray(events.count, np.float64))
    panel.scatter(time_s, channel, s=size, c=COLORS[0], marker="|", linewidths=0.6, rasterized=True)
    panel.set_ylim(-0.5, len(info.fc_hz) - 0.5)
    _frequency_axis(panel, info.fc_hz)


def decibels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the level of a magnitude, at least -180 dB."""
    level: NDArray[np.float64] = 20 * np.log10(np.maximum(np.abs(values), 1e-9))
    return level


def _frequency_axis(axes: Axes, fc_hz: Sequence[float]) -> None:
    """Label channels by centre frequency; channels are equally spaced on the ERB scale."""
    shown = np.linspace(0, len(fc_hz) - 1, 7).round().astype(int)
    labels = [f"{fc_hz[k] / 1000:.2g}" if fc_hz[k] >= 1000 else f"0.{fc_hz[k] / 10:02.0f}"
              for k in shown]  # fmt: skip
    axes.set_yticks(shown, labels)
    axes.set_ylabel("centre frequency (kHz)")
