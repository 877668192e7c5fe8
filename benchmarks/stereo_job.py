"""A job of stereo audio with Moore2016, compared with the bare model in the same run.

Between the jobs the bare model runs on the same clips (decoded and resampled in memory) with the
same number of threads. Ways to share two cores take turns on eight minutes; then one job runs on an
hour.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from amtcore.features.registry import build_extractor
from benchmarks.job import BESIDE_MODEL, cpu_table, run_job
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

MODEL_FS_HZ, RATE_HZ = 32000, 44100
CLIP_S, CLIPS = 20.0, 180
#: Clips of eight minutes, for the turns.
FEW = 24
VOICES, TURNS, WANTED = 8, 2, 45
_HEAD = ("audio", "executor", "workers x threads", "job", "bare model", "job / model", "wanted",
         "CPU ms per second of audio", "of that the model", "start-up")  # fmt: skip


@dataclass(frozen=True)
class Way:
    """Workers and threads of a job; None lets the job choose."""

    executor: str
    workers: int | None = None
    threads: int | None = None

    def spec(self, corpus: Path) -> dict[str, Any]:
        """Return the job file for a corpus."""
        return {
            "source": {"kind": "files", "uri": str(corpus)},
            "audio": {"channels": "binaural"},
            "extract": [{"model": "moore2016"}],
            "run": {
                "executor": self.executor,
                "workers": self.workers,
                "threads_per_worker": self.threads,
            },
        }

    @property
    def cores(self) -> str:
        """Workers and threads as text of the table."""
        return "its choice" if self.workers is None else f"{self.workers} x {self.threads}"


CHOSEN = Way("local")
WAYS = (Way("local", 1, 2), Way("local", 2, 1))


@dataclass
class Measured:
    """Runs of one way."""

    rates: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Write clips with a voice at each ear; return the folders of all clips and of some."""
    every, few = folder / "every", folder / "few"
    every.mkdir()
    few.mkdir()
    voices = [speech(np.random.default_rng(i), RATE_HZ, CLIP_S) for i in range(VOICES)]
    voices = [0.05 * voice / np.sqrt(np.mean(voice**2)) for voice in voices]
    for i in range(CLIPS):
        rng = np.random.default_rng(i)
        first, other = (np.roll(voices[k], rng.integers(1, len(voices[k])))
                        for k in rng.choice(VOICES, 2, replace=False))  # fmt: skip
        left, right = first + 0.3 * other, 0.5 * np.roll(first, 12) + other
        path = every / f"{i:03d}.flac"
        soundfile.write(path, np.clip(np.stack((left, right), 1), -1, 1), RATE_HZ)
        if i < FEW:
            os.link(path, few / path.name)
    return every, few


def bare_rate(folder: Path) -> float:
    """Return seconds of audio per second; decoding and resampling are not timed."""
    extractor = build_extractor("moore2016", threads=2)
    extractor.extract([np.zeros((2, MODEL_FS_HZ), np.float32)])
    total = 0.0
    paths = sorted(folder.glob("*.flac"))
    for path in paths:
        wave, rate_hz = soundfile.read(path, dtype="float32")
        clip = np.ascontiguousarray(soxr.resample(wave, rate_hz, MODEL_FS_HZ).T)
        begin = time.perf_counter()
        extractor.extract([clip])
        total += time.perf_counter() - begin
    return len(paths) * CLIP_S / total


def measure(way: Way, corpus: Path, seconds: float, into: Measured) -> None:
    """Run one job and add its figures to `into`."""
    with tempfile.TemporaryDirectory() as folder:
        events, _ = run_job(Path(folder), way.spec(corpus))
    ready, into.end = events["workers_ready"]["at_s"], events["summary"]
    into.rates.append(seconds / (into.end["at_s"] - ready))
    into.ready_s.append(ready)


def _row(audio: str, way: Way, made: Measured, bare: float, wanted: str) -> tuple[str, ...]:
    cpu, seconds = made.end["cpu_s"], made.end["seconds"]
    busy = sum(cpu.values()) - cpu["idle"]
    rates = " and ".join(f"{rate:.1f}" for rate in made.rates)
    return (
        audio, way.executor, way.cores, rates, f"{bare:.1f}", f"{np.mean(made.rates) / bare:.0%}",
        wanted, f"{1e3 * busy / seconds:.1f}", f"{1e3 * cpu['model'] / seconds:.1f}",
        f"{np.mean(made.ready_s):.1f} s",
    )  # fmt: skip


def main() -> None:
    """Measure and write the section."""
    made, bare = {way: Measured() for way in (*WAYS, Way("ray"))}, []
    hour = Measured()
    with tempfile.TemporaryDirectory() as folder:
        every, few = write_corpus(Path(folder))
        for _ in range(TURNS):
            bare.append(bare_rate(few))
            for way in WAYS:
                measure(way, few, FEW * CLIP_S, made[way])
        measure(Way("ray"), few, FEW * CLIP_S, made[Way("ray")])
        measure(CHOSEN, every, CLIPS * CLIP_S, hour)
        bare.append(bare_rate(few))
    mean = float(np.mean(bare))
    rows = [_row("8 min", way, runs, mean, "") for way, runs in made.items()]
    rows.append(_row("60 min", CHOSEN, hour, mean, f"{WANTED}"))
    intro = (
        f"Clips of {CLIP_S:g} s, two ears that hear two voices at different levels, stereo FLAC at "
        f"{RATE_HZ} Hz, Moore2016 at {MODEL_FS_HZ} Hz: short-term and long-term loudness every ms, "
        "float16 Zarr. Rates are seconds of audio per second on two cores, the job's from the "
        "first warm worker until the index is written. The bare model has two threads and ran "
        f"between the jobs: {', '.join(f'{rate:.1f}' for rate in bare)}."
    )
    costs = (
        "Where the CPU time of the job of an hour went, by its own counters. Everything but the "
        f"model is wanted to be at most {BESIDE_MODEL:.0%} of it."
    )
    body = "\n\n".join([intro, table(_HEAD, rows), costs, cpu_table({f"{RATE_HZ} Hz": hour.end})])
    write_section("A stereo job", "python -m benchmarks.stereo_job", body)


if __name__ == "__main__":
    main()
