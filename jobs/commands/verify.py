"""`earmill verify`: plan against commits, commits against files, sizes and sha256."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands.options import AsJson, DatasetUri, StorageOptions, parse_storage_options
from earmill.jobs.terminal import console, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.verify import Report


def verify(
    uri: DatasetUri,
    hashes: Annotated[
        bool, typer.Option(help="Read every byte and compare its sha256; else listings only.")
    ] = True,
    remove_orphans: Annotated[
        bool,
        typer.Option(
            "--remove-orphans",
            help="Remove the files of crashed attempts, which no commit names; refused while a "
            "driver works there.",
        ),
    ] = False,
    as_json: AsJson = False,
    storage_options: StorageOptions = None,
) -> None:
    """Check that a dataset is whole. Exit code 1 when it is not."""
    from earmill.pipeline.dataset.orphans import remove_orphans as remove
    from earmill.pipeline.dataset.verify import verify as check
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_errors import store_errors

    layout = Layout.open(uri, parse_storage_options(storage_options))
    with store_errors(layout.url()):
        removed = remove(layout).parts if remove_orphans else []
        report = check(layout, hashes=hashes)
    if as_json:
        say_json({"ok": report.ok, **asdict(report), "removed": removed})
    else:
        _print(uri, report, removed)
    raise typer.Exit(0 if report.ok else 1)


def _print(uri: str, report: Report, removed: list[str]) -> None:
    from earmill.jobs.progress import audio, bytes_text

    out = console(soft_wrap=True)
    for problem in report.problems:
        out.print(f"problem: {problem}", style="red")
    depth = "sha256 of every file" if report.hashed else "sizes, not contents"
    out.print(
        f"{uri}: {report.shards:,} of {report.shards_planned:,} shards, {report.rows_ok:,} rows "
        f"ok, {report.rows_bad:,} quarantined, {audio(report.seconds)} audio, "
        f"{report.files:,} files, {bytes_text(report.bytes)} ({depth})"
    )
    for part in removed:
        out.print(f"removed: {part}")
    for part, files in parts_of(report.orphans).items():
        out.print(f"orphan: {part} ({files:,} files)" if files > 1 else f"orphan: {part}")
    if report.orphans:
        out.print(
            f"{len(report.orphans):,} files of crashed attempts, harmless; --remove-orphans "
            "removes those of committed shards"
        )
    if report.replaced:
        out.print(f"{len(report.replaced):,} files of replaced commits, kept for older snapshots")
    if report.damaged:
        out.print(
            f"{len(report.damaged):,} shards are damaged: `earmill extract` with --resume --repair "
            "computes them again"
        )
    if report.ok:
        out.print("verified: whole", style="green")
    else:
        out.print(f"{len(report.problems):,} problems", style="bold red")


def parts_of(files: list[str]) -> dict[str, int]:
    """Files by the file or store they belong to, with their number."""
    return dict(Counter("/".join(name.split("/")[:2]) for name in files))
