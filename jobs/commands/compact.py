"""`earmill compact`: merge small shards into larger ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json, teller

if TYPE_CHECKING:
    pass


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

    tell = teller(quiet=quiet or as_json)
    with options.open_output(uri, storage_options) as layout:
        entry = merge(layout, shard_seconds=shard_seconds, shard_rows=shard_rows, on_begin=tell)
    if as_json:
        say_json(None if entry is None else asdict(entry))
    elif entry is None:
        say("nothing to merge: no two neighbouring shards fit into one")
    else:
        say(f"snapshot {entry.number}: {entry.rows_ok:,} rows ok, {entry.rows_bad:,} quarantined")
