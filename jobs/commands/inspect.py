"""`earmill inspect`: the contents of a dataset by its commits; works while a job is running."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import print_facts, say, say_json
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    from earmill.pipeline.storage.layout import Layout

QUARANTINE_COLUMNS = ("shard", "row_id", "uri", "stage", "error_class", "message", "attempts")
STREAM_KEYS = ("name", "model", "unit", "width", "frame_rate_hz", "pool", "layout")


def inspect(
    uri: options.DatasetUri,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="List the quarantined rows with their reasons.")
    ] = False,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Show what a dataset holds: model, streams, rows, hours, bytes, reasons for quarantine."""
    with options.open_output(uri, storage_options) as layout:
        if quarantine:
            rows = _quarantined(layout)
            say_json(rows) if as_json else _print_quarantined(rows)
            return
        result = _contents(layout)
    say_json(result) if as_json else _print(result)


def _contents(layout: Layout) -> dict[str, Any]:
    """Return everything that `inspect` shows, as plain values."""
    from earmill.pipeline.dataset.commit_record import bad_rows, commits
    from earmill.pipeline.dataset.description import require_dataset
    from earmill.pipeline.dataset.snapshot import current_index
    from earmill.pipeline.planning.plan import read_row_ids

    dataset = require_dataset(layout)
    records = list(commits(layout).values())
    planned = len(read_row_ids(layout, dataset.plan_id))
    reasons, frames = Counter[str](), Counter[str]()
    for record in records:
        reasons.update(bad_rows(layout, record)["error_class"].to_pylist())
        frames += Counter(record.frames)
    return {
        "name": dataset.name,
        "uri": layout.url(),
        "created": dataset.created,
        "spec_sha256": dataset.spec_sha256,
        "plan_id": dataset.plan_id,
        "models": [entry["model"] for entry in dataset.spec["extract"]],
        "streams": [
            {key: stream[key] for key in STREAM_KEYS if key in stream} for stream in dataset.streams
        ],
        "formats": list(dataset.spec["output"]["formats"]),
        "dtype": dataset.spec["output"]["dtype"],
        "licenses": dataset.licenses,
        "shards": len(records),
        "shards_planned": planned,
        "rows_ok": sum(record.rows_ok for record in records),
        "rows_bad": sum(record.rows_bad for record in records),
        "bad_by_class": dict(reasons.most_common()),
        "audio_s": round(sum(record.seconds for record in records), 3),
        "frames": dict(frames),
        "files": sum(len(record.files) for record in records),
        "bytes": sum(record.nbytes for record in records),
        "finalised": current_index(layout) is not None,
    }


def _quarantined(layout: Layout) -> list[dict[str, Any]]:
    """Return every quarantined row that a commit names, in the order of the shards."""
    from earmill.pipeline.dataset.commit_record import bad_rows, commits
    from earmill.pipeline.dataset.description import require_dataset

    require_dataset(layout)
    rows = []
    for record in commits(layout).values():
        rows += [{"shard": record.shard, **row} for row in bad_rows(layout, record).to_pylist()]
    return [{name: row.get(name) for name in QUARANTINE_COLUMNS} for row in rows]


def _print_quarantined(rows: list[dict[str, Any]]) -> None:
    """Print one line a row. Lines are not cut, so that they can be searched and copied."""
    for row in rows:
        say(f"{row['row_id']}: {row['stage']}: {row['error_class']}: {one_line(row['message'])}")
    if not rows:
        say("no row is in quarantine")


def _print(result: dict[str, Any]) -> None:
    from earmill.pipeline.common.text import audio, bytes_text
    from earmill.pipeline.formats.stream_layout import layout_of

    facts = [("models", ", ".join(result["models"]))]
    for s in result["streams"]:
        frames = result["frames"].get(s["name"], 0)
        layout = layout_of(s)
        shape = f"{layout.stored_rows} of {s['width']} {layout.columns_are} {layout.rate_text}"
        facts.append((f"stream {s['name']}", f"{frames:,} {shape} ({s['pool']}), {s['unit']}"))
    facts.append(("stored", f"{', '.join(result['formats'])} in {result['dtype']}"))
    for of, license in result["licenses"].items():
        facts.append((f"licence of {of}", license.get("name") or license["id"]))
    state = "finalised" if result["finalised"] else "not finalised"
    reasons = ", ".join(f"{name} {count}" for name, count in result["bad_by_class"].items())
    facts += [
        ("shards", f"{result['shards']:,} of {result['shards_planned']:,}, {state}"),
        ("rows", f"{result['rows_ok']:,} ok, {result['rows_bad']:,} quarantined"),
        *([("quarantine", reasons)] if reasons else []),
        ("audio", audio(result["audio_s"])),
        ("size", f"{bytes_text(result['bytes'])} in {result['files']:,} files"),
        ("spec", result["spec_sha256"]),
        ("created", result["created"]),
    ]
    print_facts(f"{result['name']}: {result['uri']}", facts)
