"""Figures as plain values: places of marks and ticks, in percent of the plot's area. The page draws
them as SVG. The plot's area stretches and text keeps its size, so a figure is readable on a phone
too. Every figure has a text for screen readers and a table with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.text import in_units

Values = NDArray[np.float64]

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
MOST_TICKS = 6  # Most ticks of an axis; a phone shows every second one.
HISTOGRAM_BINS = 40
# Values whose largest is more than this times the smallest get bins of equal ratio.
LOG_RATIO = 30.0
MOST_BARS = 12  # Most bars of a category chart; other categories share one bar.


@dataclass(frozen=True)
class Table:
    """Numbers of a figure as texts, aligned right; columns in `words` are aligned left."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: Container[int] = (0,)


@dataclass(frozen=True)
class Tick:
    """A label of an axis; `at` in percent from the left or the bottom."""

    at: float
    text: str


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in percent from the left and the top; `kind` names its colour."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True)
class Line:
    """A line through points; x and y from 0 to 1000, y from the top."""

    points: str
    kind: str
    label: str


@dataclass(frozen=True)
class Plot:
    title: str
    alt: str  # text for screen readers
    x_label: str  # with unit
    y_label: str  # with unit
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    boxes: tuple[Box, ...] = ()
    lines: tuple[Line, ...] = ()
    picture: str = ""  # PNG as data URI
    marks: tuple[Tick, ...] = ()  # vertical lines with a text
    scale: tuple[str, str] | None = None  # values of the first and last colour of the picture
    legend: tuple[tuple[str, str], ...] = ()  # kind and text of each colour
    table: Table | None = None
    on_time: bool = False  # the x axis is the time of a clip, so the player's position is shown
    note: str = ""  # sentence below the figure


def _digits(largest: float) -> int:
    """Return the decimals that leave three significant digits of a number."""
    return max(0, 2 - math.floor(math.log10(abs(largest)))) if largest else 0


def number_text(value: float) -> str:
    """Return a number with three significant digits: 0.25, 12.5, 1,234."""
    if not math.isfinite(value):
        return "none"
    value = value or 0.0  # without the sign of a negative zero
    text = f"{value:,.{_digits(value)}f}"
    return signed(text.rstrip("0").rstrip(".") if "." in text else text)


def cell_text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def aligned(values: Sequence[float]) -> list[str]:
    """Return the numbers of a column with equal decimals, three digits for the largest."""
    digits = _digits(max((abs(value) for value in values if math.isfinite(value)), default=0.0))
    return [signed(f"{v:,.{digits}f}") if math.isfinite(v) else "none" for v in values]


def signed(text: str) -> str:
    """Replace hyphens by minus signs, which are as wide as a digit."""
    return text.replace("-", MINUS)


def short_text(value: float) -> str:
    """Return a count for an axis: 500, 20k, 3M."""
    if abs(value) >= 1e6:
        return f"{number_text(value / 1e6)}M"
    if abs(value) >= 1e4:
        return f"{number_text(value / 1e3)}k"
    return number_text(value)


def hertz_text(value: float) -> str:
    """Return a frequency: 440 Hz, 1.2 kHz."""
    return f"{number_text(value / 1000)} kHz" if value >= 1000 else f"{number_text(value)} Hz"


def rate_text(value: float) -> str:
    """Return an exact sample rate: 22.05 kHz."""
    return f"{value / 1000:.7g} kHz"


def hours_text(value: float) -> str:
    """Return a duration of audio, in hours at most: 42 s, 12 min, 2,625 h."""
    return f"{number_text(value / 3600)} h" if value >= 7200 else seconds_text(value)


def seconds_text(value: float) -> str:
    """Return a duration: 0.25 s, 42 s, 12 min, 3.2 h, 4 d."""
    number, unit = in_units(value)
    return f"{number_text(number)} {unit}"


def nice_steps(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Return round numbers in [low, high], 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= most)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def nice_ratios(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Return round numbers for a logarithmic axis: 1, 2, 5, 10, ... or fewer."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values: list[float] = []
    for kinds in ((1, 2, 5), (1, 3), (1,)):
        values = [k * 10.0**p for p in powers for k in kinds]
        values = [v for v in values if low * 0.999 <= v <= high * 1.001]
        if len(values) <= most:
            break
    return values


def ticks(
    values: Sequence[float], low: float, high: float, text: Callable[[float], str] = number_text
) -> tuple[Tick, ...]:
    span = (high - low) or 1.0
    return tuple(Tick(100 * (value - low) / span, text(value)) for value in values)


def points(x: Values, y: Values) -> str:
    """Return the points of a line from x and y between 0 and 1, y from the bottom."""
    pairs = zip(1000 * x, 1000 * (1 - y), strict=True)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs if math.isfinite(a + b))


def histogram(
    values: Values,
    title: str,
    x_label: str,
    rows: str = "rows",
    text: Callable[[float], str] = number_text,
) -> Plot | None:
    """Return the histogram of the finite values; None if there are none."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    edges, x_ticks = _bins(values, text)
    counts = np.histogram(values, edges)[0].tolist()
    spans = [f"{text(a)} to {text(b)}" for a, b in pairwise(edges)]
    bins = [(k, n, span) for k, (n, span) in enumerate(zip(counts, spans, strict=True)) if n]
    top, width = max(counts), 100 / len(counts)
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    spread = f"{text(middle)}, 90 % of {rows} from {text(low)} to {text(high)}"
    extremes = f"; shortest {text(values.min())}, longest {text(values.max())}"
    counted = tuple((span, f"{n:,}") for _, n, span in bins)
    boxes = (
        Box(k * width, 100 - 100 * n / top, width, 100 * n / top, "one", f"{span}: {n:,} {rows}")
        for k, n, span in bins
    )
    return Plot(
        title=title,
        alt=f"Histogram of {len(values):,} {rows}: median {spread}.",
        x_label=x_label,
        y_label=rows,
        x_ticks=x_ticks,
        y_ticks=ticks([v for v in nice_steps(0, top, 5) if v == int(v)], 0, top, short_text),
        boxes=tuple(boxes),
        note=f"Median {spread}{extremes if text is seconds_text else ''}.",
        table=Table((x_label, rows), counted),
    )


def _bins(values: Values, text: Callable[[float], str]) -> tuple[list[float], tuple[Tick, ...]]:
    low, high = float(values.min()), float(values.max())
    bins = max(5, min(HISTOGRAM_BINS, 2 * math.ceil(math.sqrt(len(values)))))
    if low > 0 and high / low > LOG_RATIO:
        inner = np.geomspace(low, high, bins + 1).tolist()[1:-1]
        span = math.log(high / low)
        shown = nice_ratios(low, high)
        labels = tuple(Tick(100 * math.log(value / low) / span, text(value)) for value in shown)
        return [low, *inner, high], labels
    edges = np.linspace(low, high, bins + 1).tolist()
    if low == high:
        near = abs(low) * 0.05 or 0.5
        low, high = edges = [low - near, low + near]
    return edges, ticks(nice_steps(low, high, 5), low, high, text)


def bars(counts: Mapping[str, int], title: str, what: str, kind: str = "one") -> dict[str, Any]:
    """Return a table of categories by count with a column of bars, most frequent first. Categories
    beyond `MOST_BARS` share one bar. Widths are in percent of the longest bar."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown, others = ordered[:MOST_BARS], ordered[MOST_BARS:]
    if others:
        shown.append((f"{len(others):,} others", sum(count for _, count in others)))
    whole = sum(counts.values()) or 1
    longest = max((count for _, count in shown), default=1) or 1
    return {
        "title": title,
        "what": what,
        "kind": kind,
        "bars": [(name, n, 100 * n / longest, percent(n / whole)) for name, n in shown],
    }


def percent(share: float) -> str:
    """Return a share in percent: 12.3 %, or < 0.1 % for a small one."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
