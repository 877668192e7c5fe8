"""`earmill plot`: draw the features of one row over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import check_local, say

RowId = Annotated[
    str | None, typer.Option("--row", metavar="ID", help="Row id; the first row when left out.")
]
Start = Annotated[float, typer.Option(metavar="S", help="Begin of the time shown.")]
Stop = Annotated[float | None, typer.Option(metavar="S", help="End; the clip's end when left out.")]
Out = Annotated[Path, typer.Option(help="PNG file to write.")]


def plot(
    uri: options.DatasetUri,
    row: RowId = None,
    out: Out = Path("row.png"),
    start: Start = 0.0,
    stop: Stop = None,
    storage_options: options.StorageOptions = None,
) -> None:
    """Draw every feature stream of one row over time."""
    from earmill.jobs.stream_plots import draw_row
    from earmill.pipeline.common.errors import OutputError, SourceError
    from earmill.pipeline.reader.open import open_features
    from earmill.pipeline.storage.retrying import is_store_error, store_errors

    check_local(out)
    store_options = options.parse_storage_options(storage_options)
    with store_errors(uri):
        features = open_features(uri, storage_options=store_options)
        try:
            position = 0 if row is None else features.index_of(row)
            shown = features.slice(position, start, stop)
        except (KeyError, IndexError, ValueError) as error:
            if is_store_error(error):
                raise
            raise SourceError(str(error.args[0])) from error
    try:
        draw_row(out, shown, features.streams)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}; choose another --out") from error
    say(f"{out}: {shown.row_id}")
