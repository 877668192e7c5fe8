"""The HTML of a page: templates filled with plain values, in one file that loads nothing else.

Every text is escaped twice, and no template can skip that: invisible characters (`visible`), then
HTML's own characters. The Content-Security-Policy allows style and scripts of this package by their
hashes; pictures and sound are data URIs. So no text of a corpus can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from earmill.jobs.report.plots import Values, seconds_text
from earmill.pipeline.common.text import visible

MOST_COLUMNS, MOST_ROWS = 600, 128  # Limits of a picture: values are averaged to these.
# Number of colours; more cannot be told apart in a figure of this size, and cost bytes.
COLOURS = 96
GRADIENT_STOPS = 9  # Colours of the gradient that explains a picture.


@lru_cache(maxsize=1)
def palette() -> bytes:
    """Return the colours from dark to bright: matplotlib's magma."""
    import matplotlib

    shades = matplotlib.colormaps["magma"](np.linspace(0, 1, COLOURS))[:, :3]
    return (shades * 255).round().astype(np.uint8).tobytes()


def picture(values: Values, low: float, high: float) -> str:
    """Return a PNG of (row, column), row 0 at the bottom, as data URI. `low` has the first colour
    and `high` the last one; NaN gets the first colour."""
    from PIL import Image

    span = (high - low) or 1.0
    level = np.nan_to_num((values - low) / span, nan=0.0, posinf=1.0, neginf=0.0)
    index = (np.clip(level, 0, 1) * (COLOURS - 1)).round().astype(np.uint8)
    image = Image.fromarray(index[::-1])
    image.putpalette(palette())
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return data_uri("image/png", out.getvalue())


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def pooled(values: Values, most: int, axis: int) -> Values:
    """Average neighbours along an axis to at most `most` entries."""
    length = values.shape[axis]
    if length <= most:
        return values
    edges = np.linspace(0, length, most + 1).round().astype(int)
    sums = np.add.reduceat(values, edges[:-1], axis=axis)
    widths = np.diff(edges)
    means: Values = sums / (widths if axis == values.ndim - 1 else widths[:, None])
    return means


LONGEST_TEXT = 160  # Longer texts are cut, because a name may have 10 kB.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; media-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)

# Script of each page, and what it may ask: a live page asks its own server for the next page.
SCRIPTS = {"report.html": ("page.js", "'none'"), "live.html": ("live.js", "'self'")}


def page(template: str, values: Mapping[str, Any]) -> str:
    """Return the page of a template: `report.html` of a dataset, `live.html` of a running job."""
    script_name, connect = SCRIPTS[template]
    style, script = _part("page.css"), _part(script_name)
    shades = np.frombuffer(palette(), np.uint8).reshape(-1, 3)
    return ENVIRONMENT.get_template(template).render(
        values,
        policy=POLICY.format(script=_hash(script), style=_hash(style), connect=connect),
        style=Markup(style),
        script=Markup(script),
        gradient=[
            (100 * at, f"#{bytes(shades[round(at * (COLOURS - 1))]).hex()}")
            for at in np.linspace(0, 1, GRADIENT_STOPS).tolist()
        ],
        version=version("earmill"),
    )


def cut(text: Any, most: int = LONGEST_TEXT) -> str:
    """Cut the middle of a long text, and append its length."""
    text = str(text)
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} ... {text[-most // 4 :]} ({len(text):,} characters)"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _shown(value: Any) -> Any:
    """Make texts visible; numbers and markup of this package stay as they are."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, keep="\n")
    return value


@lru_cache(maxsize=16)
def _part(name: str) -> str:
    return (files("earmill.jobs.report") / "templates" / name).read_text("utf-8")


ENVIRONMENT = Environment(
    loader=FunctionLoader(_part),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"cut": cut, "seconds": seconds_text}
