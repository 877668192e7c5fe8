"""CPU time of a job of eight models, by part and by model, as the job's own records have it.

The job makes one pass over generated speech in FLAC, to Zarr, and runs once, uninterrupted. A test,
`tests.chaos.test_eight_models`, kills and resumes a job of these models. Commit records have the
CPU seconds of their shard by part and by model. The summary has the CPU seconds of the whole run.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.job import run_job
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import RMS, speech
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.storage.layout import Layout
from tests.chaos.test_eight_models import MODELS

CLIPS, CLIP_S, RATE_HZ = 15, 20.0, 44100


def write_corpus(folder: Path) -> None:
    """Write distinct clips of generated speech."""
    folder.mkdir()
    for number in range(CLIPS):
        wave = speech(np.random.default_rng([8, number]), RATE_HZ, CLIP_S)
        wave *= RMS / np.sqrt(np.mean(wave**2))
        soundfile.write(folder / f"{number:02d}.flac", np.clip(wave, -1, 1), RATE_HZ)


def main() -> None:
    """Run the job and write the section."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus)
        spec = {
            "source": {"kind": "files", "uri": str(corpus)},
            "extract": MODELS,
            "run": {"executor": "local", "workers": 1},
        }
        events, _ = run_job(Path(folder), spec)
        records = commits(Layout.open(str(Path(folder) / "out"))).values()
        by_model = Counter[str]()
        for record in records:
            by_model.update(record.info["model_cpu_s"])
        stored = sum(record.nbytes for record in records)
    end = events["summary"]
    spent, audio_s = end["cpu_s"], end["seconds"]
    whole = sum(spent.values()) - spent["idle"]

    def row(name: str, seconds: float) -> tuple[str, str, str]:
        return name, f"{1000 * seconds / audio_s:.2f}", f"{seconds / whole:.1%}"

    rows = []
    for part, seconds in spent.items():
        if part != "idle":
            rows.append(row(part, seconds))
        if part == "model":
            rows += [row(f"model: {name}", s) for name, s in by_model.most_common()]
    rows.append(row("all but idle", whole))
    note = (
        f"{CLIPS} clips of {CLIP_S:g} s of generated speech, FLAC at {RATE_HZ} Hz, one pass of "
        f"{len(MODELS)} models to float16 Zarr, {stored / audio_s / 1000:.0f} kB per second of "
        "audio. CPU time of the workers after their warm-up, and of the driver, by the "
        "summary of the job; by model, by its commit records. Threads of kernels count for the "
        "model that calls the kernel."
    )
    head = ("part", "CPU ms per second of audio", "share")
    command = "python -m benchmarks.eight_models"
    write_section("Eight models in one pass", command, f"{note}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
