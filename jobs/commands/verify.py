"""`earmill verify`: plan against commits, commits against files, sizes and sha256."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands.options import (
    AsJson,
    DatasetUri,
    Quiet,
    StorageOptions,
    parse_storage_options,
)
from earmill.jobs.console.terminal import console, say, say_json, teller

if TYPE_CHECKING:
    from earmill.pipeline.dataset.verify import Report
    from earmill.pipeline.driver.deep_verify import DeepReport


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
    deep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also compute N random rows again from their source and compare: bit by bit where "
            "machine and packages are those that made them, else within a tolerance. Run it where "
            "the job ran, as relative paths are relative to that.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the rows of --deep; the report says which it was.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB.yaml",
            help="For --deep: the job file, where dataset.json does not say all: credentials of "
            "the source.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    storage_options: StorageOptions = None,
) -> None:
    """Check that a dataset is whole. Exit code 1 when it is not."""
    from earmill.pipeline.dataset.orphans import remove_orphans as remove
    from earmill.pipeline.dataset.verify import verify as check
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_errors import store_errors

    options = parse_storage_options(storage_options)
    layout = Layout.open(uri, options)
    with store_errors(layout.url()):
        removed = remove(layout).parts if remove_orphans else []
        report = check(layout, hashes=hashes)
        tell = teller(quiet=quiet or as_json)
        found = None if deep is None else _computed_again(uri, options, deep, seed, job, tell)
    if as_json:
        told = {} if found is None else {"deep": asdict(found)}
        ok = report.ok and (found is None or found.ok)
        say_json({**asdict(report), "ok": ok, "removed": removed, **told})
    else:
        _print(uri, report, removed)
        if found is not None:
            _print_deep(found)
    raise typer.Exit(0 if report.ok and (found is None or found.ok) else 1)


def _computed_again(
    uri: str,
    options: dict[str, Any],
    rows: int,
    seed: int | None,
    job: str | None,
    tell: Callable[[str], None],
) -> DeepReport:
    from earmill.pipeline.driver.deep_verify import verify_deep
    from earmill.pipeline.driver.stored_job import stored_job
    from earmill.pipeline.storage.layout import Layout

    layout = Layout.open(uri, options)
    spec = stored_job(layout, uri, options, job=job)
    return verify_deep(layout, spec, rows, seed=seed, on_begin=tell)


def _print_deep(found: DeepReport) -> None:
    for problem in found.problems:
        say(f"problem: {problem}")
    elsewhere = f", {found.close:,} within {found.worst:.2g}" if found.close else ""
    say(
        f"{found.rows:,} rows computed again (--seed {found.seed}): {found.equal:,} equal bit for "
        f"bit{elsewhere}, {len(found.problems):,} problems"
    )


def _print(uri: str, report: Report, removed: list[str]) -> None:
    from earmill.pipeline.common.text import audio, bytes_text

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
