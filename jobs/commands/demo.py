"""`earmill demo`: a whole job on two minutes of generated sound, in about half a minute. Two
damaged files go to quarantine. The dataset is verified byte by byte, and read back in both formats
by a DataLoader."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from earmill.jobs.commands.options import Quiet, job_text
from earmill.jobs.console.progress import reported_run
from earmill.jobs.console.terminal import check_local, console, teller
from earmill.pipeline.common.errors import OutputError

NAME = "demo"
SHOWN = ("speech/02.flac", "music/02.flac")
BATCH_ROWS = 4
FORMATS = ("zarr", "parquet")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for audio, features and report.")] = Path(
        "demo-out"
    ),
    quiet: Quiet = False,
) -> None:
    """Generate two minutes of audio and run the whole job on it."""
    from earmill.jobs.demo_audio import write_corpus
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.spec.job import JobSpec

    check_local(out)
    folder = _clean_folder(out)
    teller(quiet=quiet)("generating two minutes of speech-like and music-like audio")
    files = len(write_corpus(folder / "audio"))
    job = folder / "job.yaml"
    job.write_text(job_text("demo.yaml.jinja", name=NAME, folder=str(folder)))
    spec = JobSpec.load(job)
    with reported_run(log_format=spec.run.log_format, quiet=quiet) as (sink, stop):
        end = run_job(spec, sink=sink, stop=stop)
    if end.exit_code:
        raise typer.Exit(end.exit_code)
    _check(folder, files)


def _clean_folder(out: Path) -> Path:
    """Return the folder after deleting the features of an earlier demo; other files stay."""
    from earmill.pipeline.dataset.description import read_dataset
    from earmill.pipeline.storage.layout import Layout

    folder = out.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error}; choose another --out") from error
    features = folder / "features"
    if features.exists():
        stored = read_dataset(Layout.open(str(features)))
        if stored is None or stored.name != NAME:
            raise OutputError(f"{features} is not an earlier demo; choose another --out")
        shutil.rmtree(features)
    return folder


def _check(folder: Path, files: int) -> None:
    """Verify the dataset, read it back and draw it; raise or exit if something is wrong."""
    from torch.utils.data import DataLoader

    from earmill.jobs.report.row_panels import draw_rows
    from earmill.pipeline.dataset.snapshot import current_index
    from earmill.pipeline.dataset.verify import verify
    from earmill.pipeline.loader.collate import collate_padded
    from earmill.pipeline.reader.open import open_features
    from earmill.pipeline.storage.documents import read_table
    from earmill.pipeline.storage.layout import Layout

    out = console(soft_wrap=True)
    uri = str(folder / "features")
    layout = Layout.open(uri)
    report = verify(layout)
    if not report.ok or report.rows_ok + report.rows_bad != files or report.rows_bad != 2:
        out.print("\n".join(report.problems) or f"unexpected rows: {report}", style="red")
        raise typer.Exit(1)
    out.print(f"verified {report.files} files, {report.bytes / 1e6:.1f} MB, by sha256")
    for fmt in FORMATS:
        stored = open_features(uri, format=fmt).torch()
        loader = DataLoader(stored, batch_size=BATCH_ROWS, collate_fn=collate_padded)
        batch: Any = next(iter(loader))
        shapes = [f"{name} {tuple(part.values.shape)}" for name, part in batch.features.items()]
        out.print(f"batch of {BATCH_ROWS} from {fmt}: {', '.join(shapes)}")
    features = open_features(uri)
    draw_rows(folder / "report.png", [*map(features.by_id, SHOWN)], features.streams)
    rows = []
    for row in read_table(layout, str(current_index(layout))).to_pylist():
        cells = ["", "", f"quarantined: {row['error_class']}"]
        if row["status"] == "ok":
            cells = [f"{row['seconds']:.1f}", str(row["modulation_n_frames"]), "ok"]
        rows.append([row["row_id"], *cells])
    table = markdown_table(["file", "seconds", "frames", "status"], rows)
    (folder / "summary.md").write_text(table + "\n")
    out.print(table)
    out.print(f"figure: {folder / 'report.png'}   table: {folder / 'summary.md'}")
    out.print(f"as a page, with sound: earmill report {uri}")
    out.print("with your own recordings: earmill init")
    out.print(
        f"demo passed: {report.rows_ok} clips extracted, {report.rows_bad} damaged files in "
        "quarantine, dataset whole, both formats read back",
        style="bold green",
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, for terminals too."""
    from rich.box import MARKDOWN
    from rich.table import Table

    table = Table(*header, box=MARKDOWN)
    for row in rows:
        table.add_row(*row)
    out = console(width=10_000)
    with out.capture() as shown:
        out.print(table)
    return shown.get().strip(" \n")
