"""Two workers of one thread against one, through the whole job, for each executor.

One worker has two cores at first, as the two have: what decodes, resamples and writes runs beside
its kernels, on the second. Then it has one core. Time counts from the first warm worker to the end,
the index written; the second worker gets warm within it.

    python -m benchmarks.workers [EXECUTOR ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

RATE_HZ, CLIP_S, CLIPS, VOICES = 16000, 20.0, 300, 8
SHARD_S = 100
EXECUTORS = ("local", "ray")
WANTED = 1.9


def write_corpus(folder: Path) -> None:
    """Distinct clips of a few voices."""
    folder.mkdir()
    voices = [speech(np.random.default_rng(n), RATE_HZ, CLIP_S) for n in range(VOICES)]
    for n in range(CLIPS):
        wave = np.roll(voices[n % VOICES], 1000 * n)
        wave = 0.05 * wave / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{n:03d}.flac", np.clip(wave, -1, 1), RATE_HZ)


def worked_s(root: Path, executor: str, workers: int, cores: int) -> float:
    """Seconds of a job with so many workers on the first so many cores."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        run = {"executor": executor, "workers": workers, "threads_per_worker": 1, "device": "cpu"}
        spec = {
            "source": {"kind": "files", "uri": str(root / "clips")},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": f"{folder}/out", "formats": ["zarr"], "shard_seconds": SHARD_S},
            "run": run,
        }
        job = Path(folder) / "job.yaml"
        job.write_text(json.dumps(spec))  # JSON is YAML
        command = [sys.executable, "-m", "earmill.jobs.cli", "extract", str(job), "--json"]
        mine = sorted(os.sched_getaffinity(0))
        try:
            os.sched_setaffinity(0, mine[:cores])  # inherited
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        finally:
            os.sched_setaffinity(0, mine)
        return float(json.loads(done.stdout.splitlines()[-1])["wall_s"])


def line(root: Path, executor: str) -> list[str]:
    """One on two cores, two, one on one core."""
    one, two, on_one = (worked_s(root, executor, *each) for each in ((1, 2), (2, 2), (1, 1)))
    seconds = [f"{each:.1f}" for each in (one, two, on_one)]
    return [executor, *seconds, f"{one / two:.2f}", f"{on_one / two:.2f}", f"{WANTED}"]


def main(executors: list[str]) -> None:
    """Measure each executor."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "clips")
        lines = [line(Path(folder), executor) for executor in executors or EXECUTORS]
    head = [
        "executor",
        "one, s",
        "two, s",
        "one on one core, s",
        "one / two",
        "on one core / two",
        "wanted",
    ]
    command = " ".join(["python -m benchmarks.workers", *executors])
    note = f"{CLIPS} clips of {CLIP_S:g} s, Dau1997, one thread a worker, shards of {SHARD_S} s."
    write_section("Two workers", command, f"{table(head, lines)}\n\n{note}")


if __name__ == "__main__":
    main(sys.argv[1:])
