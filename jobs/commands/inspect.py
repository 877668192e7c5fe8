"""`earmill inspect`, also of a running job, and `earmill verify`: contents of a dataset, checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import console, print_facts, say, say_json, teller
from earmill.pipeline.common.text import audio, bytes_text, one_line

if TYPE_CHECKING:
    from earmill.pipeline.dataset.commit_record import CommitRecord
    from earmill.pipeline.dataset.description import DatasetFile
    from earmill.pipeline.dataset.verify import Report
    from earmill.pipeline.storage.layout import Layout

QUARANTINE_COLUMNS = ("shard", "row_id", "uri", "stage", "error_class", "message", "attempts")
MOST_WHOLE = Decimal(10**20 - 1)  # Larger than the integers of all types.
STREAM_KEYS = ("name", "model", "unit", "width", "frame_rate_hz", "pool", "layout")


def inspect(
    uri: options.DatasetUri,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="List the quarantined rows with their reasons.")
    ] = False,
    where_min: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE",
            help="List the rows whose column is at least this, as seconds=2 or "
            "loudness_summary_n5=4. Several limits hold together.",
        ),
    ] = None,
    where_max: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="List the rows whose column is at most this."),
    ] = None,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Show what a dataset holds: model, streams, rows, hours, bytes, reasons for quarantine."""
    from earmill.pipeline.dataset.commit_record import bad_rows, commits
    from earmill.pipeline.dataset.description import require_dataset
    from earmill.pipeline.storage.layout import open_output

    if where_min or where_max:
        if quarantine:
            raise typer.BadParameter("expected --quarantine or limits of columns, got both")
        limits = [(*_limit("--where-min", text), False) for text in where_min or ()]
        limits += [(*_limit("--where-max", text), True) for text in where_max or ()]
        _print_chosen(uri, limits, storage_options, as_json=as_json)
        return
    with open_output(uri, storage_options) as layout:
        dataset, records = require_dataset(layout), list(commits(layout).values())
        if not quarantine:
            result = _contents(layout, dataset, records)
            say_json(result) if as_json else _print(result)
            return
        bad = [(record.shard, bad_rows(layout, record).to_pylist()) for record in records]
    found = [{"shard": shard, **row} for shard, table in bad for row in table]
    rows: list[dict[str, Any]] = [{k: row.get(k) for k in QUARANTINE_COLUMNS} for row in found]
    if as_json:
        say_json(rows)
        return
    for row in rows:  # Lines are not cut, so that they can be searched and copied.
        say(f"{row['row_id']}: {row['stage']}: {row['error_class']}: {one_line(row['message'])}")
    if not rows:
        say("no row is in quarantine")


def _limit(option: str, text: str) -> tuple[str, Decimal]:
    column, _, value = text.rpartition("=")
    with suppress(InvalidOperation):
        if not (limit := Decimal(value)).is_nan():
            return column.strip(), limit
    raise typer.BadParameter(f"{option}: expected COLUMN=NUMBER, as seconds=2, got {text!r}")


def _print_chosen(
    uri: str,
    limits: Sequence[tuple[str, Decimal, bool]],
    storage_options: dict[str, Any] | None,
    *,
    as_json: bool,
) -> None:
    """List the rows whose columns keep all limits (column, value, whether it is the most)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from earmill.pipeline.reader.open import open_features

    rows = open_features(uri, storage_options=storage_options)
    total, columns = len(rows), dict.fromkeys(column for column, _, _ in limits)
    numeric = [
        field.name
        for field in rows.table.schema
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    ]
    strange = [column for column in columns if column not in numeric]
    if strange:
        raise typer.BadParameter(f"expected a column out of {numeric}, got {strange[0]!r}")
    for column, value, is_most in limits:
        limit = pa.scalar(float(value), pa.float64())
        if pa.types.is_integer(rows.table.schema.field(column).type):
            # Integers are compared as decimals, because double would round large ones.
            whole = value.to_integral_value(ROUND_FLOOR if is_most else ROUND_CEILING)
            limit = pa.scalar(min(max(whole, -MOST_WHOLE), MOST_WHOLE), pa.decimal128(20, 0))
        one, other = pc.field(column).cast(limit.type), pc.scalar(limit)
        rows = rows.filter(one <= other if is_most else one >= other)
    found = rows.table.select(["row_id", *columns]).to_pylist()
    rows.close()
    if as_json:
        say_json(found)
        return
    for row in found:
        values = (
            f"{k} {row[k]}" if isinstance(row[k], int) else f"{k} {row[k]:g}" for k in columns
        )
        say("  ".join([row["row_id"], *values]))
    say(f"{len(found):,} of {total:,} rows")


def _contents(
    layout: Layout, dataset: DatasetFile, records: Sequence[CommitRecord]
) -> dict[str, Any]:
    from earmill.pipeline.dataset.commit_record import bad_rows
    from earmill.pipeline.dataset.snapshot import current_index, read_current, read_snapshot
    from earmill.pipeline.planning.plan import read_row_ids

    planned = len(read_row_ids(layout, dataset.plan_id))
    current = read_current(layout)
    snapshot = None if current is None else read_snapshot(layout, current)
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
        "additions": [] if snapshot is None else sorted(snapshot.additions),
        "outdated_additions": [] if snapshot is None else list(snapshot.outdated),
        # A closed dataset of layout version 1 has no snapshot.
        "finalised": snapshot is not None or current_index(layout) is not None,
    }


def _print(result: dict[str, Any]) -> None:
    from earmill.pipeline.formats.stream_layout import layout_of

    facts = [("models", ", ".join(result["models"]))]
    for s in result["streams"]:
        frames = result["frames"].get(s["name"], 0)
        layout = layout_of(s)
        shape = f"{layout.stored_rows} of {s['width']} {layout.columns_are} {layout.rate_text}"
        facts.append((f"stream {s['name']}", f"{frames:,} {shape} ({s['pool']}), {s['unit']}"))
    if result["additions"]:
        facts.append(("features added", ", ".join(result["additions"])))
    if result["outdated_additions"]:
        facts.append(("added to earlier rows", ", ".join(result["outdated_additions"])))
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


def verify(
    uri: options.DatasetUri,
    hashes: Annotated[
        bool, typer.Option(help="Read every byte and compare its sha256; else listings only.")
    ] = True,
    deep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also compute N random rows again from their source and compare: bit by bit if "
            "machine and packages are the same as in the job, else within a tolerance. Run it in "
            "the folder where the job ran, because relative paths start there.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed that draws the rows of --deep; the report names it.")
    ] = None,
    job: options.JobOfDataset = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Check that a dataset is whole. Exit code 1 if it is not."""
    from earmill.pipeline.dataset.verify import verify as check
    from earmill.pipeline.storage.layout import open_output

    deep_report = None
    with open_output(uri, storage_options) as layout:
        report = check(layout, hashes=hashes)
        if deep is not None:
            from earmill.pipeline.operations.deep_verify import verify_deep
            from earmill.pipeline.operations.retry import stored_job

            spec = stored_job(layout, uri, storage_options or {}, job=job)
            tell = teller(quiet=quiet or as_json)
            deep_report = verify_deep(layout, spec, deep, seed=seed, on_begin=tell)
    ok = report.ok and (deep_report is None or deep_report.ok)
    if as_json:
        more = {} if deep_report is None else {"deep": asdict(deep_report)}
        say_json({**asdict(report), "ok": ok, **more})
    else:
        _print_report(uri, report)
        if deep_report is not None:
            for problem in deep_report.problems:
                say(f"problem: {problem}")
            close = f", {deep_report.close:,} within {deep_report.worst:.2g}"
            say(
                f"{deep_report.rows:,} rows computed again (--seed {deep_report.seed}): "
                f"{deep_report.equal:,} equal bit for bit{close if deep_report.close else ''}, "
                f"{len(deep_report.problems):,} problems"
            )
    raise typer.Exit(0 if ok else 1)


def _print_report(uri: str, report: Report) -> None:
    out = console(soft_wrap=True)
    for problem in report.problems:
        out.print(f"problem: {problem}", style="red")
    depth = "sha256 of every file" if report.hashed else "sizes, not contents"
    out.print(
        f"{uri}: {report.shards:,} of {report.shards_planned:,} shards, {report.rows_ok:,} rows "
        f"ok, {report.rows_bad:,} quarantined, {audio(report.seconds)} audio, "
        f"{report.files:,} files, {bytes_text(report.bytes)} ({depth})"
    )
    # Files of one store are one line.
    parts = Counter("/".join(name.split("/")[:2]) for name in report.orphans)
    for part, files in parts.items():
        out.print(f"orphan: {part} ({files:,} files)" if files > 1 else f"orphan: {part}")
    if report.orphans:
        out.print(
            f"{len(report.orphans):,} files of crashed attempts, harmless; `earmill gc` removes "
            "those of committed shards"
        )
    if report.replaced:
        out.print(f"{len(report.replaced):,} files of replaced commits, kept for older snapshots")
    if report.damaged:
        out.print(
            f"{len(report.damaged):,} shards are damaged: `earmill extract` with --resume --repair "
            "computes them again"
        )
    if report.damaged_additions:
        names = ", ".join(report.damaged_additions)
        out.print(
            f"features added as {names} are damaged: `earmill add-features` with --repair computes "
            "them again"
        )
    if report.ok:
        out.print("verified: whole", style="green")
    else:
        out.print(f"{len(report.problems):,} problems", style="bold red")
