"""Peak memory of a worker for files of ten minutes, one hour and three hours.

Each figure is of a fresh process that does the work for a shard of one file: decode, model, encode,
read back, publish. The features of the longest file are compared with one call of the model for the
whole signal.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.report import peak_mb, table, write_section

MINUTES = (10, 60, 180)
FORMATS = ("zarr", "parquet")
FS_HZ = 44100
THREADS = 2
SECONDS_A_BLOCK = 10


def audio(minutes: int) -> Iterator[np.ndarray]:
    """Yield noise at speech level; a longer file begins with the samples of a shorter one."""
    rng = np.random.default_rng(14)
    for _ in range(minutes * 60 // SECONDS_A_BLOCK):
        yield rng.normal(0, 0.05, SECONDS_A_BLOCK * FS_HZ).astype(np.float32)


def write_audio(path: Path, minutes: int) -> None:
    """Write a FLAC file of 16 bits."""
    with soundfile.SoundFile(path, "w", FS_HZ, 1, subtype="PCM_16") as file:
        for block in audio(minutes):
            file.write(block)


def worker(file: str, fmt: str, folder: str, whole: bool) -> dict[str, Any]:
    """Run a shard of one file; return peak MB before and after it, and digests of its values.

    Args:
        file: The audio file.
        fmt: Format of the features.
        folder: Output folder.
        whole: Hold the clip in memory and call the model once, as for short clips.
    """
    from earmill.pipeline.dataset.commit_record import read_commit
    from earmill.pipeline.operations.open_job import describe
    from earmill.pipeline.planning.make_plan import make_plan
    from earmill.pipeline.sources import open_source
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.models import built_models
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.worker.messages import ShardOrder
    from earmill.pipeline.worker.row_pipeline import RowProcessor
    from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": file},
            "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
            "output": {"uri": folder, "formats": [fmt]},
        }
    )
    (shard,) = (plan := make_plan(open_source(spec.source), spec)).shards
    rows = partial(RowProcessor, long_s=math.inf) if whole else RowProcessor
    dataset = describe(spec, plan, built_models(spec))
    runner = ShardRunner(WorkerJob(spec, dataset, THREADS, "/"), rows)
    runner.warm_up()
    warm_mb = peak_mb()
    runner.run(ShardOrder(shard, "0" * 8))
    record = read_commit(Layout.open(folder), shard.shard_id)
    assert record is not None and record.rows_ok == 1
    return {"warm": warm_mb, "peak": peak_mb(), "values": dict(record.values_sha256)}


def main() -> None:
    """Measure and write the section."""
    with tempfile.TemporaryDirectory() as name:
        folder, lines, values = Path(name), [], {}
        for minutes in MINUTES:
            write_audio(folder / f"{minutes}.flac", minutes)
        for fmt in FORMATS:
            # The least peak of three runs; peaks of longer files are divided by it.
            first = min((_measured(folder, MINUTES[0], fmt) for _ in range(3)), key=_peak_mb)
            found = {MINUTES[0]: first}
            found |= {minutes: _measured(folder, minutes, fmt) for minutes in MINUTES[1:]}
            for minutes, each in found.items():
                ratio = each["peak"] / found[MINUTES[0]]["peak"]
                figures = f"{each['warm']:.0f}", f"{each['peak']:.0f}", f"{ratio:.2f}"
                lines.append([fmt, str(minutes), *figures])
            values[fmt] = found[MINUTES[-1]]["values"]
        whole = _measured(folder, MINUTES[-1], FORMATS[0], whole=True)
    same = [fmt for fmt in FORMATS if values[fmt] == whole["values"]]
    head = ["format", "minutes", "warm worker, MB", "peak, MB", "of ten minutes'"]
    note = (
        f"Values of {MINUTES[-1]} minutes equal, bit for bit, to those of one call with the whole "
        f"signal (which took {whole['peak']:.0f} MB): {', '.join(same) or 'none'}."
    )
    body = f"{table(head, lines)}\n\n{note}"
    write_section("Long files", "python -m benchmarks.long_files", body)


def _peak_mb(found: dict[str, Any]) -> float:
    return float(found["peak"])


def _measured(folder: Path, minutes: int, fmt: str, *, whole: bool = False) -> dict[str, Any]:
    output = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "benchmarks.long_files", f"{folder}/{minutes}.flac", fmt]
    command += [output, *(["whole"] if whole else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(fmt, minutes, found, flush=True)
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        file, fmt, folder, *more = sys.argv[1:]
        print(json.dumps(worker(file, fmt, folder, bool(more))))
    else:
        main()
