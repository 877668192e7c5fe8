"""Speed of Dau1997 alone, in seconds of audio per second: fused extraction, full rate, loops.

Times are the best of several runs of one process; the plain loop runs once, on a short clip.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from amtcore import Dau1997, set_num_threads
from amtcore.features.build import build_extractor
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

FS_HZ = 44100
CLIP_S = 10.0
BATCH = 10
LOOP_S = 0.02
_HEAD = ("what", "threads", "seconds of audio per second", "against the plain loop")


@functools.cache
def clips_of(kind: str) -> list[np.ndarray]:
    """A batch of speech-like or noise clips at 74 dB SPL, where RMS 1 is 100 dB SPL."""
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
    """Seconds of audio per second of time, the best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return seconds / best


def _plain_loop_rate() -> float:
    model = Dau1997(FS_HZ)
    for stage in (model.filterbank, model.ihc, model.adaptation, model.modulation):
        stage.backend = "reference"
    x = torch.from_numpy(clips_of("speech")[0][: int(LOOP_S * FS_HZ)])
    return rate_of(lambda: model(x), LOOP_S, repeats=2)


def main() -> None:
    """Measure and write the section."""
    loop = _plain_loop_rate()
    total = BATCH * CLIP_S
    rows = [("plain loop in torch, full rate, one clip", "2", f"{loop:.3f}", "1")]

    def add(what: str, threads: int, rate: float) -> None:
        rows.append((what, str(threads), f"{rate:.0f}", f"{rate / loop:.0f}"))

    for kind in ("speech", "noise"):
        clips = clips_of(kind)
        for threads in (2, 1):
            extractor = build_extractor("dau1997", fs_hz=FS_HZ, threads=threads)
            rate = rate_of(lambda e=extractor, c=clips: e.extract(c), total)
            add(f"pooled to 100 Hz, float32, {BATCH} clips of {kind}", threads, rate)
    clips = clips_of("speech")
    set_num_threads(2)
    single = build_extractor("dau1997", fs_hz=FS_HZ)
    add("pooled, float32, one clip", 2, rate_of(lambda: single.extract(clips[:1]), CLIP_S))
    double = build_extractor("dau1997", fs_hz=FS_HZ, dtype="float64")
    add("pooled, float64", 2, rate_of(lambda: double.extract(clips), total, 2))
    model, batch = Dau1997(FS_HZ), torch.from_numpy(np.stack(clips[:4])[:, : 2 * FS_HZ])
    add("full-rate output (44 MB per second of audio)", 2, rate_of(lambda: model(batch), 8.0, 3))
    note = (
        f"Dau1997 at {FS_HZ} Hz, 31 channels of 8 modulation filters, clips of {CLIP_S:g} s at "
        "74 dB SPL. Noise overshoots in more channels, so the adaptation limiter works more."
    )
    write_section(
        "Dau1997 in all its ways", "python -m benchmarks.kernel", note + "\n\n" + table(_HEAD, rows)
    )


if __name__ == "__main__":
    main()
