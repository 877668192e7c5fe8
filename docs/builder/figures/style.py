"""Style of the drawings, and their SVG inside a page, in the colour of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Placeholder of the page's text colour in the SVG.
INK = "#010203"
#: Colours of lines in this order, readable on white and on dark grey.
COLOURS = ("#2a7f9e", "#c8642b", "#5b8c3a", "#8f5fa8", "#b08a1e", "#4c6fbf")
#: Colours of levels and frequencies, low to high.
SHADES = "viridis"
_SETTINGS: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "font.family": "sans-serif",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}
Draw = Callable[..., None]


def figure(
    name: str,
    draw: Draw,
    *,
    rows: int = 1,
    columns: int = 1,
    height: float = 2.6,
    width: float = 7.6,
) -> str:
    """Return the SVG of `draw(axes, ...)`, with one argument a panel.

    Args:
        name: Keeps the ids of several drawings in a page apart.
        height: Height of a row of panels, in inches.
        width: Width of the drawing, in inches. The page scales it to the width of its text.
    """
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        made, panels = plt.subplots(rows, columns, figsize=(width, height * rows), squeeze=False)
        try:
            draw(*panels.flat)
            return _svg(made, name)
        finally:
            plt.close(made)


def _svg(made: Figure, name: str) -> str:
    out = io.StringIO()
    made.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return inline(out.getvalue(), name)


def inline(svg: str, name: str) -> str:
    """Return an SVG for a page: with unique ids, and without style rules for the whole page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = svg.replace(INK, "currentColor")
    return re.sub(r"\s*\n\s*", " ", svg).strip()


def frequency_axis(axes: Axes, *, low: float = 63, high: float = 12000) -> None:
    """Set a logarithmic axis of audio frequency with round labels."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [hz for hz in (63, 125, 250, 500, 1000, 2000, 4000, 8000) if low <= hz <= high]
    axes.set_xticks(ticks, [f"{hz // 1000}k" if hz >= 1000 else str(hz) for hz in ticks])
    axes.minorticks_off()
    axes.set_xlabel("frequency (Hz)")


def rate_axis(axes: Axes) -> None:
    """Label a logarithmic axis of modulation frequency with plain numbers."""
    low, high = axes.get_xlim()
    ticks = [hz for hz in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= hz <= high]
    axes.set_xticks(ticks, [str(hz) for hz in ticks])
    axes.minorticks_off()
