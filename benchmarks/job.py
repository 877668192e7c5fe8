"""The whole job against the bare kernel: an hour of generated FLAC, decoded to committed fp16 Zarr.

For each sampling rate of the files the bare kernel runs on the same audio in this process (already
decoded and resampled, in memory) right before and right after the job, and the job's rate is
divided by the mean of the two. Where the job's CPU time went is what it says itself. The memory of
every process of the job is sampled all along.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import soundfile
import soxr

from amtcore.features.build import build_extractor
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

MODEL_FS_HZ = 44100
CLIP_S = 20.0
CLIPS = 180
VOICES = 12
KERNEL_BATCH = 10
SAMPLE_EVERY_S = 0.25
# Looking for the job's processes costs more than reading their memory.
PROCESSES_EVERY_S = 2.0
TARGETS = {16000: 0.85, 44100: 0.80}
# CPU seconds of everything but the model, for each of the model's.
BESIDE_MODEL = 0.25
_HEAD = ("files", "kernel before", "job", "kernel after", "job / kernel", "wanted", "start-up")


@dataclass
class Memory:
    """Resident memory of one process over the run, in MB, and when each value was read."""

    name: str
    at_s: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)

    def summary(self, begin_s: float) -> tuple[str, ...]:
        """Highest of the second and of the last quarter of the work, and their ratio."""
        work = [mb for at, mb in zip(self.at_s, self.mb, strict=True) if at >= begin_s]
        quarter = max(1, len(work) // 4)
        second, last = max(work[quarter : 2 * quarter]), max(work[-quarter:])
        return self.name, f"{second:.0f}", f"{last:.0f}", f"{last / second:.2f}"


def write_corpus(folder: Path, rate_hz: int) -> None:
    """An hour of distinct clips: a few voices, shifted and scaled."""
    folder.mkdir(parents=True)
    voices = [speech(np.random.default_rng(i), rate_hz, CLIP_S) for i in range(VOICES)]
    for i in range(CLIPS):
        rng = np.random.default_rng([rate_hz, i])
        wave = np.roll(voices[i % VOICES], int(rng.integers(len(voices[0]))))
        wave = 0.05 * rng.uniform(0.5, 1.5) * wave / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{i:03d}.flac", np.clip(wave, -1, 1), rate_hz)


def kernel_seconds(folder: Path) -> float:
    """Time of the bare kernel over the whole corpus; decoding and resampling are not timed."""
    extractor = build_extractor("dau1997", fs_hz=MODEL_FS_HZ, threads=2)
    extractor.extract([np.zeros(MODEL_FS_HZ, np.float32)])
    paths, total = sorted(folder.glob("*.flac")), 0.0
    for i in range(0, len(paths), KERNEL_BATCH):
        clips = []
        for path in paths[i : i + KERNEL_BATCH]:
            wave, rate_hz = soundfile.read(path, dtype="float32")
            clips.append(soxr.resample(wave, rate_hz, MODEL_FS_HZ))
        begin = time.perf_counter()
        extractor.extract(clips)
        total += time.perf_counter() - begin
    return total


def run_job(root: Path, spec: dict) -> tuple[dict[str, dict], list[Memory]]:
    """Run the command line in a process of its own; the output goes to `root`.

    Returns its last event of each kind, with when it came, and the memory of each process.
    """
    output = {"uri": str(root / "out"), "formats": ["zarr"], "shard_seconds": 300}
    spec, job = {**spec, "output": output}, root / "job.yaml"
    job.write_text(json.dumps(spec))  # JSON is YAML
    command = [sys.executable, "-m", "earmill.jobs.cli", "extract", str(job), "--json"]
    begin = time.perf_counter()
    events: dict[str, dict] = {}
    over = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        observer = Observer(process.pid)

        def watch() -> None:
            while not over.wait(SAMPLE_EVERY_S):
                observer.sample(time.perf_counter() - begin)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for line in process.stdout:
            event = json.loads(line)
            events[event["event"]] = event | {"at_s": time.perf_counter() - begin}
        over.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"the job ended with exit code {process.returncode}: {events}")
    return events, list(observer.memory.values())


def cpu_table(of_rates: dict[int, dict]) -> str:
    """CPU milliseconds per second of audio by part, a column for each rate of the files."""
    costs = {
        f"{rate_hz} Hz": {part: 1000 * s / end["seconds"] for part, s in end["cpu_s"].items()}
        for rate_hz, end in of_rates.items()
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
    """Samples the memory of a process and of all below it.

    Args:
        pid: Of the process.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._known: list[psutil.Process] = []
        self._looked_s = -PROCESSES_EVERY_S
        self.memory: dict[int, Memory] = {}

    def sample(self, now_s: float) -> None:
        """Note what each process has now."""
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


def main() -> None:
    """Measure both rates and write the section."""
    rows, details, ends = [], [], {}
    for rate_hz, wanted in TARGETS.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_corpus(root / "corpus", rate_hz)
            seconds = CLIPS * CLIP_S
            before = seconds / kernel_seconds(root / "corpus")
            spec = {
                "source": {"kind": "files", "uri": str(root / "corpus")},
                "extract": [{"model": "dau1997", "fs_hz": MODEL_FS_HZ}],
            }
            events, memory = run_job(root, spec)
            after = seconds / kernel_seconds(root / "corpus")
        ends[rate_hz], ready = events["summary"], events["workers_ready"]["at_s"]
        job = seconds / (ends[rate_hz]["at_s"] - ready)
        ratio = job / ((before + after) / 2)
        rows.append(
            (f"{rate_hz} Hz", f"{before:.0f}", f"{job:.0f}", f"{after:.0f}", f"{ratio:.0%}",
             f"{wanted:.0%}", f"{ready:.1f} s")
        )  # fmt: skip
        kept = [entry for entry in memory if max(entry.at_s) - ready > 5 and len(entry.mb) > 16]
        details.append(
            f"Resident memory in MB, files of {rate_hz} Hz, highest value of a quarter of the "
            "work:\n\n"
            + table(
                ("process", "second quarter", "last quarter", "last / second"),
                [entry.summary(ready) for entry in kept],
            )
        )
    intro = (
        f"{CLIPS} clips of {CLIP_S:g} s of generated speech, Dau1997 at {MODEL_FS_HZ} Hz pooled "
        "to 100 Hz, float16 Zarr. Rates are seconds of audio per second on two cores; the job's "
        "starts when the first worker is warm and ends after the index is written."
    )
    costs = (
        "Where the job's CPU time went, by its own counters (`cpu_s` of its summary), up to the "
        f"last commit. Wanted: everything but the model at most {BESIDE_MODEL:.0%} of the model."
    )
    body = "\n\n".join([intro, table(_HEAD, rows), costs, cpu_table(ends), *details])
    write_section("The whole job", "python -m benchmarks.job", body)


if __name__ == "__main__":
    main()
