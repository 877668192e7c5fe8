"""`earmill demo`: a whole job on two minutes of generated sound, in about half a minute.

The corpus is written as audio files, and the job runs as any other job. Two damaged files go to
quarantine. The dataset is verified byte by byte, and read back in both formats by a DataLoader.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands.options import Quiet
from earmill.jobs.console import terminal
from earmill.jobs.console.terminal import check_local

if TYPE_CHECKING:
    from rich.console import Console

    from earmill.pipeline.driver.events import JobFinished
    from earmill.pipeline.reader.features import Features

NAME = "demo"
JOB = """\
# The demo's job. Run it again: earmill extract {folder}/job.yaml --resume
name: {name}
source:
  kind: files
  uri: {folder}/audio
audio:
  calibration: {{rms1_db_spl: 100}}   # a digital RMS of 1 is 100 dB SPL
extract:
  - model: dau1997
    streams:
      modulation: {{frame_rate_hz: 100}}
      envelope: {{frame_rate_hz: 100}}
      spikes: {{step_rate_hz: 1000}}
output:
  uri: {folder}/features
  formats: [zarr, parquet]
  shard_seconds: 30
run:
  max_bad_fraction: 0.2             # two of the fifteen files are damaged on purpose
"""
SHOWN = {"speech": "speech/02.flac", "music": "music/02.flac"}
BATCH_ROWS = 4


def demo(
    out: Annotated[Path, typer.Option(help="Folder for audio, features and report.")] = Path(
        "demo-out"
    ),
    quiet: Quiet = False,
) -> None:
    """Generate two minutes of audio and run the whole job on it."""
    from earmill.jobs.console.job_run import reported_run
    from earmill.jobs.demo_audio import write_corpus
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.spec.job import JobSpec

    check_local(out)
    console = terminal.console(soft_wrap=True)
    folder = _clean_folder(out)
    terminal.teller(quiet=quiet)("generating two minutes of speech-like and music-like audio")
    paths = write_corpus(folder / "audio")
    job = folder / "job.yaml"
    job.write_text(JOB.format(name=NAME, folder=folder))
    spec = JobSpec.load(job)
    with reported_run(log_format=spec.run.log_format, quiet=quiet) as (sink, stop):
        end = run_job(spec, sink=sink, stop=stop)
    if end.exit_code:
        raise typer.Exit(end.exit_code)
    _check(console, folder, end, files=len(paths))


def _clean_folder(out: Path) -> Path:
    """Return the folder after deleting the features of an earlier demo; other files stay."""
    from earmill.pipeline.common.errors import OutputError
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


def _check(console: Console, folder: Path, end: JobFinished, *, files: int) -> None:
    """Verify the dataset, read it back and draw it; raise or exit if something is wrong."""
    from earmill.jobs.demo_report import Example, draw
    from earmill.pipeline.dataset.verify import verify
    from earmill.pipeline.reader.open import open_features
    from earmill.pipeline.storage.layout import Layout

    uri = str(folder / "features")
    report = verify(Layout.open(uri))
    if not report.ok or report.rows_ok + report.rows_bad != files or report.rows_bad != 2:
        console.print("\n".join(report.problems) or f"unexpected rows: {report}", style="red")
        raise typer.Exit(1)
    console.print(f"verified {report.files} files, {report.bytes / 1e6:.1f} MB, by sha256")
    shapes = {fmt: _load_batch(open_features(uri, format=fmt)) for fmt in ("zarr", "parquet")}
    features = open_features(uri)
    examples = [
        Example(title, folder / "audio" / row_id, features.by_id(row_id))
        for title, row_id in SHOWN.items()
    ]
    draw(folder / "report.png", examples, features.streams)
    table = _summary(uri, end, shapes)
    (folder / "summary.md").write_text(table + "\n")
    console.print(table)
    console.print(f"figure: {folder / 'report.png'}   table: {folder / 'summary.md'}")
    console.print(f"as a page, with sound: earmill report {uri}")
    console.print("with your own recordings: earmill init")
    console.print(
        f"demo passed: {report.rows_ok} clips extracted, {report.rows_bad} damaged files in "
        "quarantine, dataset whole, both formats read back",
        style="bold green",
    )


def _load_batch(features: Features) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one padded batch from a DataLoader."""
    from torch.utils.data import DataLoader

    from earmill.pipeline.loader.collate import collate_padded

    loader = DataLoader(
        features.torch(), batch_size=BATCH_ROWS, collate_fn=collate_padded, shuffle=False
    )
    batch: Any = next(iter(loader))
    return {name: tuple(padded.values.shape) for name, padded in batch.features.items()}


def _summary(uri: str, end: JobFinished, shapes: dict[str, dict[str, tuple[int, ...]]]) -> str:
    """Return a table of the files, and one of the whole job."""
    from earmill.jobs.demo_report import markdown_table
    from earmill.pipeline.dataset.snapshot import current_index
    from earmill.pipeline.storage.documents import read_table
    from earmill.pipeline.storage.layout import Layout

    layout = Layout.open(uri)
    rows = []
    for row in read_table(layout, str(current_index(layout))).to_pylist():
        good = row["status"] == "ok"
        rows.append(
            [
                row["row_id"],
                f"{row['seconds']:.1f}" if good else "",
                str(row["modulation_n_frames"]) if good else "",
                "ok" if good else f"quarantined: {row['error_class']}",
            ]
        )
    per_file = markdown_table(["file", "seconds", "frames", "status"], rows)
    batches = "; ".join(
        f"{fmt} {', '.join(f'{name} {shape}' for name, shape in by_name.items())}"
        for fmt, by_name in shapes.items()
    )
    whole = markdown_table(
        ["what", "value"],
        [
            ["audio", f"{end.seconds:.0f} s"],
            ["speed", f"{end.times_real_time:.0f} x real time, decode to commit"],
            ["rows", f"{end.rows_ok} ok, {end.rows_bad} quarantined"],
            [f"batch of {BATCH_ROWS}", batches],
        ],
    )
    return f"{per_file}\n\n{whole}"
