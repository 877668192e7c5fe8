"""`earmill log`: the snapshots of a dataset."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.snapshot import LogEntry


def log(
    uri: options.DatasetUri,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """List the snapshots of a dataset, newest first: date, reason, rows, changes."""
    from earmill.pipeline.dataset.snapshot import log as read_log

    with options.open_output(uri, storage_options) as layout:
        entries = read_log(layout)
    if as_json:
        say_json([asdict(entry) for entry in entries])
    else:
        _print_log(entries)


def _print_log(entries: list[LogEntry]) -> None:
    for entry in reversed(entries):
        say(
            f"{entry.number}  {entry.created or 'no date'}  {entry.why or 'unknown'}: "
            f"{entry.rows_ok:,} rows ok, {entry.rows_bad:,} quarantined; {entry.added:,} added, "
            f"{entry.changed:,} changed, {entry.removed:,} removed"
        )
