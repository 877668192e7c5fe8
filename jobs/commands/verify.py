"""`earmill verify`: compare the plan with commits, and commits with files, sizes and sha256."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import console, say, say_json, teller

if TYPE_CHECKING:
    from earmill.pipeline.dataset.verify import Report
    from earmill.pipeline.operations.deep_verify import DeepReport


def verify(
    uri: options.DatasetUri,
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
    from earmill.pipeline.dataset.orphans import remove_orphans as remove
    from earmill.pipeline.dataset.verify import verify as check

    deep_report = None
    with options.open_output(uri, storage_options) as layout:
        removed = remove(layout).parts if remove_orphans else []
        report = check(layout, hashes=hashes)
        if deep is not None:
            from earmill.pipeline.operations.deep_verify import verify_deep
            from earmill.pipeline.operations.retry import stored_job

            spec = stored_job(layout, uri, options.parse_storage_options(storage_options), job=job)
            tell = teller(quiet=quiet or as_json)
            deep_report = verify_deep(layout, spec, deep, seed=seed, on_begin=tell)
    ok = report.ok and (deep_report is None or deep_report.ok)
    if as_json:
        more = {} if deep_report is None else {"deep": asdict(deep_report)}
        say_json({**asdict(report), "ok": ok, "removed": removed, **more})
    else:
        _print(uri, report, removed)
        if deep_report is not None:
            _print_deep(deep_report)
    raise typer.Exit(0 if ok else 1)


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
    # Files of one store are one line.
    parts = Counter("/".join(name.split("/")[:2]) for name in report.orphans)
    for part, files in parts.items():
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


def _print_deep(report: DeepReport) -> None:
    for problem in report.problems:
        say(f"problem: {problem}")
    close = f", {report.close:,} within {report.worst:.2g}" if report.close else ""
    say(
        f"{report.rows:,} rows computed again (--seed {report.seed}): {report.equal:,} equal bit "
        f"for bit{close}, {len(report.problems):,} problems"
    )
