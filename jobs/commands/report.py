"""`earmill report`: show a dataset as one HTML page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, teller

Out = Annotated[Path, typer.Option(help="HTML file to write.")]
MostRows = Annotated[int, typer.Option("--rows", min=0, help="Rows of the table, at most.")]
Examples = Annotated[int, typer.Option(min=0, max=50, help="Rows with features, chosen by length.")]
RowIds = Annotated[
    list[str] | None,
    typer.Option("--row", metavar="ID", help="Show this row's features instead. Repeatable."),
]
Seconds = Annotated[
    float, typer.Option(min=0.1, max=120.0, help="Seconds shown of each row, from its start.")
]
Audio = Annotated[
    bool,
    typer.Option(
        "--audio/--no-audio", help="Embed the sound of these rows, if the source is available."
    ),
]


def report(
    uri: options.DatasetUri,
    out: Out = Path("report.html"),
    rows: MostRows = 1000,
    examples: Examples = 4,
    row: RowIds = None,
    seconds: Seconds = 10.0,
    audio: Audio = True,
    job: options.JobOfDataset = None,
    quiet: options.Quiet = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Write one HTML page that shows a dataset: rows, sound, features, work, provenance."""
    from earmill.jobs.report.build import Options, write_report
    from earmill.pipeline.common.text import bytes_text
    from earmill.pipeline.spec.job import JobSpec

    page = write_report(
        uri,
        out,
        options=Options(rows, examples, tuple(row or ()), seconds, audio),
        storage_options=options.parse_storage_options(storage_options),
        job=None if job is None else JobSpec.load(job),
        on_begin=teller(quiet=quiet),
    )
    say(f"{page}: {bytes_text(page.stat().st_size)}")
