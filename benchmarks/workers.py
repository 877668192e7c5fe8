"""Two workers of one thread against one, through the whole job, for each executor.

The job with two runs between two jobs with one, and their mean is divided by it. Time counts from
the first warm worker to the end, the index written.

    python -m benchmarks.workers [EXECUTOR ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

RATE_HZ, CLIP_S, CLIPS, VOICES = 16000, 20.0, 100, 8
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


def worked_s(root: Path, executor: str, workers: int) -> float:
    """Seconds of a job with so many workers."""
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
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return float(json.loads(done.stdout.splitlines()[-1])["wall_s"])


def line(root: Path, executor: str) -> list[str]:
    """One, two, one."""
    before, two, after = (worked_s(root, executor, workers) for workers in (1, 2, 1))
    times = f"{(before + after) / 2 / two:.2f}"
    return [executor, f"{before:.1f}", f"{two:.1f}", f"{after:.1f}", times, f"{WANTED}"]


def main(executors: list[str]) -> None:
    """Measure each executor."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "clips")
        lines = [line(Path(folder), executor) for executor in executors or EXECUTORS]
    head = ["executor", "one, s", "two, s", "one again, s", "one / two", "wanted"]
    command = " ".join(["python -m benchmarks.workers", *executors])
    note = f"{CLIPS} clips of {CLIP_S:g} s, Dau1997, one thread a worker, shards of {SHARD_S} s."
    write_section("Two workers", command, f"{table(head, lines)}\n\n{note}")


if __name__ == "__main__":
    main(sys.argv[1:])
