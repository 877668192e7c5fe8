"""Small pictures of arrays: PNG with a palette, as data URI, coarse enough for a page.

Values are pooled to at most so many columns and rows by their mean (events by their sum), so that a
minute of frames costs no more than a second.
"""

from __future__ import annotations

import base64
import io
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MOST_COLUMNS, MOST_ROWS = 600, 128
# Steps of colour: more cannot be told apart in a figure of this size, and cost bytes.
COLOURS = 96


@lru_cache(maxsize=1)
def palette() -> bytes:
    """The colours, dark to bright: matplotlib's magma."""
    import matplotlib

    shades = matplotlib.colormaps["magma"](np.linspace(0, 1, COLOURS))[:, :3]
    return (shades * 255).round().astype(np.uint8).tobytes()


def gradient_stops(steps: int = 9) -> list[tuple[float, str]]:
    """The palette as stops of a gradient: percent and colour."""
    shades = np.frombuffer(palette(), np.uint8).reshape(-1, 3)
    places = np.linspace(0, COLOURS - 1, steps).round().astype(int)
    return [
        (100 * k / (steps - 1), "#" + bytes(shades[place]).hex()) for k, place in enumerate(places)
    ]


def picture(values: Values, low: float, high: float) -> str:
    """A PNG of (row, column), row 0 at the bottom, as data URI.

    Args:
        low, high: Values of the first and last colour; what is no number gets the first.
    """
    from PIL import Image

    span = (high - low) or 1.0
    level = np.nan_to_num((values - low) / span, nan=0.0, posinf=1.0, neginf=0.0)
    index = (np.clip(level, 0, 1) * (COLOURS - 1)).round().astype(np.uint8)
    image = Image.fromarray(index[::-1])
    image.putpalette(palette())
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def pooled(values: Values, most: int, axis: int) -> Values:
    """At most so many entries along an axis, each the mean of its neighbours."""
    length = values.shape[axis]
    if length <= most:
        return values
    edges = np.linspace(0, length, most + 1).round().astype(int)
    sums = np.add.reduceat(values, edges[:-1], axis=axis)
    shape = [1, 1]
    shape[axis] = most
    means: Values = sums / np.diff(edges).reshape(shape[: values.ndim])
    return means


def coarse(values: Values) -> Values:
    """(row, column) small enough for a page."""
    return pooled(pooled(values, MOST_ROWS, 0), MOST_COLUMNS, 1)
