"""The dataset's own description: README.md for people, croissant.json for machines.

Written at finalise from dataset.json, the commits and the index, so it states what is there and not
what was wanted; equal datasets give equal cards. Croissant 1.1 with array shapes and PROV-O lineage
is in `pipeline.croissant`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.commit import CommitRecord
from pipeline.croissant import MAX_NAMED_FILES, croissant
from pipeline.dataset_file import DatasetFile
from pipeline.layout import CROISSANT_FILE, README_FILE, Layout
from pipeline.rows import OutFile
from pipeline.sinks.stored import EVENT_COLUMNS, EVENT_DTYPE, is_events


def write_cards(
    layout: Layout,
    dataset: DatasetFile,
    records: Sequence[CommitRecord],
    index: pa.Table,
    index_file: OutFile,
) -> None:
    """Write README.md and croissant.json beside the data."""
    layout.write_bytes(README_FILE, readme(dataset, records, index, index_file).encode())
    described = croissant(dataset, records, index_file, layout.url())
    layout.write_bytes(CROISSANT_FILE, (json.dumps(described, indent=1) + "\n").encode())


def readme(
    dataset: DatasetFile, records: Sequence[CommitRecord], index: pa.Table, index_file: OutFile
) -> str:
    """The card as Markdown, with the front matter Hugging Face reads."""
    parts = [
        _front_matter(dataset, records),
        f"# {_text(dataset.name)}",
        _summary(dataset),
        _numbers(records, index_file),
        _streams(dataset.streams),
        _reading(records),
        _bad_rows(index),
        _origin(dataset),
        _layout_note(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(dataset: DatasetFile, records: Sequence[CommitRecord]) -> str:
    lines = [f"pretty_name: {json.dumps(dataset.name)}", "tags:", "- audio", "- auditory-model"]
    files = [path for record in records if (path := record.path("parquet"))]
    if files:
        named = files if len(files) <= MAX_NAMED_FILES else ["data/*.parquet"]
        lines += ["configs:", "- config_name: default", "  data_files:"]
        lines += [f"  - {path}" for path in named]
    return "\n".join(["---", *lines, "---"])


def _text(value: object) -> str:
    """A value as one line that cannot break a Markdown table or heading."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def _summary(dataset: DatasetFile) -> str:
    models = ", ".join(sorted({str(stream["model"]) for stream in dataset.streams}))
    source = dataset.spec.get("source", {}).get("uri", "unknown")
    return (
        f"Auditory-model features ({_text(models)}) of the audio in `{_text(source)}`, one row a "
        "clip, every row with its provenance. The licence of the source audio applies."
    )


def _numbers(records: Sequence[CommitRecord], index_file: OutFile) -> str:
    ok, bad = sum(r.rows_ok for r in records), sum(r.rows_bad for r in records)
    size = sum(file.bytes for record in records for file in record.files)
    rows = [
        ("rows", ok),
        ("rows in quarantine", bad),
        ("audio", f"{sum(r.seconds for r in records) / 3600:.4g} h"),
        ("shards", len(records)),
        ("files", sum(len(record.files) for record in records)),
        ("size", f"{size / 1e6:.4g} MB"),
        ("formats", ", ".join(sorted({fmt for record in records for fmt in record.formats}))),
        ("values", ", ".join(sorted({record.dtype for record in records}))),
        ("index", f"`{index_file.path}`"),
    ]
    return "## In numbers\n\n" + _table(["what", "value"], rows)


def _streams(streams: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for stream in streams:
        channels = max(0, len(stream.get("channel_offsets") or ()) - 1)
        rows.append(
            (
                f"`{stream['name']}`",
                stream["model"],
                stream["width"],
                channels,
                f"{stream['frame_rate_hz']:g} Hz",
                stream["pool"],
                stream["unit"],
                ", ".join(stream.get("axes") or ()),
            )
        )
    header = ["stream", "model", "columns", "channels", "frame rate", "pooling", "unit", "axes"]
    note = (
        "`channel_offsets` in `dataset.json` cuts the columns into one block a channel; `fc_hz` "
        "and `mfc_hz` there are the centre frequencies of channels and modulation filters."
    )
    sparse = [f"`{stream['name']}`" for stream in streams if is_events(stream)]
    if sparse:
        note += (
            f"\n\nSparse, {EVENT_DTYPE} rows ({', '.join(EVENT_COLUMNS)}) instead of frames: "
            f"{', '.join(sparse)}. Their columns are neurons, a frame is a step since the start of "
            "the clip; `<stream>_n_steps` counts the steps of a clip."
        )
    return "## Streams\n\n" + _table(header, rows) + "\n\n" + note


def _reading(records: Sequence[CommitRecord]) -> str:
    formats = {fmt for record in records for fmt in record.formats}
    lines = ["from pipeline import open_features", 'ds = open_features("path/to/this/folder")']
    if "parquet" in formats:
        lines += ["# or", "from datasets import load_dataset"]
        lines += ['ds = load_dataset("parquet", data_files="data/*.parquet")']
    if "zarr" in formats:
        example = next(path for record in records if (path := record.path("zarr")))
        lines += ["# or", "import xarray"]
        lines += [f'ds = xarray.open_zarr("{example}", group="<stream>")']
    return "## Reading\n\n```python\n" + "\n".join(lines) + "\n```"


def _bad_rows(index: pa.Table) -> str:
    reasons = zip(
        index.column("stage").to_pylist(), index.column("error_class").to_pylist(), strict=True
    )
    counts = Counter(reason for reason in reasons if reason[0] is not None)
    if not counts:
        return ""
    rows = [(stage, name, count) for (stage, name), count in sorted(counts.items())]
    return "## Quarantine\n\n" + _table(["stage", "reason", "rows"], rows)


def _origin(dataset: DatasetFile) -> str:
    provenance = dataset.provenance
    git = provenance.get("git") or {}
    versions = provenance.get("versions") or {}
    host, device = provenance.get("host") or {}, provenance.get("device") or {}
    rows = [
        ("made with", f"earmill {versions.get('earmill', 'unknown version')}"),
        (
            "git commit",
            (git.get("commit") or "unknown") + (", modified" if git.get("dirty") else ""),
        ),
        ("begun", dataset.created),
        ("spec sha256", f"`{dataset.spec_sha256}`"),
        ("plan", f"`{dataset.plan_id}`"),
        ("device", device.get("name", "unknown")),
        ("system", host.get("system", "unknown")),
    ]
    spec = json.dumps(dataset.spec, indent=2, sort_keys=True)
    return (
        "## Origin\n\n"
        + _table(["what", "value"], rows)
        + "\n\nThe job, as far as it decides the values:\n\n```json\n"
        + spec
        + "\n```"
    )


def _layout_note() -> str:
    return (
        "## Files\n\n"
        "`commits/*.json` name every file with its size and sha256; a file that no commit names is "
        "not part of the dataset. `rows/` holds the provenance of each row (source, hashes, "
        "decoder, rate, gain), `quarantine/` the rows that could not be processed and why. "
        "`earmill verify` checks all of it."
    )
