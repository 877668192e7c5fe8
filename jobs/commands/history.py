"""`earmill log` and `earmill diff`: the snapshots of a dataset, and the rows that changed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json

# Most rows that `diff` prints of each kind.
SHOWN_ROWS = 20


def log(
    uri: options.DatasetUri,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """List the snapshots of a dataset, newest first: date, reason, rows, changes."""
    from earmill.pipeline.dataset.history import log as read_log

    with options.open_output(uri, storage_options) as layout:
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
    from earmill.pipeline.dataset.history import diff as compare

    with options.open_output(uri, storage_options) as layout:
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
