"""Two workers of one thread against one, through the whole job, for each executor.

One worker first has two cores: its kernels use one, and decoding, resampling and writing use the
other. Two workers can only use the time that one worker leaves idle, so the bound is two cores
divided by the busy cores of one worker. Then one worker has one core, as each of the two. Time
counts from the first warm worker to the written index, and includes the warm-up of the second.

    python -m benchmarks.workers [EXECUTOR ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.cores import on_cores
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech
from earmill.pipeline.common.monitoring import IDLE

RATE_HZ, CLIP_S, CLIPS, VOICES = 16000, 20.0, 800, 8
SHARD_S = 100
EXECUTORS = ("local", "ray")
CORES = 2
WANTED = 1.9


@dataclass(frozen=True)
class Run:
    """Wall and CPU seconds of a job, its driver included."""

    wall_s: float
    cpu_s: float

    @property
    def cores(self) -> float:
        """Number of busy cores."""
        return self.cpu_s / self.wall_s


def write_corpus(folder: Path) -> None:
    """Write distinct clips of a few voices."""
    folder.mkdir()
    voices = [speech(np.random.default_rng(n), RATE_HZ, CLIP_S) for n in range(VOICES)]
    for n in range(CLIPS):
        wave = np.roll(voices[n % VOICES], 1000 * n)
        wave = 0.05 * wave / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{n:03d}.flac", np.clip(wave, -1, 1), RATE_HZ)


def run_of(root: Path, executor: str, workers: int, cores: int) -> Run:
    """Run a job with `workers` workers on the first `cores` cores."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        run = {"executor": executor, "workers": workers, "threads_per_worker": 1, "device": "cpu"}
        spec = {
            "source": {"kind": "files", "uri": str(root / "clips")},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": f"{folder}/out", "formats": ["zarr"], "shard_seconds": SHARD_S},
            "run": run,
        }
        end = summary_of(spec, Path(folder) / "job.yaml", cores)
        return Run(end["wall_s"], sum(s for part, s in end["cpu_s"].items() if part != IDLE))


def summary_of(spec: dict[str, Any], job: Path, cores: int) -> dict[str, Any]:
    """Run a job, written to `job`, on the first `cores` cores; return its last event."""
    job.write_text(json.dumps(spec))  # JSON is YAML
    command = [sys.executable, "-m", "earmill.jobs.start", "extract", str(job), "--json"]
    with on_cores(cores):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(root: Path, executor: str) -> list[str]:
    """Return the line: one worker on two cores, two workers, one worker on one core."""
    one, two, on_one = (run_of(root, executor, *each) for each in ((1, CORES), (2, CORES), (1, 1)))
    cells = [f"{each.wall_s:.1f} ({each.cores:.2f})" for each in (one, two, on_one)]
    ratios = (one.wall_s / two.wall_s, CORES / one.cores, on_one.wall_s / two.wall_s)
    return [executor, *cells, *(f"{ratio:.2f}" for ratio in ratios), f"{WANTED}"]


def main(executors: list[str]) -> None:
    """Measure each executor."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "clips")
        lines = [line(Path(folder), executor) for executor in executors or EXECUTORS]
    head = [
        "executor",
        "one, s (cores busy)",
        "two",
        "one on one core",
        "one / two",
        "its bound",
        "on one core / two",
        "wanted",
    ]
    command = " ".join(["python -m benchmarks.workers", *executors])
    note = (
        f"{CLIPS} clips of {CLIP_S:g} s, Dau1997, one thread a worker, shards of {SHARD_S} s. The "
        "bound of one / two is what two cores hold of those that one worker keeps busy: it decodes "
        "beside its kernel where a core is idle. With a core each, as machines of a cluster have "
        "it, workers compare as in the column behind."
    )
    write_section("Two workers", command, f"{table(head, lines)}\n\n{note}")


if __name__ == "__main__":
    main(sys.argv[1:])
