"""Do the example jobs still give the same bytes? One line a spec and format, hashes in it.

Runs every spec of `jobs/` and the demo on the recordings in tests/data. Run it at two commits and
compare the output:

    python -m benchmarks.job_bytes /tmp/job_bytes > after.txt

The corpora are made there once and kept: both runs need the same ones, as data files name the hash
of their spec, and with it the source, and Parquet rows the time and hash of each source file.

`files` hashes the data files byte by byte, without the random part of their names; `values` hashes
what the reader returns, so a change of container or checksum alone shows in the first only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from earmill import open_features
from earmill.jobs.demo_audio import write_corpus
from earmill.pipeline.driver.ray_session import ray_session
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.spec.job import JobSpec

ROOT = Path(__file__).resolve().parents[1]
SPEECH = ROOT / "tests" / "data" / "speech"
MANIFEST = "manifest.csv"
HF_TABLE = "hf/validation.parquet"
SAMPLES = "samples.tar"
DEMO_STREAMS = {
    "modulation": {"frame_rate_hz": 100},
    "envelope": {"frame_rate_hz": 100},
    "spikes": {"step_rate_hz": 1000},
}


def write_sources(folder: Path) -> None:
    """The corpora of the example jobs, all from the recordings in tests/data."""
    paths = sorted(path for path in SPEECH.rglob("*.*") if path.suffix in (".wav", ".flac", ".ogg"))
    (folder / "stereo").mkdir(parents=True)
    shutil.copytree(SPEECH, folder / "speech")
    wave, rate_hz = soundfile.read(paths[0], dtype="float32", always_2d=True)
    for name, gains in {"left": (1.0, 0.2), "front": (1.0, 1.0)}.items():
        ears = wave.mean(1, keepdims=True) * np.array([gains], np.float32)
        soundfile.write(folder / "stereo" / f"{name}.flac", ears, rate_hz)
    table = folder / MANIFEST
    lines = [f"{path.relative_to(folder)},{path.stem}" for path in _copied(paths, folder)]
    table.write_text("\n".join(["uri,id", *lines]) + "\n")
    parquet = folder / HF_TABLE
    parquet.parent.mkdir()
    audio = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    pq.write_table(pa.table({"audio": audio, "id": [path.stem for path in paths]}), parquet)
    write_corpus(folder / "demo")


def write_samples(path: Path) -> None:
    """A tar of the recordings in FLAC, with the same bytes whenever it is written."""
    with tarfile.open(path, "w") as tar:
        for file in sorted(SPEECH.rglob("*.flac")):
            member = tarfile.TarInfo(file.relative_to(SPEECH).as_posix())
            member.size = file.stat().st_size
            with file.open("rb") as stream:
                tar.addfile(member, stream)
    os.utime(path, (0, 0))  # the time of a source file is part of its rows


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """What points each example job at its corpus."""
    return {
        "bucket_manifest": {"uri": str(folder / MANIFEST)},
        "hf_streaming": {"uri": str(folder / HF_TABLE), "config": None, "split": "train"},
        "loudness": {"uri": str(folder / "stereo")},
        "webdataset": {"uri": str(folder / SAMPLES)},
        "demo": {"uri": str(folder / "demo")},
    }


def _copied(paths: list[Path], folder: Path) -> list[Path]:
    (folder / "clips").mkdir()
    return [Path(shutil.copy(path, folder / "clips" / path.name)) for path in paths]


def demo_spec() -> dict[str, Any]:
    """The demo's job, as far as it decides the bytes."""
    return {
        "source": {"kind": "files", "uri": ""},
        "audio": {"calibration": {"rms1_db_spl": 100}},
        "extract": [{"model": "dau1997", "streams": DEMO_STREAMS}],
        "output": {"uri": "", "formats": ["zarr", "parquet"], "shard_seconds": 30},
        "run": {"max_bad_fraction": 0.2},
    }


def load(name: str, source: dict[str, Any], output: Path) -> JobSpec:
    """One example job, pointed at a local corpus."""
    job = demo_spec() if name == "demo" else ROOT / "jobs" / f"{name}.yaml"
    keys = {f"source.{key}": value for key, value in source.items()} | {"output.uri": str(output)}
    overrides = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    return JobSpec.load(job, overrides=overrides)


def file_hash(output: Path, suffix: str) -> str:
    """sha256 over the data files of one format, attempts left out of their names."""
    total = hashlib.sha256()
    for path in sorted(path for path in (output / "data").rglob("*") if path.is_file()):
        name = re.sub(r"^(\d+)-[0-9a-f]{8}", r"\1", path.relative_to(output / "data").as_posix())
        if name.split("/")[0].endswith(suffix):
            total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def value_hash(output: Path, fmt: str) -> str:
    """sha256 over every row as the reader returns it."""
    features, total = open_features(output, format=fmt), hashlib.sha256()
    for row in (features[i] for i in range(len(features))):
        total.update(row.row_id.encode())
        for stream, values in sorted(row.features.items()):
            dense = values if isinstance(values, np.ndarray) else values.dense()
            total.update(f"{stream} {dense.dtype} {dense.shape}".encode())
            total.update(np.ascontiguousarray(dense).tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    """Print the hashes of every example job."""
    names = [*sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml")), "demo"]
    folder = Path(sys.argv[1]).resolve()
    if not folder.exists():
        write_sources(folder)
    write_samples(folder / SAMPLES)
    shutil.rmtree(folder / "out", ignore_errors=True)
    with ray_session():
        for name in names:
            output = folder / "out" / name
            spec = load(name, sources(folder).get(name, {"uri": str(folder / "speech")}), output)
            end = run_job(spec)
            for fmt in spec.output.formats:
                files, values = file_hash(output, f".{fmt}"), value_hash(output, fmt)
                rows = f"{end.rows_ok}+{end.rows_bad}"
                print(f"{name:16} {fmt:8} rows {rows:6} files {files}  values {values}", flush=True)


if __name__ == "__main__":
    main()
