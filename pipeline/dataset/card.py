"""README.md of a dataset, made of dataset.json, the commits and the index. Equal datasets give
equal cards."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.text import few, one_line
from earmill.pipeline.dataset.commit_record import CommitRecord
from earmill.pipeline.dataset.croissant import formats_of, has_bytes, parts_of, tabular
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.formats.format import format_of
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.stream_layout import SCALED, layout_of
from earmill.pipeline.formats.values import BLOCK_ROWS, INT8, CastError, total
from earmill.pipeline.spec.licenses import stored_licenses

NAMED_LABELS = 50  # class names of a column that the card shows; dataset.json has all
# Python code that turns stored rows in int8 into frames.
INT8_TO_FRAMES = (
    "frames = []",
    f"for block in (rows[k : k + {BLOCK_ROWS}] for k in range(0, len(rows), {BLOCK_ROWS})):",
    '    low, high = block[:2].view("u1").astype("<u4")',
    '    frames += [*(block[2:] * (low << 16 | high << 24).view("<f4"))]',
)
FILES = (
    "## Files\n\n"
    "`commits/*.json` name every file with its size and sha256; a file that no commit names is "
    "not part of the dataset. `rows/` holds the provenance of each row (source, hashes, "
    "decoder, rate, gain), `quarantine/` the rows that could not be processed and why. "
    "`earmill verify` checks all of it."
)


def readme(
    dataset: DatasetFile, records: Sequence[CommitRecord], index: pa.Table, index_file: OutFile
) -> str:
    models = ", ".join(sorted({str(stream["model"]) for stream in dataset.streams}))
    source = dataset.spec.get("source", {}).get("uri", "unknown")
    parts = [
        _front_matter(dataset, records),
        f"# {_text(dataset.name)}",
        f"Auditory-model features ({_text(models)}) of the audio in {_code(source)}, one row a "
        "clip, every row with its provenance.",
        _licenses(dataset),
        _numbers(records, index_file),
        _streams(dataset.streams),
        _cast_errors(records),
        _labels(dataset),
        _reading(dataset, records),
        _bad_rows(index),
        _origin(dataset, records),
        FILES,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(dataset: DatasetFile, records: Sequence[CommitRecord]) -> str:
    features = stored_licenses(dataset.licenses).features
    keys = {"pretty_name": dataset.name, **(features.front_matter() if features else {})}
    lines = [f"{key}: {json.dumps(value)}" for key, value in keys.items()]
    lines += ["tags:", "- audio", "- auditory-model"]
    files = parts_of(records, tabular(records))
    if files:
        # One by one: a pattern would match files that no commit names, too.
        lines += ["configs:", "- config_name: default", "  data_files:"]
        lines += [f"  - {path}" for path in files]
    return "\n".join(["---", *lines, "---"])


class _Code(str):
    """A code span, its content made harmless already."""


def _code(value: object) -> _Code:
    """Return a value as a Markdown code span that its own backticks cannot end."""
    text = one_line(str(value)).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return _Code(f"{fence}{pad}{text}{pad}{fence}")


def _text(value: object) -> str:
    """Return a value as one line of Markdown text: no table cell, heading, link, image or HTML."""
    if isinstance(value, _Code):
        return value
    return html.escape(re.sub(r"([\\`|\[\]])", r"\\\1", one_line(str(value))), quote=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def _licenses(dataset: DatasetFile) -> str:
    stated = stored_licenses(dataset.licenses)
    rows = [
        (what, one.title if one else "not stated", (one.url or "") if one else "")
        for what, one in (("features", stated.features), ("source audio", stated.source))
    ]
    return "## Licences\n\n" + _table(["of", "licence", "text"], rows)


def _numbers(records: Sequence[CommitRecord], index_file: OutFile) -> str:
    ok, bad = sum(r.rows_ok for r in records), sum(r.rows_bad for r in records)
    size = sum(record.nbytes for record in records)
    rows = [
        ("rows", ok),
        ("rows in quarantine", bad),
        ("audio", f"{sum(r.seconds for r in records) / 3600:.4g} h"),
        ("shards", len(records)),
        ("files", sum(len(record.files) for record in records)),
        ("size", f"{size / 1e6:.4g} MB"),
        ("formats", ", ".join(formats_of(records))),
        ("values", ", ".join(sorted({record.dtype for record in records}))),
        ("index", _code(index_file.path)),
    ]
    return "## In numbers\n\n" + _table(["what", "value"], rows)


def _labels(dataset: DatasetFile) -> str:
    if not dataset.extra_labels:
        return ""
    shown = []
    for name, labels in dataset.extra_labels.items():
        named = [f"{k} {_code(label)}" for k, label in enumerate(labels)]
        shown.append(f"- {_code(f'extra_{name}')}: {few(named, NAMED_LABELS, ', ')}")
    note = "Columns of class numbers; `extra_labels` in `dataset.json` has all names, in order."
    return "## Classes\n\n" + note + "\n\n" + "\n".join(shown)


def _streams(streams: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            _code(stream["name"]),
            stream["model"],
            stream["width"],
            max(0, len(stream.get("channel_offsets") or ()) - 1),
            layout_of(stream).rate_text.removeprefix("at "),
            stream["pool"],
            stream["unit"],
            ", ".join(stream.get("axes") or ()),
        )
        for stream in streams
    ]
    header = ["stream", "model", "columns", "channels", "frame rate", "pooling", "unit", "axes"]
    note = (
        "`channel_offsets` in `dataset.json` cuts the columns into one block a channel; `fc_hz` "
        "and `mfc_hz` there are the centre frequencies of channels and modulation filters."
    )
    noted: dict[str, list[str]] = {}
    for layout in map(layout_of, streams):
        if layout.card_note:
            noted.setdefault(layout.card_note, []).append(_code(layout.name))
    for text, names in noted.items():
        note += "\n\n" + text.format(streams=", ".join(names))
    return "## Streams\n\n" + _table(header, rows) + "\n\n" + note + _scales(streams)


def _scales(streams: Sequence[Mapping[str, Any]]) -> str:
    scaled = [stream for stream in streams if stream.get("scale_factor", 1.0) != 1.0]
    if not scaled:
        return ""
    factors = ", ".join(
        f"{_code(stream['name'])} x 2^{int(math.log2(stream['scale_factor']))}" for stream in scaled
    )
    note = f"\n\nStored with a scale: {factors}. `open_features` and xarray (`scale_factor`) apply "
    note += "it; "
    if all(stream.get("layout") == SCALED for stream in scaled):
        return note + "Parquet files and tars hold the values themselves, in float32."
    return note + "who reads the Parquet files in another way multiplies by it."


def _cast_errors(records: Sequence[CommitRecord]) -> str:
    parts = [record.info.get("cast_errors") or {} for record in records]
    whole = total({k: CastError(**v) for k, v in part.items()} for part in parts)
    if not whole:
        return ""
    rows = [
        (
            _code(name),
            f"{error.worst_normal:.2g}",
            f"{error.worst:.2g}",
            f"{error.below / error.nonzero:.2%}",
            f"{error.zeroed / error.nonzero:.2%}",
        )
        for name, error in sorted(whole.items())
    ]
    header = ["stream", "worst where float16 has all its bits", "worst", "below", "became zero"]
    note = (
        "Relative errors of the stored values. `below`: values, of those that are not zero, too "
        "small for all bits; `worst` counts them too, but for those that became zero."
    )
    return "## Rounding\n\n" + _table(header, rows) + "\n\n" + note


def _reading(dataset: DatasetFile, records: Sequence[CommitRecord]) -> str:
    lines = ["import earmill", 'ds = earmill.open_features("path/to/this/folder")']
    for name in formats_of(records):
        code = format_of(name).reading(parts_of(records, name))
        lines += ["# or", *code] if code else []
        if has_bytes(dataset, name):
            lines += _cells(dataset.streams, name, records[0].dtype)
    return "## Reading\n\n```python\n" + "\n".join(lines) + "\n```"


def _cells(streams: Sequence[Mapping[str, Any]], fmt: str, dtype: str) -> list[str]:
    lines = ["import numpy", "# A cell is the bytes of its numbers, row after row."]
    # Streams in int8 come last, because their recipe is longer.
    for stream in sorted(streams, key=lambda each: each.get("layout") == INT8):
        layout = format_of(fmt).layout_of(stream)
        kind = np.dtype(layout.stored_dtype(dtype)).newbyteorder("<").str
        cell = f'numpy.frombuffer(ds["train"][0][{json.dumps(layout.name)}], "{kind}")'
        rows = f"{cell}.reshape(-1, {layout.stored_width})"
        if stream.get("layout") == INT8:
            lines += [f"rows = {rows}", *INT8_TO_FRAMES]
        elif layout.field_text:
            lines.append(f"events = {rows}  # {layout.field_text}")
        else:
            scale = "" if layout.scale_factor == 1.0 else f" * {layout.scale_factor!r}"
            lines.append(f"frames = {rows}{scale}")
    return lines


def _bad_rows(index: pa.Table) -> str:
    columns = (index.column(name).to_pylist() for name in ("stage", "error_class"))
    counts = Counter(reason for reason in zip(*columns, strict=True) if reason[0] is not None)
    if not counts:
        return ""
    rows = [(stage, name, count) for (stage, name), count in sorted(counts.items())]
    return "## Quarantine\n\n" + _table(["stage", "reason", "rows"], rows)


def _origin(dataset: DatasetFile, records: Sequence[CommitRecord]) -> str:
    keys = ("git", "versions", "host", "device")
    git, versions, host, device = (dataset.provenance.get(key) or {} for key in keys)
    commit = (git.get("commit") or "unknown") + (", modified" if git.get("dirty") else "")
    of_shards = [record.info.get("device") for record in records]
    names = {each.get("name") for each in of_shards if isinstance(each, Mapping)}
    devices = ", ".join(sorted(name for name in names if isinstance(name, str)))
    rows = [
        ("made with", f"earmill {versions.get('earmill', 'unknown version')}"),
        ("git commit", commit),
        ("begun", dataset.created),
        ("spec sha256", _code(dataset.spec_sha256)),
        ("plan", _code(dataset.plan_id)),
        ("device", devices or device.get("name", "unknown")),
        ("system", host.get("system", "unknown")),
    ]
    spec = json.dumps(dataset.spec, indent=2, sort_keys=True)
    return (
        f"## Origin\n\n{_table(['what', 'value'], rows)}\n\n"
        f"The job, as far as it decides the values:\n\n```json\n{spec}\n```"
    )
