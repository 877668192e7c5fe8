"""`earmill plot` and `earmill report`: features as a figure, and a dataset as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import check_local, say, teller
from earmill.pipeline.common.errors import OutputError, SourceError
from earmill.pipeline.common.text import bytes_text
from earmill.pipeline.storage.retrying import is_store_error, store_errors


def plot(
    uri: options.DatasetUri,
    row: Annotated[
        str | None, typer.Option("--row", metavar="ID", help="Row id; the first row when left out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("row.png"),
    start: Annotated[float, typer.Option(metavar="S", help="Start of the time shown.")] = 0.0,
    stop: Annotated[
        float | None, typer.Option(metavar="S", help="End; the clip's end when left out.")
    ] = None,
    storage_options: options.StorageOptions = None,
) -> None:
    """Draw every feature stream of one row over time."""
    from earmill.jobs.report.row_panels import draw_rows
    from earmill.pipeline.reader.open import open_features

    check_local(out)
    with store_errors(uri):
        features = open_features(uri, storage_options=storage_options)
        try:
            position = 0 if row is None else features.index_of(row)
            shown = features.slice(position, start, stop)
        except (KeyError, IndexError, ValueError) as error:
            if is_store_error(error):
                raise
            raise SourceError(str(error.args[0])) from error
    try:
        draw_rows(out, [shown], features.streams, start, stop)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}; choose another --out") from error
    say(f"{out}: {shown.row_id}")


def report(
    uri: options.DatasetUri,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows of the table, at most.")] = 1000,
    examples: Annotated[
        int, typer.Option(min=0, max=50, help="Rows with features, chosen by length.")
    ] = 4,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="ID", help="Show this row's features instead. Repeatable."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=120.0, help="Seconds shown of each row, from its start.")
    ] = 10.0,
    audio: Annotated[
        bool,
        typer.Option(
            "--audio/--no-audio", help="Embed the sound of these rows, if the source is available."
        ),
    ] = True,
    job: options.JobOfDataset = None,
    quiet: options.Quiet = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Write one HTML page that shows a dataset: rows, sound, features, work, provenance."""
    from earmill.jobs.report.build import Options, write_report
    from earmill.pipeline.spec.job import JobSpec

    page = write_report(
        uri,
        out,
        options=Options(rows, examples, tuple(row or ()), seconds, audio),
        storage_options=storage_options or {},
        job=None if job is None else JobSpec.load(job),
        on_begin=teller(quiet=quiet),
    )
    say(f"{page}: {bytes_text(page.stat().st_size)}")
