"""`earmill diff`: the rows that differ between two snapshots of a dataset."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.snapshot import SnapshotDiff

SHOWN_ROWS = 20


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

    with options.open_output(uri, storage_options) as layout:
        difference = compare(layout, before, after)
    if as_json:
        say_json(asdict(difference))
    else:
        _print_diff(difference)


def _print_diff(difference: SnapshotDiff) -> None:
    """Print one line a row, at most `SHOWN_ROWS` of each kind; --json has all rows."""
    for what, rows in (
        ("added", difference.added),
        ("removed", difference.removed),
        ("changed", difference.changed),
    ):
        for row_id in rows[:SHOWN_ROWS]:
            before, after = difference.states[row_id]
            state = after if before is None else before
            shown = state if what != "changed" or before == after else f"{before} -> {after}"
            say(f"{what}: {row_id} ({shown})")
        if len(rows) > SHOWN_ROWS:
            say(f"{what}: {len(rows) - SHOWN_ROWS:,} more, see --json")
    say(
        f"snapshot {difference.before.number} to {difference.after.number}: "
        f"{len(difference.added):,} rows added, {len(difference.changed):,} changed, "
        f"{len(difference.removed):,} removed"
    )
