"""How listing and planning grow with a corpus: wall time, CPU time and peak memory by rows.

Each line of the table is one function of `STEPS`, run in a process of its own on a folder that
`prepare` made for it; more steps (resume, finalise, verify, open) are one entry each. Rows are as
real as the step needs: files of 100 000 clips exist, those of a manifest of a million need not.

    python -m benchmarks.scale                     all lines, and their section of RESULTS.md
    python -m benchmarks.scale plan_files          one line, printed
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import peak_mb, table, write_section
from earmill.pipeline.planning.plan import Plan, make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout

HUNDRED_THOUSAND, MILLION = 100_000, 1_000_000
# 44 bytes of header and 0.05 s at 8 kHz.
WAV = (
    b"RIFF" + (36 + 800).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    + b"\x01\x00\x01\x00" + (8000).to_bytes(4, "little") + (16000).to_bytes(4, "little")
    + b"\x02\x00\x10\x00data" + (800).to_bytes(4, "little") + bytes(800)
)  # fmt: skip
ROWS_PER_FOLDER = 1000
FILES, GROUPS_PER_FILE, ROWS_PER_GROUP = 200, 5, 100


@dataclass(frozen=True)
class Step:
    """One line of the table.

    Args:
        what: As the table says it. rows: How many.
        prepare: Makes the corpus in an empty folder; not measured.
        run: What is measured, in the folder.
    """

    what: str
    rows: int
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]


def write_files(folder: Path) -> None:
    """A hundred thousand short files in folders of a thousand."""
    for n in range(HUNDRED_THOUSAND):
        parent = folder / "clips" / f"{n // ROWS_PER_FOLDER:04d}"
        if n % ROWS_PER_FOLDER == 0:
            parent.mkdir(parents=True)
        (parent / f"{n:07d}.wav").write_bytes(WAV)


def write_manifest(folder: Path) -> None:
    """A table of a million clips with durations, speakers and texts."""
    seconds = np.random.default_rng(0).uniform(1.0, 20.0, MILLION)
    with open(folder / "m.csv", "w") as file:
        file.write("uri,seconds,speaker,text\n")
        for n in range(MILLION):
            file.write(
                f"clips/{n // ROWS_PER_FOLDER:04d}/{n:07d}.flac,{seconds[n]:.3f},"
                f"spk{n % 997:04d},what was said in recording {n}\n"
            )


def write_parquet(folder: Path) -> None:
    """200 Parquet files as a dataset of the hub has them; 100 000 clips of 2 kB."""
    (folder / "set").mkdir()
    rows = GROUPS_PER_FILE * ROWS_PER_GROUP
    noise = np.random.default_rng(0)
    for n in range(FILES):
        audio = [{"bytes": WAV + noise.bytes(1200), "path": f"{n}-{k}.wav"} for k in range(rows)]
        columns = {"audio": audio, "text": [f"sentence {k} of file {n}" for k in range(rows)]}
        name = folder / "set" / f"train-{n:05d}-of-{FILES:05d}.parquet"
        pq.write_table(pa.table(columns), name, row_group_size=ROWS_PER_GROUP, compression="none")


def _job(folder: Path, source: dict[str, object]) -> JobSpec:
    sections = {"extract": [{"model": "dau1997"}], "output": {"uri": str(folder / "out")}}
    return JobSpec.load({"source": source, **sections})


def _planned(folder: Path, source: dict[str, object]) -> None:
    """List, plan and store, as a job does before its workers start."""
    spec = _job(folder, source)
    make_plan(open_source(spec.source), spec).write(Layout.open(spec.output.uri))


def plan_files(folder: Path) -> None:
    _planned(folder, {"kind": "files", "uri": str(folder / "clips")})


def plan_manifest(folder: Path) -> None:
    columns = {"uri": "uri", "duration": "seconds"}
    _planned(folder, {"kind": "manifest", "uri": str(folder / "m.csv"), "columns": columns})


def plan_parquet(folder: Path) -> None:
    _planned(folder, {"kind": "hf", "uri": str(folder / "set"), "streaming": True})


def prepare_plan(folder: Path) -> None:
    write_manifest(folder)
    plan_manifest(folder)


def read_plan(folder: Path) -> None:
    plan = Plan.read(Layout.open(str(folder / "out")))
    for shard in plan.shards[:: len(plan.shards) // 100]:
        assert len(shard.items) == shard.rows


STEPS = {
    "plan_files": Step("list and plan a folder", HUNDRED_THOUSAND, write_files, plan_files),
    "plan_parquet": Step("plan streamed Parquet", HUNDRED_THOUSAND, write_parquet, plan_parquet),
    "plan_manifest": Step("plan a manifest with durations", MILLION, write_manifest, plan_manifest),
    "read_plan": Step("open a stored plan, read 100 shards", MILLION, prepare_plan, read_plan),
}


def measure(name: str) -> dict[str, float]:
    """Run one step in this process; its wall and CPU seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--prepare", name, folder], check=True
        )
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        STEPS[name].run(Path(folder))
        return {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "peak_mb": peak_mb(),
        }


def _line(name: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.scale", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found, step = json.loads(done.stdout), STEPS[name]
    figures = [f"{found['wall_s']:.1f}", f"{found['cpu_s']:.1f}", f"{found['peak_mb']:.0f}"]
    return [step.what, f"{step.rows:,}", *figures]


def main() -> None:
    """Measure all steps, or the one that is named."""
    if sys.argv[1:2] == ["--prepare"]:
        STEPS[sys.argv[2]].prepare(Path(sys.argv[3]))
    elif len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        lines = [_line(name) for name in STEPS]
        head = ["step", "rows", "wall s", "CPU s", "peak MB"]
        write_section("Scale", "python -m benchmarks.scale", table(head, lines))


if __name__ == "__main__":
    main()
