"""`earmill inspect`: what a dataset holds, from its commits; works while a job is running."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from jobs.commands.options import AsJson, DatasetUri, StorageOptions, parse_storage_options

if TYPE_CHECKING:
    from pipeline.commit import CommitRecord
    from pipeline.layout import Layout


def inspect(
    uri: DatasetUri, as_json: AsJson = False, storage_options: StorageOptions = None
) -> None:
    """Show what a dataset holds: model, streams, rows, hours, bytes, reasons for quarantine."""
    from pipeline.commit import commits
    from pipeline.dataset_file import read_dataset
    from pipeline.errors import SourceError
    from pipeline.layout import Layout
    from pipeline.verify import read_plan

    layout = Layout.open(uri, parse_storage_options(storage_options))
    dataset = read_dataset(layout)
    if dataset is None:
        raise SourceError(f"{layout.url()}: expected a dataset, found no dataset.json")
    records = list(commits(layout).values())
    result: dict[str, Any] = {
        "name": dataset.name,
        "uri": layout.url(),
        "created": dataset.created,
        "spec_sha256": dataset.spec_sha256,
        "plan_id": dataset.plan_id,
        "models": [entry["model"] for entry in dataset.spec["extract"]],
        "streams": [
            {
                key: stream[key]
                for key in ("name", "model", "unit", "width", "frame_rate_hz", "pool", "layout")
                if key in stream
            }
            for stream in dataset.streams
        ],
        "formats": list(dataset.spec["output"]["formats"]),
        "dtype": dataset.spec["output"]["dtype"],
        "shards": len(records),
        "shards_planned": len(read_plan(layout, dataset.plan_id)),
        "rows_ok": sum(record.rows_ok for record in records),
        "rows_bad": sum(record.rows_bad for record in records),
        "bad_by_class": bad_by_class(layout, records),
        "audio_s": round(sum(record.seconds for record in records), 3),
        "frames": dict(sum((Counter(record.frames) for record in records), Counter())),
        "files": sum(len(record.files) for record in records),
        "bytes": sum(file.bytes for record in records for file in record.files),
        "finalised": bool(layout.list("index")),
    }
    print(json.dumps(result)) if as_json else _print(result)


def bad_by_class(layout: Layout, records: list[CommitRecord]) -> dict[str, int]:
    """Quarantined rows by reason, most frequent first."""
    from pipeline.verify import read_table

    paths = [path for record in records if (path := record.path("quarantine"))]
    reasons = [
        reason
        for path in paths
        for reason in read_table(layout, path, ["error_class"])["error_class"].to_pylist()
    ]
    return dict(Counter(reasons).most_common())


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jobs.progress import audio, bytes_text
    from pipeline.sinks.stored import is_events

    state = "finalised" if result["finalised"] else "not finalised"
    reasons = ", ".join(f"{name} {count}" for name, count in result["bad_by_class"].items())
    table = Table(title=f"{result['name']}: {result['uri']}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("models", ", ".join(result["models"]))
    for s in result["streams"]:
        frames = result["frames"].get(s["name"], 0)
        what = "events of {} neurons" if is_events(s) else "frames of {} columns"
        table.add_row(
            f"stream {s['name']}",
            f"{frames:,} {what.format(s['width'])} at {s['frame_rate_hz']:g} Hz "
            f"({s['pool']}), {s['unit']}",
        )
    table.add_row("stored", f"{', '.join(result['formats'])} in {result['dtype']}")
    table.add_row("shards", f"{result['shards']:,} of {result['shards_planned']:,}, {state}")
    table.add_row("rows", f"{result['rows_ok']:,} ok, {result['rows_bad']:,} quarantined")
    if reasons:
        table.add_row("quarantine", reasons)
    table.add_row("audio", audio(result["audio_s"]))
    table.add_row("size", f"{bytes_text(result['bytes'])} in {result['files']:,} files")
    table.add_row("spec", result["spec_sha256"])
    table.add_row("created", result["created"])
    Console(highlight=False).print(table)
