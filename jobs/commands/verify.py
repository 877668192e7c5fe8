"""`earmill verify`: plan against commits, commits against files, sizes and sha256."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.commands.options import AsJson, DatasetUri, StorageOptions, parse_storage_options

if TYPE_CHECKING:
    from pipeline.verify import Report


def verify(
    uri: DatasetUri,
    hashes: Annotated[
        bool, typer.Option(help="Read every byte and compare its sha256; else listings only.")
    ] = True,
    as_json: AsJson = False,
    storage_options: StorageOptions = None,
) -> None:
    """Check that a dataset is whole. Exit code 1 when it is not."""
    from pipeline.layout import Layout
    from pipeline.verify import verify as check

    report = check(Layout.open(uri, parse_storage_options(storage_options)), hashes=hashes)
    if as_json:
        print(json.dumps({"ok": report.ok, **asdict(report)}))
    else:
        _print(uri, report)
    raise typer.Exit(0 if report.ok else 1)


def _print(uri: str, report: Report) -> None:
    from rich.console import Console

    from jobs.progress import audio, bytes_text

    console = Console(highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"problem: {problem}", style="red", markup=False)
    depth = "sha256 of every file" if report.hashed else "sizes, not contents"
    console.print(
        f"{uri}: {report.shards:,} of {report.shards_planned:,} shards, {report.rows_ok:,} rows "
        f"ok, {report.rows_bad:,} quarantined, {audio(report.seconds)} audio, "
        f"{report.files:,} files, {bytes_text(report.bytes)} ({depth})",
        markup=False,
    )
    if report.orphans:
        console.print(f"{len(report.orphans):,} files of crashed attempts, harmless")
    if report.ok:
        console.print("verified: whole", style="green")
    else:
        console.print(f"{len(report.problems):,} problems", style="bold red")
