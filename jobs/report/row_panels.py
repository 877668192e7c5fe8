"""The streams of one row as figures, chosen by the description of the stream.

one number a frame           a trace; traces of one unit share a figure
one number a clip            values
events                       a raster: spikes of each channel in each time bin
columns by channel           an auditory spectrogram
modulation filters           the modulation spectrum, RMS over time of channel by filter; and the
                             slowest filter of each channel as an auditory spectrogram, if no
                             stream has one
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.jobs.report.page import MOST_COLUMNS, MOST_ROWS, picture, pooled
from earmill.jobs.report.plots import (
    Line,
    Plot,
    Table,
    Tick,
    Values,
    aligned,
    hertz_text,
    nice_steps,
    number_text,
    points,
    seconds_text,
    signed,
    ticks,
)
from earmill.pipeline.common.text import visible
from earmill.pipeline.formats.stream_layout import EventLayout, layout_of
from earmill.pipeline.loader.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENVELOPE_RANGE_DB, MODULATION_RANGE_DB = 50.0, 30.0
FREQUENCIES_HZ = (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
MOST_TRACES = 4
BRIGHTEST = 0.95  # Quantile of the counts above 0 that gets the brightest colour.
MOST_LABELS, MOST_COLUMNS_IN_TABLE = 8, 16  # Limits of a modulation spectrum's figure.


def panels(row: Row, streams: Mapping[str, StreamInfo], seconds: float) -> list[Plot]:
    """Return a figure for each stream of frames or events, in the order of the page. The row holds
    the first `seconds` of the clip."""
    spectrograms, modulation, rasters = [], [], []
    traces: dict[str, list[StreamInfo]] = {}
    for name, info in streams.items():
        if info.frame_rate_hz == 0 or not len(row.features[name]):
            continue
        if isinstance(layout_of(info), EventLayout):
            rasters.append(_raster(row.features[name], info, seconds))
        elif info.width == 1:
            traces.setdefault(info.unit, []).append(info)
        elif info.mfc_hz:
            modulation.append(info)
        else:
            values, unit = _values(row, info), info.unit
            if name == "envelope":
                values, unit = _decibels(values), "dB re maximum"
                values = np.maximum(values - float(values.max()), -ENVELOPE_RANGE_DB)
            spectrograms.append(_image(values, info, seconds, unit))
    plots = [_traces(row, infos, seconds) for infos in traces.values()]
    for info in modulation:
        values = _values(row, info)
        if not spectrograms:
            spectrograms.append(_slowest(values, info, seconds))
        plots.append(_modulation(values, info))
    return [*spectrograms, *plots, *rasters]


def clip_values(row: Row, streams: Mapping[str, StreamInfo]) -> Table | None:
    rows = []
    for name, info in streams.items():
        if info.frame_rate_hz == 0 and len(row.features[name]):
            names = info.columns or tuple(f"{name} {k}" for k in range(info.width))
            pairs = zip(names, _values(row, info)[0].tolist(), strict=True)
            rows += [(_words(column), number_text(value), info.unit) for column, value in pairs]
    return Table(("value of the clip", "", "unit"), tuple(rows), (0, 2)) if rows else None


def _values(row: Row, info: StreamInfo) -> Values:
    return np.asarray(row.features[info.name], np.float64)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _title(info: StreamInfo, what: str) -> str:
    return f"{what}: {info.model} {_words(info.name)}"


def _over_time(seconds: float, **fields: Any) -> Plot:
    shown = ticks(nice_steps(0, seconds, 5), 0, seconds)
    return Plot(x_label="time (s)", x_ticks=shown, on_time=True, **fields)


def _decibels(values: Values) -> Values:
    level: Values = 20 * np.log10(np.maximum(np.abs(values), 1e-9))
    return level


def _slowest(values: Values, info: StreamInfo, seconds: float) -> Plot:
    """Plot the slowest modulation filter of each channel, which follows the envelope."""
    rates = np.asarray(info.mfc_hz)
    channels = [(a, b) for a, b in pairwise(info.channel_offsets) if b > a]
    columns = [first + int(rates[first:last].argmin()) for first, last in channels]
    plot = _image(values[:, columns], info, seconds, info.unit)
    note = "The slowest modulation filter of each channel, as no stream holds the envelope itself."
    return replace(plot, note=note)


def _image(values: Values, info: StreamInfo, seconds: float, unit: str) -> Plot:
    low, high = float(values.min()), float(values.max())
    means, columns = values.mean(axis=0), values.shape[1]
    if len(info.fc_hz) == columns:
        what, column, y_label = "Auditory spectrogram", "channel", "centre frequency (Hz)"
        names = [hertz_text(fc) for fc in info.fc_hz]
        of, y_ticks = f"{columns} channels from {names[0]} to {names[-1]}", _frequency_ticks(info)
    else:
        what, column, y_label = "Features over time", "column", "column"
        names = [f"{k}" for k in range(columns)]
        of, y_ticks = "all columns", _column_ticks(columns)
    return _over_time(
        seconds,
        title=_title(info, what),
        alt=f"{what} of {seconds_text(seconds)}, {of}, from {number_text(low)} to "
        f"{number_text(high)} {unit}; on average highest at {names[int(means.argmax())]}.",
        y_label=y_label,
        y_ticks=y_ticks,
        picture=picture(pooled(pooled(values.T, MOST_ROWS, 0), MOST_COLUMNS, 1), low, high),
        scale=(number_text(low), f"{number_text(high)} {unit}"),
        table=_per_channel(
            names, column, {f"mean ({unit})": means, f"highest ({unit})": values.max(axis=0)}
        ),
    )


def _per_channel(names: Sequence[str], what: str, columns: Mapping[str, Values]) -> Table:
    """Return a table by channel, averaged like the picture above `MOST_ROWS` channels."""
    shown = [pooled(values, MOST_ROWS, 0).tolist() for values in columns.values()]
    if len(names) > MOST_ROWS:
        edges = np.linspace(0, len(names), MOST_ROWS + 1).round().astype(int)
        names = [f"{names[a]} to {names[b - 1]}" for a, b in pairwise(edges.tolist())]
    cells = zip(names, *(aligned(column) for column in shown), strict=True)
    return Table((what, *columns), tuple(cells))


def _frequency_ticks(info: StreamInfo) -> tuple[Tick, ...]:
    fc_hz, channels = info.fc_hz, len(info.fc_hz)
    if channels < 2 or np.any(np.diff(fc_hz) <= 0):
        middles = [Tick(100 * (k + 0.5) / channels, hertz_text(f)) for k, f in enumerate(fc_hz)]
        return tuple(middles[:: max(1, channels // 6)])
    places = {f: float(np.interp(f, fc_hz, range(channels))) for f in FREQUENCIES_HZ}
    return tuple(
        Tick(100 * (place + 0.5) / channels, f"{f // 1000}k" if f >= 1000 else f"{f}")
        for f, place in places.items()
        if fc_hz[0] <= f <= fc_hz[-1]
    )


def _column_ticks(columns: int) -> tuple[Tick, ...]:
    shown = [int(v) for v in nice_steps(0, columns - 1, 5) if v == int(v)]
    return tuple(Tick(100 * (k + 0.5) / columns, f"{k}") for k in shown)


def _modulation(values: Values, info: StreamInfo) -> Plot:
    """Plot the RMS over time of each modulation filter of each channel, in dB."""
    rates = sorted(set(info.mfc_hz))
    # By channel and rate; NaN marks a filter that a channel lacks.
    rms = np.full((len(info.channel_offsets) - 1, len(rates)), np.nan)
    channels = np.repeat(np.arange(len(rms)), np.diff(info.channel_offsets))
    rms[channels, np.searchsorted(rates, info.mfc_hz)] = np.sqrt(np.mean(values**2, axis=0))
    levels_db = _decibels(rms)
    levels_db -= np.nanmax(levels_db)
    low_db = max(-MODULATION_RANGE_DB, float(np.floor(np.nanmin(levels_db))))
    names, filters = [hertz_text(fc) for fc in info.fc_hz], [hertz_text(rate) for rate in rates]
    channel, highest = divmod(int(np.nanargmax(levels_db)), len(rates))
    # Labels below the middle of each column, or of every n-th column.
    every = -(-len(rates) // MOST_LABELS)
    labels = [Tick(100 * (k + 0.5) / len(rates), number_text(f)) for k, f in enumerate(rates)]
    step = -(-len(rates) // MOST_COLUMNS_IN_TABLE)
    rows = tuple(
        (name, *("" if np.isnan(v) else signed(f"{v:.1f}") for v in levels[::step]))
        for name, levels in zip(names, levels_db.tolist(), strict=True)
    )
    return Plot(
        title=_title(info, "Modulation spectrum"),
        alt=f"Modulation spectrum: RMS over time of {len(rates)} modulation filters in "
        f"{len(names)} channels, in dB re maximum; highest at {names[channel]} in the filter of "
        f"{filters[highest]}.",
        x_label="modulation centre frequency (Hz)",
        y_label="centre frequency (Hz)",
        x_ticks=tuple(labels[::every]),
        y_ticks=_frequency_ticks(info),
        picture=picture(levels_db, low_db, 0),
        scale=(number_text(low_db), "0 dB re maximum"),
        table=Table(("channel", *filters[::step]), rows),
    )


def _traces(row: Row, infos: Sequence[StreamInfo], seconds: float) -> Plot:
    infos = infos[:MOST_TRACES]
    values = {info.name: _values(row, info)[:, 0] for info in infos}
    high = max(float(v.max()) for v in values.values())
    low = min(0.0, min(float(v.min()) for v in values.values()))
    span = (high - low) or 1.0
    models = {info.model for info in infos}
    lines, rows = [], []
    for number, info in enumerate(infos):
        trace = values[info.name]
        shown = pooled(trace, MOST_COLUMNS, 0)
        x = (np.arange(len(shown)) + 0.5) * len(trace) / len(shown) / info.frame_rate_hz / seconds
        label = _words(info.name) if len(models) == 1 else f"{info.model} {_words(info.name)}"
        lines.append(Line(points(x, (shown - low) / span), f"line-{number + 1}", label))
        quantiles = np.quantile(trace, (0.0, 0.5, 1.0)).tolist()
        rows.append((label, *(number_text(v) for v in quantiles)))
    unit, names = infos[0].unit, ", ".join(line.label for line in lines)
    peaks = "; ".join(f"{name} up to {most}" for name, _, _, most in rows)
    return _over_time(
        seconds,
        title=f"{names}: {', '.join(sorted(models))}".capitalize(),
        alt=f"Traces over {seconds_text(seconds)}: {peaks} {unit}.",
        y_label=unit,
        y_ticks=ticks(nice_steps(low, low + span, 4), low, low + span),
        lines=tuple(lines),
        legend=tuple((line.kind, line.label) for line in lines),
        table=Table(
            ("stream", f"lowest ({unit})", f"median ({unit})", f"highest ({unit})"), tuple(rows)
        ),
    )


def _raster(events: Any, info: StreamInfo, seconds: float) -> Plot:
    """Plot the spikes of each channel in each time bin; neurons of a channel are summed."""
    channels = len(info.fc_hz) or info.width
    columns = max(1, min(MOST_COLUMNS, events.n_frames))
    frames = np.asarray(events.frame) - events.first_frame
    at = (frames * columns // max(1, events.n_frames)).astype(int)
    channel = np.asarray(events.channel) * channels // info.width
    counts = np.zeros((channels, columns))
    np.add.at(counts, (channel, at), np.asarray(events.count))
    rates = counts.sum(axis=1) / seconds
    names = [hertz_text(f) for f in info.fc_hz] or [f"{k}" for k in range(channels)]
    stretch_ms = 1000 * seconds / columns
    # Onsets have many more spikes than the rest, which would be dark on a scale up to the most.
    most = max(1.0, float(np.quantile(counts[counts > 0], BRIGHTEST)) if len(frames) else 1.0)
    return _over_time(
        seconds,
        title=_title(info, "Spikes"),
        alt=f"Raster of {events.n_spikes:,} spikes in {channels} channels over "
        f"{seconds_text(seconds)}; most in the channel at {names[int(rates.argmax())]}, "
        f"{number_text(float(rates.max()))} a second.",
        y_label="centre frequency (Hz)",
        y_ticks=_frequency_ticks(info) if info.fc_hz else _column_ticks(channels),
        picture=picture(counts, 0, most),
        scale=("0", f"{most:.0f} spikes or more in {number_text(stretch_ms)} ms"),
        table=_per_channel(names, "channel", {"spikes a second": rates}),
    )


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
