"""Commands about snapshots: `log`, `diff`, `compact` and `gc`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json, teller
from earmill.pipeline.common.text import bytes_text

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# Most rows of each kind that `diff` prints; most files and stores that `gc` prints.
SHOWN_ROWS, SHOWN_PARTS = 20, 20


def log(
    uri: options.DatasetUri,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """List the snapshots of a dataset, newest first: date, reason, rows, changes."""
    from earmill.pipeline.dataset.snapshot import log as read_log
    from earmill.pipeline.storage.layout import open_output

    with open_output(uri, storage_options) as layout:
        entries = read_log(layout)
    if as_json:
        say_json([asdict(entry) for entry in entries])
        return
    for entry in reversed(entries):
        say(
            f"{entry.number}  {entry.created or 'no date'}  {entry.why or 'unknown'}: "
            f"{entry.rows_ok:,} rows ok, {entry.rows_bad:,} quarantined; {entry.added:,} added, "
            f"{entry.changed:,} changed, {entry.removed:,} removed"
        )


def diff(
    uri: options.DatasetUri,
    before: Annotated[
        str, typer.Argument(metavar="A", help="Snapshot: a number of `log`, previous, or a date.")
    ] = "previous",
    after: Annotated[str, typer.Argument(metavar="B", help="The other one.")] = "current",
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Show the rows that differ between two snapshots: added, removed, or changed."""
    from earmill.pipeline.dataset.snapshot import diff as compare
    from earmill.pipeline.storage.layout import open_output

    with open_output(uri, storage_options) as layout:
        found = compare(layout, before, after)
    if as_json:
        say_json(asdict(found))
        return
    kinds = {"added": found.added, "removed": found.removed, "changed": found.changed}
    for kind, rows in kinds.items():
        for row_id in rows[:SHOWN_ROWS]:
            old, new = found.states[row_id]
            shown = new if old is None else old
            if kind == "changed" and old != new:
                shown = f"{old} -> {new}"
            say(f"{kind}: {row_id} ({shown})")
        if len(rows) > SHOWN_ROWS:
            say(f"{kind}: {len(rows) - SHOWN_ROWS:,} more, see --json")
    say(
        f"snapshot {found.before.number} to {found.after.number}: {len(found.added):,} rows added, "
        f"{len(found.changed):,} changed, {len(found.removed):,} removed"
    )


def compact(
    uri: options.DatasetUri,
    shard_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Audio of a merged shard, at most; the job's output.shard_seconds."
        ),
    ] = None,
    shard_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a merged shard, at most; the job's output.shard_rows."),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Merge small shards into larger ones, as a new snapshot with the same values."""
    from earmill.pipeline.dataset.revision import compact as merge
    from earmill.pipeline.storage.layout import open_output

    tell = teller(quiet=quiet or as_json)
    with open_output(uri, storage_options) as layout:
        entry = merge(layout, shard_seconds=shard_seconds, shard_rows=shard_rows, on_begin=tell)
    if as_json:
        say_json(None if entry is None else asdict(entry))
    elif entry is None:
        say("nothing to merge: no two neighbouring shards fit into one")
    else:
        say(f"snapshot {entry.number}: {entry.rows_ok:,} rows ok, {entry.rows_bad:,} quarantined")


def gc(
    uri: options.DatasetUri,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Keep this many snapshots, the newest.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Remove snapshots closed longer ago than this: 30d, 12h. Without this and "
            "--keep every snapshot stays.",
        ),
    ] = None,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Files younger than this stay.")
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Remove files that no snapshot names; refused while a driver works there."""
    from earmill.pipeline.dataset.garbage import collect_garbage
    from earmill.pipeline.storage.layout import open_output

    with open_output(uri, storage_options) as layout:
        collected = collect_garbage(
            layout,
            keep=keep,
            older_than=None if older_than is None else _duration(older_than, "--older-than"),
            grace_s=_duration(grace, "--grace").total_seconds(),
            dry_run=dry_run,
        )
    if as_json:
        say_json(asdict(collected))
        return
    removed = "would be removed" if dry_run else "removed"
    for entry in collected.snapshots:
        say(f"snapshot {entry.number} of {entry.created or 'no date'}: {removed}")
    for part in collected.parts[:SHOWN_PARTS]:
        say(f"{part}: {removed}")
    if len(collected.parts) > SHOWN_PARTS:
        say(f"{len(collected.parts) - SHOWN_PARTS:,} more, see --json")
    files = f"{collected.files:,} files, {bytes_text(collected.bytes)}"
    say(f"{files}, {removed}; {collected.young:,} too young")


def _duration(text: str, option: str) -> timedelta:
    """Parse `90s`, `15m`, `12h`, `30d` or `2w`; anything else is a usage error."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS_S or not number.replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{option}: expected a time such as 12h or 30d, got {text!r}")
    return timedelta(seconds=float(number) * UNITS_S[unit])
