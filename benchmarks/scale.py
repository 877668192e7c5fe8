"""Driver and reader with many rows: wall time, CPU time and peak memory by rows.

Each line of the table is one function of `STEPS`, run in its own process in a folder that `prepare`
made. Steps of one folder run one after the other. Rows are as real as a step needs. The 100 000
clips of a folder are files; the million clips of a manifest do not exist. The set that is resumed,
closed, verified and opened has a few zeros a row, committed as in a job.

    python -m benchmarks.scale                     all lines, and their sections of RESULTS.md
    python -m benchmarks.scale set                 one section
    python -m benchmarks.scale plan_files          one line, printed
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import peak_mb, table, write_section
from benchmarks.sleeping_workers import run_sleeping
from earmill import open_features
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.driver import events
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
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
ROWS_PER_SHARD = 100
FILES, GROUPS_PER_FILE, ROWS_PER_GROUP = 200, 5, 100


@dataclass(frozen=True)
class Step:
    """One line of the table.

    Args:
        what: Text of the table.
        rows: Number of rows.
        prepare: Makes the corpus in an empty folder; not measured. Steps with the same function
            share a folder, one after the other.
        run: Function that is measured in the folder.
    """

    what: str
    rows: int
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]


def write_files(folder: Path) -> None:
    """Write a hundred thousand short files in folders of a thousand."""
    for n in range(HUNDRED_THOUSAND):
        parent = folder / "clips" / f"{n // ROWS_PER_FOLDER:04d}"
        if n % ROWS_PER_FOLDER == 0:
            parent.mkdir(parents=True)
        (parent / f"{n:07d}.wav").write_bytes(WAV)


def write_manifest(folder: Path) -> None:
    """Write a table of a million clips with durations, speakers and texts."""
    seconds = np.random.default_rng(0).uniform(1.0, 20.0, MILLION)
    with open(folder / "m.csv", "w") as file:
        file.write("uri,seconds,speaker,text\n")
        for n in range(MILLION):
            file.write(
                f"clips/{n // ROWS_PER_FOLDER:04d}/{n:07d}.flac,{seconds[n]:.3f},"
                f"spk{n % 997:04d},what was said in recording {n}\n"
            )


def write_parquet(folder: Path) -> None:
    """Write 200 Parquet files like a dataset of the hub, with 100 000 clips of 2 kB."""
    (folder / "set").mkdir()
    rows = GROUPS_PER_FILE * ROWS_PER_GROUP
    noise = np.random.default_rng(0)
    for n in range(FILES):
        audio = [{"bytes": WAV + noise.bytes(1200), "path": f"{n}-{k}.wav"} for k in range(rows)]
        columns = {"audio": audio, "text": [f"sentence {k} of file {n}" for k in range(rows)]}
        name = folder / "set" / f"train-{n:05d}-of-{FILES:05d}.parquet"
        pq.write_table(pa.table(columns), name, row_group_size=ROWS_PER_GROUP, compression="none")


def _job(folder: Path, source: dict[str, object], **output: object) -> JobSpec:
    output = {"uri": str(folder / "out"), **output}
    extract = [{"model": "dau1997", "streams": {"adaptation": {}}}]
    return JobSpec.load({"source": source, "extract": extract, "output": output})


def _planned(folder: Path, source: dict[str, object]) -> None:
    """List the source, make the plan and store it, as a job does before its workers start."""
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


def set_job(folder: Path) -> JobSpec:
    """Return a job with a hundred rows a shard, in both formats."""
    source = {"kind": "files", "uri": str(folder / "clips")}
    return _job(folder, source, shard_rows=ROWS_PER_SHARD)


def prepare_set(folder: Path) -> None:
    """Commit all rows of a set that is not closed yet."""
    write_files(folder)
    run_sleeping(set_job(folder), workers=100, sleep_s=0.5)
    out = folder / "out"
    for name in ("index", "snapshots"):
        shutil.rmtree(out / name)
    for name in ("current.json", "README.md", "croissant.json", "provenance.jsonld"):
        (out / name).unlink()


class _AllRead(Exception):
    """Raised in place of starting workers."""


def resume(folder: Path) -> None:
    """Resume a job until workers would be started for the last shard."""

    def sink(event: events.Event) -> None:
        if isinstance(event, events.Step) and event.text == "starting the workers":
            raise _AllRead

    spec, last = set_job(folder), sorted((folder / "out" / "commits").iterdir())[-1]
    aside = last.rename(folder / last.name)
    try:
        run_job(spec, resume=True, sink=sink)
    except _AllRead:
        aside.rename(last)
        return
    raise AssertionError("nothing was left to do")


def close_set(folder: Path) -> None:
    assert finalise(Layout.open(str(folder / "out"))).rows_ok == HUNDRED_THOUSAND


def verify_set(folder: Path) -> None:
    report = verify(Layout.open(str(folder / "out")))
    assert report.ok and report.rows_ok == HUNDRED_THOUSAND, report.problems[:5]


def open_set(folder: Path) -> None:
    features = open_features(folder / "out")
    assert len(features) == HUNDRED_THOUSAND
    for row in (features[0], features[HUNDRED_THOUSAND - 1]):
        assert len(row.features["adaptation"])


STEPS = {
    "plan_files": Step("list and plan a folder", HUNDRED_THOUSAND, write_files, plan_files),
    "plan_parquet": Step("plan streamed Parquet", HUNDRED_THOUSAND, write_parquet, plan_parquet),
    "plan_manifest": Step("plan a manifest with durations", MILLION, write_manifest, plan_manifest),
    "read_plan": Step("open a stored plan, read 100 shards", MILLION, prepare_plan, read_plan),
    "resume": Step("resume: up to the first worker", HUNDRED_THOUSAND, prepare_set, resume),
    "finalise": Step("finalise", HUNDRED_THOUSAND, prepare_set, close_set),
    "verify": Step("verify, every byte", HUNDRED_THOUSAND, prepare_set, verify_set),
    "open": Step("open, read two rows", HUNDRED_THOUSAND, prepare_set, open_set),
}

SECTIONS = {
    "planning": ("plan_files", "plan_parquet", "plan_manifest", "read_plan"),
    "set": ("resume", "finalise", "verify", "open"),
}


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run one step in this process; return wall and CPU seconds and peak memory."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    STEPS[name].run(folder)
    return {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_mb": peak_mb(),
    }


def _measured(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Run the steps of one folder, each in its own process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (f"prepare {names[0]}", *names):
            command = [sys.executable, "-m", "benchmarks.scale", "--in", folder, *name.split()]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[name] = json.loads(done.stdout or "{}")
    return {name: found[name] for name in names}


def _line(name: str, found: dict[str, float]) -> list[str]:
    step = STEPS[name]
    figures = [f"{found['wall_s']:.1f}", f"{found['cpu_s']:.1f}", f"{found['peak_mb']:.0f}"]
    return [step.what, f"{step.rows:,}", *figures]


def _needed_by(wanted: str) -> list[str]:
    """Return a step and the steps before it in its folder."""
    names = [name for name, step in STEPS.items() if step.prepare is STEPS[wanted].prepare]
    return names[: names.index(wanted) + 1]


def _report(section: str) -> None:
    """Measure the steps of a section and write it."""
    found: dict[str, dict[str, float]] = {}
    for _, names in groupby(SECTIONS[section], key=lambda name: STEPS[name].prepare):
        found |= _measured(list(names))
    head = ["step", "rows", "wall s", "CPU s", "peak MB"]
    lines = [_line(name, figures) for name, figures in found.items()]
    write_section(f"Scale: {section}", f"python -m benchmarks.scale {section}", table(head, lines))


def main(arguments: Sequence[str]) -> None:
    """Measure all sections, one section, or one step."""
    match arguments:
        case ["--in", folder, "prepare", name]:
            STEPS[name].prepare(Path(folder))
        case ["--in", folder, name]:
            print(json.dumps(measure(name, Path(folder))))
        case [name] if name in STEPS:
            print(json.dumps(_measured(_needed_by(name)), indent=1))
        case _:
            for section in arguments or SECTIONS:
                _report(section)


if __name__ == "__main__":
    main(sys.argv[1:])
