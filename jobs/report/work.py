"""The work on a dataset over time, from its commit records: throughput, CPU time, workers. Audio
and CPU time of a shard are spread evenly over its time. Long pauses are cut out of the axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from earmill.jobs.report.plots import (
    Box,
    Plot,
    Table,
    Tick,
    Values,
    aligned,
    hours_text,
    nice_steps,
    number_text,
    percent,
    seconds_text,
    short_text,
    ticks,
)
from earmill.pipeline.common import monitoring
from earmill.pipeline.common.text import in_units
from earmill.pipeline.dataset.watch import ShardFacts

LONGEST_PAUSE_S = 3600.0  # Longer times without work are cut out of the axis.
MOST_BINS = 60
# Round widths of a bin in seconds.
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
MOST_WORKERS = 200
# Parts of the CPU time by group; groups are names of colours.
GROUPS: dict[str, tuple[monitoring.Part, ...]] = {
    "read": ("fetch", "decode", "resample"),
    "model": ("model",),
    "write": ("encode", "check", "hash", "commit"),
    "other": ("other",),
}
GROUP_OF = {part: group for group, parts in GROUPS.items() for part in parts}


def work_of(facts: Sequence[ShardFacts]) -> dict[str, Any]:
    """Return the work on these shards; figures are None and lists empty without commits."""
    facts = sorted(facts, key=lambda one: one.created_s)
    lines, hidden = _workers(facts)
    measured = [one for one in facts if one.cpu_s]
    without = len(facts) - len(measured)
    clock = _Clock.of(facts)
    return {
        "throughput": _throughput(facts, clock) if clock else None,
        "cpu": _cpu(measured, clock) if clock and measured else None,
        "parts": _parts(measured),
        "cpu_note": f"{without:,} of {len(facts):,} records do not say it." if without else "",
        "workers": lines,
        "workers_note": f"{hidden:,} more processes are not shown." if hidden else "",
        "time_note": clock.note if clock else "",
    }


def mean_speed(facts: Sequence[ShardFacts]) -> float:
    """Return seconds of audio per second of working time; 0 without working time."""
    clock = _Clock.of(facts)
    return sum(one.audio_s for one in facts) / clock.length_s if clock else 0.0


def stamp(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return "unknown"


@dataclass(frozen=True)
class _Clock:
    """The axis of working time: periods of work joined end to end, and cut into bins."""

    moments: Values  # Begin and end of each period in turn, in seconds since 1970.
    places: Values  # Places of the moments on the axis, in seconds.
    edges: Values  # Edges of the bins; the last bin may be narrower.

    @classmethod
    def of(cls, facts: Sequence[ShardFacts]) -> _Clock | None:
        """Return the axis of these shards; None if they took no time."""
        spans = sorted((one.created_s - one.took_s, one.created_s) for one in facts)
        moments: list[float] = []
        for begin, end in spans:
            if moments and begin - moments[-1] <= LONGEST_PAUSE_S:
                moments[-1] = max(moments[-1], end)
            else:
                moments += [begin, end]
        lengths = np.diff(moments)
        lengths[1::2] = 0.0  # of the pauses
        places = np.append(0.0, np.cumsum(lengths))
        length_s = float(places[-1])
        if not length_s > 0:
            return None
        width = next((w for w in WIDTHS_S if length_s / w <= MOST_BINS), length_s / MOST_BINS)
        edges = np.append(np.arange(0.0, length_s * (1 - 1e-9), float(width)), length_s)
        return cls(np.array(moments), places, edges)

    @property
    def length_s(self) -> float:
        return float(self.places[-1])

    @property
    def note(self) -> str:
        """Begin and end of the work, and the number of pauses, in words."""
        text = f"From {stamp(float(self.moments[0]))} to {stamp(float(self.moments[-1]))}"
        if pauses := len(self.moments) // 2 - 1:
            times = "one pause" if pauses == 1 else f"{pauses:,} pauses"
            text += f", without {times} of more than {seconds_text(LONGEST_PAUSE_S)}"
        return text + "."

    def spread(self, facts: Sequence[ShardFacts], amounts: Values) -> Values:
        """Spread (shard, kind) amounts over the time of each shard; return (bin, kind) amounts."""
        spans = np.array([(one.created_s - one.took_s, one.created_s) for one in facts])
        begins, ends = np.interp(spans, self.moments, self.places).T
        # A shard that took no time gets a short time at its commit, also at the very beginning.
        least_s = 1e-6 * self.length_s
        ends = np.maximum(ends, least_s)[:, None]
        begins = np.minimum(begins[:, None], ends - least_s)
        over = np.diff(np.clip(self.edges, begins, ends))
        totals: Values = (over / over.sum(axis=1, keepdims=True)).T @ amounts
        return totals


def _throughput(facts: Sequence[ShardFacts], clock: _Clock) -> Plot:
    amounts = np.array([[one.audio_s, one.rows_ok + one.rows_bad] for one in facts])
    rates = clock.spread(facts, amounts) / np.diff(clock.edges)[:, None]
    mean = number_text(float(amounts[:, 0].sum() / clock.length_s))
    return _time_plot(
        clock,
        rates[:, :1],
        {"one": "{} times real time, {} rows/s"},
        {"times real time": rates[:, 0], "rows a second": rates[:, 1]},
        title="Throughput",
        alt=f"Audio seconds processed a second over {seconds_text(clock.length_s)} of work: "
        f"{mean} on average, up to {number_text(float(rates[:, 0].max()) or 1.0)}.",
        y_label="times real time",
        note=f"{mean} times real time on average.",
    )


def _cpu(facts: Sequence[ShardFacts], clock: _Clock) -> Plot:
    cpu_s = np.array([one.cpu_s for one in facts])
    indices = [[monitoring.PARTS.index(part) for part in parts] for parts in GROUPS.values()]
    groups = np.stack([cpu_s[:, parts].sum(axis=1) for parts in indices], axis=1)
    cores = clock.spread(facts, groups) / np.diff(clock.edges)[:, None]
    totals = groups.sum(axis=0)
    shares = zip(GROUPS, (totals / (totals.sum() or 1.0)).tolist(), strict=True)
    return _time_plot(
        clock,
        cores,
        {group: f"{group} {{{k}}} cores" for k, group in enumerate(GROUPS)},
        {f"{group} (cores)": busy for group, busy in zip(GROUPS, cores.T, strict=True)},
        title="CPU time of the workers",
        alt=f"Cores busy over {seconds_text(clock.length_s)} of work, by what for: "
        f"{', '.join(f'{group} {percent(share)}' for group, share in shares)}.",
        y_label="cores busy",
        legend=tuple(
            (group, f"{group}: {', '.join(parts)}" if len(parts) > 1 else group)
            for group, parts in GROUPS.items()
        ),
    )


def _time_plot(
    clock: _Clock,
    values: Values,
    titles: Mapping[str, str],
    columns: Mapping[str, Values],
    **fields: Any,
) -> Plot:
    """Plot (bin, kind) values over working time, stacked. `titles` has a title of the boxes for
    each kind; its braces are numbers of the table's columns."""
    top = float(values.sum(axis=1).max()) or 1.0
    spans = list(pairwise(clock.edges.tolist()))
    times = [f"{seconds_text(first)} to {seconds_text(last)}" for first, last in spans]
    cells = [tuple(map(number_text, bin)) for bin in np.stack([*columns.values()], 1).tolist()]
    boxes = []
    for (first, last), time, numbers, bin in zip(spans, times, cells, values.tolist(), strict=True):
        left, right = 100 * first / clock.length_s, 100 * last / clock.length_s
        base = 0.0
        for (kind, title), value in zip(titles.items(), bin, strict=True):
            y, height = 100 * (1 - base / top - value / top), 100 * value / top
            if height:
                text = f"{time}: {title.format(*numbers)}"
                boxes.append(Box(left, y, right - left, height, kind, text))
            base += value
    length, unit = in_units(clock.length_s)
    pauses = np.diff(clock.moments)[1::2].tolist()
    places = (100 * clock.places[2::2] / clock.length_s).tolist()
    return Plot(
        x_label="time at work",
        x_ticks=ticks(nice_steps(0, length, 5), 0, length, lambda v: f"{number_text(v)} {unit}"),
        y_ticks=ticks(nice_steps(0, top, 5), 0, top, short_text),
        boxes=tuple(boxes),
        marks=tuple(
            Tick(at, f"pause of {seconds_text(pause)}")
            for at, pause in zip(places, pauses, strict=True)
        ),
        table=Table(
            ("time at work", *columns),
            tuple((time, *row) for time, row in zip(times, cells, strict=True)),
        ),
        **fields,
    )


def _parts(facts: Sequence[ShardFacts]) -> list[dict[str, Any]]:
    """Return all parts of the CPU time, in the order in which a clip passes them. `per_audio` is in
    milliseconds per second of audio."""
    sums = np.array([one.cpu_s for one in facts]).sum(axis=0).tolist() if facts else []
    whole, audio_s = sum(sums) or 1.0, sum(one.audio_s for one in facts)
    per_audio = aligned([1000 * seconds / audio_s for seconds in sums]) if audio_s else []
    parts, left = [], 0.0
    for k, (seconds, text) in enumerate(zip(sums, aligned(sums), strict=True)):
        part, width = monitoring.PARTS[k], 100 * seconds / whole
        parts.append(
            {
                "part": part,
                "group": GROUP_OF[part],
                "seconds": text,
                "share": percent(seconds / whole),
                "per_audio": per_audio[k] if audio_s else "none",
                "from_left": left,
                "width": width,
            }
        )
        left += width
    return parts


def _workers(facts: Sequence[ShardFacts]) -> tuple[list[dict[str, Any]], int]:
    """Return a line for each process, most commits first, and the number of processes left out."""
    by_worker: dict[tuple[str, int], list[ShardFacts]] = defaultdict(list)
    for one in facts:
        by_worker[one.worker].append(one)
    ordered = sorted(by_worker.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    lines = []
    for (host, pid), done in ordered[:MOST_WORKERS]:
        audio_s, busy_s = sum(one.audio_s for one in done), sum(one.took_s for one in done)
        lines.append(
            {
                "name": f"{host}, process {pid}" if pid else host,
                "device": ", ".join(sorted({one.device for one in done})[:3]),
                "shards": len(done),
                "rows": sum(one.rows_ok + one.rows_bad for one in done),
                "audio": hours_text(audio_s),
                "busy": seconds_text(busy_s),
                "speed": number_text(audio_s / busy_s) if busy_s else "none",
                "last": stamp(done[-1].created_s),
            }
        )
    return lines, len(ordered) - len(lines)
