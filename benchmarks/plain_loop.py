"""A log-mel job and a job of a small encoder beside the loop that one would write instead.

The loop has two processes, each with one thread: soundfile decodes, torchaudio or the encoder
computes, numpy saves a file a clip. The encoder's loop batches 8 clips. Both process the same FLAC
files by turns. Start-up is not counted: a job's time is from its first warm worker until the index
is written, and the loop's processes are warm before its clock starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.job import run_job, write_corpus
from benchmarks.report import table, write_section
from benchmarks.turn import ENCODER, ENCODER_JOB

FS_HZ, CLIPS, CLIP_S = 44100, 180, 20.0
N_FFT, HOP, N_MELS = 2048, 441, 80
PROCESSES, BATCH, TURNS = 2, 8, 3
JOBS: dict[str, dict[str, Any]] = {
    "log-mel": {
        "model": "melspectrogram",
        "fs_hz": FS_HZ,
        "params": {"n_fft": N_FFT, "hop_length": HOP, "n_mels": N_MELS},
    },
    "encoder": ENCODER_JOB | {"fs_hz": FS_HZ},
}


@cache
def _log_mel() -> Callable[[Any], Any]:
    import torch
    from torchaudio.transforms import MelSpectrogram

    torch.set_num_threads(1)
    mel = MelSpectrogram(FS_HZ, n_fft=N_FFT, hop_length=HOP, n_mels=N_MELS)
    return lambda waves: (mel(waves) + 1e-10).log()


@cache
def _encoder() -> Callable[[Any], Any]:
    import torch

    torch.set_num_threads(1)
    space: dict[str, Any] = {}
    exec(ENCODER, space)
    module = space["Encoder"]().eval()
    return lambda waves: module(waves[:, None])


def _save(name: str, paths: Sequence[Path], folder: Path) -> None:
    """Process some files as the plain loop does."""
    import torch

    made = _log_mel() if name == "log-mel" else _encoder()
    size = 1 if name == "log-mel" else BATCH
    with torch.inference_mode():
        for at in range(0, len(paths), size):
            some = paths[at : at + size]
            waves = [soundfile.read(path, dtype="float32")[0] for path in some]
            found = made(torch.from_numpy(np.stack(waves))).numpy().astype(np.float16)
            for path, values in zip(some, found, strict=True):
                np.save(folder / f"{path.stem}.npy", values)


def loop_s(name: str, corpus: Path, folder: Path) -> float:
    """Return the seconds of the plain loop, once its processes are warm."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    paths = sorted(corpus.glob("*.flac"))
    parts = [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]
    with get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(_save, [(name, paths[:BATCH], folder)] * (2 * PROCESSES), chunksize=1)
        begin = time.perf_counter()
        pool.starmap(_save, [(name, part, folder) for part in parts], chunksize=1)
        return time.perf_counter() - begin


def job_s(name: str, corpus: Path, root: Path) -> float:
    """Return the seconds of the job from its first warm worker to the index."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    spec = {
        "source": {"kind": "files", "uri": str(corpus)},
        "extract": [JOBS[name]],
        "run": {"executor": "local"},
    }
    events, _ = run_job(root, spec)
    return events["summary"]["at_s"] - events["workers_ready"]["at_s"]


def main() -> None:
    """Measure by turns and write the section."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        corpus, root = Path(place) / "corpus", Path(place)
        write_corpus(corpus, FS_HZ)
        (root / "small_encoder.py").write_text(ENCODER)
        os.environ["PYTHONPATH"] = os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])
        for name in JOBS:
            turns = [
                (loop_s(name, corpus, root / "loop"), job_s(name, corpus, root / "job"))
                for _ in range(TURNS)
            ]
            loop, job = (CLIPS * CLIP_S / min(each[side] for each in turns) for side in (0, 1))
            rows.append((name, f"{loop:.0f}", f"{job:.0f}", f"{job / loop:.2f}"))
    note = (
        f"{CLIPS} FLAC files of {CLIP_S:g} s at {FS_HZ} Hz; seconds of audio per second, the best "
        f"of {TURNS} turns. Loop: {PROCESSES} processes of one thread, soundfile, torchaudio "
        f"({N_MELS} bands) or the encoder on {BATCH} clips, float16, numpy.save."
    )
    head = ("features", "plain loop", "job", "job / loop")
    write_section(
        "Beside a plain loop", "python -m benchmarks.plain_loop", f"{note}\n\n{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
