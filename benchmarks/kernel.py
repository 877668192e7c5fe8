"""Clips and timing for benchmarks of models alone: the best of several runs of one process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from earmill.jobs.demo_audio import speech

FS_HZ = 44100
CLIP_S = 10.0
BATCH = 10
# Seconds of audio for plain loops in torch, which take minutes for a whole clip.
LOOP_S = 0.02


@functools.cache
def clips_of(kind: str) -> list[np.ndarray]:
    """Return a batch of speech-like or noise clips at 74 dB SPL, if RMS 1 is 100 dB SPL."""
    clips = []
    for seed in range(BATCH):
        rng = np.random.default_rng(seed)
        if kind == "speech":
            wave = speech(rng, FS_HZ, CLIP_S)
        else:
            wave = rng.standard_normal(int(FS_HZ * CLIP_S))
        clips.append((0.05 * wave / np.sqrt(np.mean(wave**2))).astype(np.float32))
    return clips


def rate_of(run: Callable[[], object], seconds: float, repeats: int = 5) -> float:
    """Return seconds of audio per second, the best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return seconds / best
