"""The figures of rows as one PNG: a column a row, with the panels that the report shows."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.jobs.report.plots import Plot
from earmill.jobs.report.row_panels import clip_values, panels
from earmill.pipeline.common.text import visible
from earmill.pipeline.loader.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
COLORS = ("#33658a", "#d1495b", "#66a182", "#8d6a9f")


def draw_rows(
    path: Path,
    rows: Sequence[Row],
    streams: Mapping[str, StreamInfo],
    start_s: float = 0.0,
    stop_s: float | None = None,
) -> None:
    """Write the figure of rows, or of the slices of them between two times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ends_s = [row.seconds if stop_s is None else min(stop_s, row.seconds) for row in rows]
    columns = [
        panels(row, streams, end_s - start_s) for row, end_s in zip(rows, ends_s, strict=True)
    ]
    most = max(1, *map(len, columns))
    with plt.rc_context(STYLE):
        figure = plt.figure(layout="constrained", figsize=(3 + 7 * len(rows), 2.1 * most + 0.6))
        parts = figure.subfigures(1, len(rows), squeeze=False)[0]
        for part, row, plots, end_s in zip(parts, rows, columns, ends_s, strict=True):
            for axes, plot in zip(part.subplots(most, squeeze=False)[:, 0], plots, strict=False):
                _draw(axes, plot, (start_s, end_s) if plot.on_time else (0.0, 100.0))
            values = clip_values(row, streams)
            clip = [" ".join(cells) for cells in values.rows] if values else []
            # A row id may hold `$` and control characters; they are shown as text.
            title = "\n".join([visible(row.row_id), *([", ".join(clip)] if clip else [])])
            part.suptitle(title, fontsize=11, parse_math=False)
        with warnings.catch_warnings():
            # A script that the font lacks is drawn as boxes; the warning is not printed.
            warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)
            figure.savefig(path, dpi=140)
        plt.close(figure)


def _draw(axes: Axes, plot: Plot, span: tuple[float, float]) -> None:
    """Draw one panel; `span` are the values of x at its left and right, y is in percent."""
    from matplotlib.image import imread

    low, high = span
    axes.set_title(plot.title, loc="left")
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label, xlim=span, ylim=(0, 100))
    if not plot.on_time:
        axes.set_xticks([t.at for t in plot.x_ticks], [t.text for t in plot.x_ticks])
    axes.set_yticks([t.at for t in plot.y_ticks], [t.text for t in plot.y_ticks])
    if plot.picture:
        image = imread(io.BytesIO(base64.b64decode(plot.picture.partition(",")[2])))
        axes.imshow(image, extent=(*span, 0, 100), aspect="auto", interpolation="nearest")
    if plot.scale:
        axes.set_title(" to ".join(plot.scale), loc="right", fontsize=8)
    for color, line in zip(COLORS, plot.lines, strict=False):
        x, y = np.array([pair.split(",") for pair in line.points.split()], np.float64).T / 1000
        axes.plot(low + (high - low) * x, 100 * (1 - y), color=color, lw=1, label=line.label)
    if plot.lines:
        axes.legend(loc="upper right", frameon=False)
