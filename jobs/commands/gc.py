"""`earmill gc`: remove snapshots, and files that no snapshot names."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.garbage import Collected

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SHOWN_PARTS = 20


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
    """Remove what no snapshot names; refused while a driver works there."""
    from earmill.pipeline.dataset.garbage import collect_garbage

    with options.open_output(uri, storage_options) as layout:
        collected = collect_garbage(
            layout,
            keep=keep,
            older_than=None if older_than is None else duration(older_than, "--older-than"),
            grace_s=duration(grace, "--grace").total_seconds(),
            dry_run=dry_run,
        )
    if as_json:
        say_json(asdict(collected))
    else:
        _print(collected, "would be removed" if dry_run else "removed")


def duration(text: str, option: str) -> timedelta:
    """Parse `90s`, `15m`, `12h`, `30d` or `2w`; anything else is a usage error."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS_S or not number.replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{option}: expected a time such as 12h or 30d, got {text!r}")
    return timedelta(seconds=float(number) * UNITS_S[unit])


def _print(collected: Collected, what: str) -> None:
    from earmill.pipeline.common.text import bytes_text

    for entry in collected.snapshots:
        say(f"snapshot {entry.number} of {entry.created or 'no date'}: {what}")
    for part in collected.parts[:SHOWN_PARTS]:
        say(f"{part}: {what}")
    if len(collected.parts) > SHOWN_PARTS:
        say(f"{len(collected.parts) - SHOWN_PARTS:,} more, see --json")
    say(
        f"{collected.files:,} files, {bytes_text(collected.bytes)}, {what}; "
        f"{collected.young:,} too young"
    )
