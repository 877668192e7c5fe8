"""Rate of the whole job against the bare kernel: generated FLAC to committed float16 Zarr.

The speed of a machine drifts by more than the effects to be measured. So for each sample rate of
the files the bare kernel and the job take turns. The kernel runs in this process on the same audio,
decoded and resampled in memory. Each job's rate is divided by the mean of the kernel's rates right
before and after it; the result is the median. The table also has the CPU time of other processes,
and the rates in the time left, which are the ones to compare on a busy machine. The job reports its
CPU time by part. The memory of every process of the last job is sampled, which costs a little time.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import soundfile
import soxr

from amtcore.features.registry import build_extractor
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

MODEL_FS_HZ = 44100
CLIP_S = 20.0
HOUR_CLIPS = 180
VOICES = 12
# Calls are long, so that the wait of a thread at the end of a call does not matter.
KERNEL_BATCH = 60
JOBS = 3
SAMPLE_EVERY_S = 0.25
# Listing the job's processes costs more than reading their memory.
PROCESSES_EVERY_S = 2.0
# Sample rates of the files, and hours of audio.
TARGETS = {(16000, 1): 0.85, (44100, 1): 0.80}
# CPU seconds of the other parts per CPU second of the model.
BESIDE_MODEL = 0.25
_HEAD = (
    "files", "kernel", "job", "job / kernel", "lowest to highest", "in the time left", "wanted",
    "kernel CPU ms", "start-up",
)  # fmt: skip
_TURNS_HEAD = ("files", *("kernel", "job") * JOBS, "kernel")


@dataclass
class Memory:
    """Resident memory of one process over the run in MB, and the time of each value."""

    name: str
    at_s: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)

    def summary(self, begin_s: float) -> tuple[str, ...]:
        """Return the peaks of the second and the last quarter of the work, and their ratio."""
        work = [mb for at, mb in zip(self.at_s, self.mb, strict=True) if at >= begin_s]
        quarter = max(1, len(work) // 4)
        second, last = max(work[quarter : 2 * quarter]), max(work[-quarter:])
        return self.name, f"{second:.0f}", f"{last:.0f}", f"{last / second:.2f}"


def write_corpus(folder: Path, rate_hz: int, hours: int = 1) -> None:
    """Write hours of distinct clips: a few voices, shifted and scaled."""
    folder.mkdir(parents=True)
    voices = [speech(np.random.default_rng(i), rate_hz, CLIP_S) for i in range(VOICES)]
    for i in range(hours * HOUR_CLIPS):
        rng = np.random.default_rng([rate_hz, i])
        wave = np.roll(voices[i % VOICES], int(rng.integers(len(voices[0]))))
        wave = 0.05 * rng.uniform(0.5, 1.5) * wave / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{i:04d}.flac", np.clip(wave, -1, 1), rate_hz)


class Kernel:
    """The bare model on two threads, warm.

    Attributes:
        runs: All runs so far.
        cpu_ms: CPU time of each run per second of audio.
    """

    def __init__(self) -> None:
        self._extractor = build_extractor("dau1997", fs_hz=MODEL_FS_HZ, threads=2)
        self._extractor.extract([np.zeros(MODEL_FS_HZ, np.float32)])
        self.runs: list[Run] = []
        self.cpu_ms: list[float] = []

    def run(self, folder: Path) -> None:
        """Run the whole corpus once; decoding and resampling are not timed."""
        paths, wall_s, cpu_s, all_s = sorted(folder.glob("*.flac")), 0.0, 0.0, 0.0
        for i in range(0, len(paths), KERNEL_BATCH):
            clips = []
            for path in paths[i : i + KERNEL_BATCH]:
                wave, rate_hz = soundfile.read(path, dtype="float32")
                clips.append(soxr.resample(wave, rate_hz, MODEL_FS_HZ))
            busy_s, began_s, cpu_before_s = busy(), time.perf_counter(), time.process_time()
            self._extractor.extract(clips)
            wall_s += time.perf_counter() - began_s
            cpu_s += time.process_time() - cpu_before_s
            all_s += busy() - busy_s
        self.runs.append(Run(wall_s, all_s - cpu_s, len(paths) * CLIP_S))
        self.cpu_ms.append(1000 * cpu_s / self.runs[-1].seconds)


@dataclass(frozen=True)
class Run:
    """One run over the whole corpus: times, CPU seconds of other processes, seconds of audio."""

    wall_s: float
    others_s: float
    seconds: float

    @property
    def rate(self) -> float:
        """Seconds of audio per second."""
        return self.seconds / self.wall_s

    @property
    def rate_left(self) -> float:
        """Seconds of audio per second that other processes left."""
        return self.seconds / (self.wall_s * (1 - self.others))

    @property
    def others(self) -> float:
        """Share of all cores used by other processes; at least 0, because clocks are coarse."""
        return max(0.0, self.others_s / self.wall_s / (os.cpu_count() or 1))

    def __str__(self) -> str:
        return f"{self.rate:.0f} ({self.others:.0%})"


def busy() -> float:
    """Return the CPU seconds of all processes since the machine was started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


def run_job(
    root: Path,
    spec: dict,
    *,
    observed: bool = False,
    shards: Mapping[str, float] = MappingProxyType({"shard_seconds": 300}),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict], list[Memory]]:
    """Run the command line in a process of its own; the output goes to `root`.

    Returns its last event of each kind with its time and the machine's CPU time, and the memory of
    each process if `observed`. The package is the one that `python` imports.
    """
    output = {"uri": str(root / "out"), "formats": ["zarr"], **shards}
    spec, job = {**spec, "output": output}, root / "job.yaml"
    job.write_text(json.dumps(spec))  # JSON is YAML
    command = [python, str(Path(python).with_name("earmill")), "extract", str(job), "--json"]
    begin = time.perf_counter()
    events: dict[str, dict] = {}
    over = threading.Event()
    options: Any = {"env": {**os.environ, **(environment or {})}, "cwd": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        observer = Observer(process.pid)

        def watch() -> None:
            while not over.wait(SAMPLE_EVERY_S):
                observer.sample(time.perf_counter() - begin)

        watcher = threading.Thread(target=watch)
        if observed:
            watcher.start()
        for line in process.stdout:
            event = json.loads(line)
            at_s = time.perf_counter() - begin
            events[event["event"]] = event | {"at_s": at_s, "busy_s": busy()}
        over.set()
        if observed:
            watcher.join()
    if process.returncode:
        raise SystemExit(f"the job ended with exit code {process.returncode}: {events}")
    return events, list(observer.memory.values())


def cpu_table(of_files: dict[str, dict]) -> str:
    """Return CPU milliseconds per second of audio by part, a column for each kind of file."""
    costs = {
        name: {part: 1000 * s / end["seconds"] for part, s in end["cpu_s"].items()}
        for name, end in of_files.items()
    }
    parts = dict.fromkeys(part for cost in costs.values() for part in cost)
    rows = [(part, *(f"{cost.get(part, 0.0):.3f}" for cost in costs.values())) for part in parts]
    beside = [
        (sum(cost.values()) - cost["model"] - cost["idle"]) / cost["model"]
        for cost in costs.values()
    ]
    rows.append(("all but model and idle, of model", *(f"{share:.0%}" for share in beside)))
    return table(("CPU ms per second of audio", *costs), rows)


class Observer:
    """Samples the memory of a process and its descendants.

    Args:
        pid: Id of the process.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._known: list[psutil.Process] = []
        self._looked_s = -PROCESSES_EVERY_S
        self.memory: dict[int, Memory] = {}

    def sample(self, now_s: float) -> None:
        """Record the memory of each process."""
        try:
            if now_s - self._looked_s >= PROCESSES_EVERY_S:
                self._known = [self._root, *self._root.children(recursive=True)]
                self._looked_s = now_s
        except psutil.NoSuchProcess:
            return
        for process in self._known:
            try:
                used = process.memory_info().rss / 2**20
                if process.pid not in self.memory:
                    name = " ".join(process.cmdline()[:1])[-40:] or process.name()
                    self.memory[process.pid] = Memory(name.rsplit("/", 1)[-1])
            except psutil.Error:
                continue
            entry = self.memory[process.pid]
            entry.at_s.append(now_s)
            entry.mb.append(used)


@dataclass
class Measured:
    """The turns with files of one sample rate.

    Args:
        rate_hz: Sample rate of the files.
        hours: Hours of audio.
    """

    rate_hz: int
    hours: int
    kernel: Kernel = field(default_factory=Kernel)
    jobs: list[Run] = field(default_factory=list)
    ends: list[dict] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def job(self, corpus: Path, *, observed: bool) -> None:
        """Run the job once."""
        spec = {
            "source": {"kind": "files", "uri": str(corpus)},
            "extract": [{"model": "dau1997", "fs_hz": MODEL_FS_HZ}],
        }
        with tempfile.TemporaryDirectory() as folder:
            events, self.memory = run_job(Path(folder), spec, observed=observed)
        ready, end = events["workers_ready"], events["summary"]
        # The job's CPU time ends with its last commit, so the others' time ends there too.
        spent_s = sum(end["cpu_s"].values()) - end["cpu_s"]["idle"]
        others_s = events["shard_done"]["busy_s"] - ready["busy_s"] - spent_s
        self.jobs.append(Run(end["at_s"] - ready["at_s"], others_s, end["seconds"]))
        self.ends.append(end)
        self.start_s.append(ready["at_s"])

    def ratios(self, rate: Callable[[Run], float]) -> list[float]:
        """Return the ratios of each job's rate to the kernel's mean rate before and after it."""
        around = [(rate(a) + rate(b)) / 2 for a, b in pairwise(self.kernel.runs)]
        return [rate(job) / kernel for job, kernel in zip(self.jobs, around, strict=True)]

    @property
    def end(self) -> dict:
        """Last events with the median CPU time of each part."""
        cpus = [end["cpu_s"] for end in self.ends]
        return {
            "seconds": self.ends[0]["seconds"],
            "cpu_s": {part: statistics.median(cpu[part] for cpu in cpus) for part in cpus[0]},
        }

    @property
    def name(self) -> str:
        """Name of the files."""
        return f"{self.rate_hz} Hz, {self.hours} h"

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        median, kernel = statistics.median, self.kernel
        ratios = self.ratios(lambda run: run.rate)
        return (
            self.name, f"{median(run.rate for run in kernel.runs):.0f}",
            f"{median(run.rate for run in self.jobs):.0f}", f"{median(ratios):.1%}",
            f"{min(ratios):.1%} to {max(ratios):.1%}",
            f"{median(self.ratios(lambda run: run.rate_left)):.1%}",
            f"{TARGETS[self.rate_hz, self.hours]:.0%}",
            f"{median(kernel.cpu_ms):.3f}", f"{median(self.start_s):.1f} s",
        )  # fmt: skip

    def turns(self) -> tuple[str, ...]:
        """Return all runs in their order."""
        first, *others = self.kernel.runs
        pairs = zip(self.jobs, others, strict=True)
        return (self.name, str(first), *(str(run) for pair in pairs for run in pair))

    def memory_table(self) -> str:
        """Return the memory of the last job as a table."""
        ready_s = self.start_s[-1]
        kept = [each for each in self.memory if max(each.at_s) - ready_s > 5 and len(each.mb) > 16]
        head = ("process", "second quarter", "last quarter", "last / second")
        return (
            f"Resident memory in MB, {self.name}, highest value of a quarter of the work:\n\n"
            + table(head, [entry.summary(ready_s) for entry in kept])
        )


def measure(rate_hz: int, hours: int) -> Measured:
    """Run kernel and job by turns."""
    measured = Measured(rate_hz, hours)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus, rate_hz, hours)
        measured.kernel.run(corpus)
        for k in range(JOBS):
            measured.job(corpus, observed=k == JOBS - 1)
            measured.kernel.run(corpus)
    return measured


def main() -> None:
    """Measure all and write the section."""
    made = [measure(*files) for files in TARGETS]
    intro = (
        f"Clips of {CLIP_S:g} s of generated speech, Dau1997 at {MODEL_FS_HZ} Hz pooled to "
        "100 Hz, float16 Zarr. Rates are seconds of audio per second on two cores; the job's "
        "starts when the first worker is warm and ends after the index is written. Kernel and job "
        f"took turns, {JOBS} jobs for each rate of the files; each job is compared with the mean "
        "of the kernel right before and right after it. The kernel has "
        f"{KERNEL_BATCH * CLIP_S / 60:g} min of audio a call, so that its threads hardly wait for "
        "each other. Figures are medians. CPU ms are per second of audio."
    )
    turns = (
        "Every run in its order, and the share of the cores that other processes had meanwhile, "
        "kernel threads of the system among them. In the time left: rates as if these had not run."
    )
    costs = (
        "Where the job's CPU time went, by its own counters (`cpu_s` of its summary), up to the "
        f"last commit. Wanted: everything but the model at most {BESIDE_MODEL:.0%} of the model."
    )
    body = "\n\n".join(
        [
            intro,
            table(_HEAD, [each.row() for each in made]),
            turns,
            table(_TURNS_HEAD, [each.turns() for each in made]),
            costs,
            cpu_table({each.name: each.end for each in made}),
            *(each.memory_table() for each in made),
        ]
    )
    # An argument names another machine; its section stands beside the section that docs cite.
    command = shlex.join(["python", "-m", "benchmarks.job", *sys.argv[1:]])
    write_section(", ".join(["The whole job", *sys.argv[1:]]), command, body)


if __name__ == "__main__":
    main()
