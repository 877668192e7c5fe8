"""How rows, batches and sets show themselves: one line of text, and a table in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.text import cut, one_line

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


def short(value: object) -> str:
    """A value as one line of bounded length, without control characters."""
    return cut(one_line(str(value)))


def values_text(values: Any) -> str:
    """Shape and type of the features of a stream: of an array, a tensor, or events."""
    if hasattr(values, "n_channels"):
        return f"{len(values.frame)} events, {values.n_frames} steps, {values.n_channels} neurons"
    shape = ", ".join(str(n) for n in values.shape)
    return f"({shape}) {str(values.dtype).removeprefix('torch.')}"


def line(kind: str, name: str, parts: Iterable[str]) -> str:
    """`<kind name: part, part>`."""
    return f"<{kind} {name}: {'; '.join(part for part in parts if part)}>"


def streams_text(streams: Mapping[str, str]) -> str:
    """Join the names of streams and their descriptions."""
    return ", ".join(f"{short(name)} {text}" for name, text in streams.items())


def names_text(what: str, names: Iterable[str]) -> str:
    """`what: name, name`; empty where there are none."""
    found = ", ".join(map(short, names))
    return f"{what}: {found}" if found else ""


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """HTML of a titled table; every text is escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(short(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def set_table(title: str, streams: Mapping[str, StreamInfo]) -> str:
    """HTML of the streams of a set."""
    header = ("stream", "model", "columns", "frames a second", "unit")
    rows = (
        (name, info.model, info.width, f"{info.frame_rate_hz:g}", info.unit)
        for name, info in streams.items()
    )
    return table(title, header, rows)
