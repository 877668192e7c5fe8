"""Speed and memory of the loudness models: extraction of clips, and of one long stream.

Times are the best of several runs of one process, with the CPU time of the same run. The CPU time
is also compared with the bound of `loudness_stages`, the cost of the necessary transforms, products
and exponentials. Figures of memory are of a fresh process: its peak after the first seconds of a
stream, and the growth of the peak over the rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping

import numpy as np

from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor
from benchmarks.loudness_stages import BEFORE, stages_table
from benchmarks.report import peak_mb, table, write_section
from earmill.jobs.demo_audio import speech

FS_HZ = 32000
CLIP_S = 20.0
#: RMS in Pa: 74 dB SPL.
LEVEL_PA = 0.1
REPEATS = 5
STREAMED_MINUTES = (2, 20)
_WARM_S = 5
_TRACES = {"short_term_loudness": {}, "long_term_loudness": {}, "loudness_summary": {}}
_PATTERNS = {**_TRACES, "specific_loudness": {}}
_STREAMS = {"traces, summary": _TRACES, "and specific loudness": _PATTERNS}
#: Wanted seconds of audio per second on two cores, if there is a goal.
_WANTED = {
    ("moore2016", "noise"): "4",
    ("moore2016", "speech"): "6",
    ("glasberg2002", "speech"): "10",
}
_HEAD = ("model", "signal", "streams", "threads", "seconds of audio per second", "wanted",
         "processor time of a second")  # fmt: skip
_MEMORY_HEAD = ("model", *(f"{n} minutes: peak (growth)" for n in STREAMED_MINUTES))


def signal_of(kind: str, ears: int, seconds: float = CLIP_S) -> np.ndarray:
    """Return (ear, time) in Pa, or (time,) for one ear; the ears get different signals."""
    waves = []
    for ear in range(ears):
        rng = np.random.default_rng(ear)
        wave = speech(rng, FS_HZ, seconds)
        if kind == "noise":
            wave = rng.standard_normal(int(FS_HZ * seconds))
        waves.append(LEVEL_PA * wave / np.sqrt(np.mean(wave**2)))
    return np.stack(waves).astype(np.float32)[0 if ears == 1 else slice(None)]


def _seconds(extractor: Extractor, clip: np.ndarray) -> tuple[float, float]:
    """Return wall time and CPU time of the fastest run, per second of audio."""
    best = (float("inf"), 0.0)
    for _ in range(REPEATS):
        begin, used = time.perf_counter(), time.process_time()
        extractor.extract([clip])
        best = min(best, (time.perf_counter() - begin, time.process_time() - used))
    return best[0] / CLIP_S, best[1] / CLIP_S


def _speed_rows() -> list[tuple[str, ...]]:
    rows = []
    for model, ears in (("moore2016", 2), ("glasberg2002", 1)):
        for kind in ("noise", "speech"):
            clip = signal_of(kind, ears)
            for streams, request in _STREAMS.items():
                for threads in (2, 1):
                    extractor = build_extractor(model, streams=request, threads=threads)
                    extractor.extract([clip[..., :FS_HZ]])
                    wall, used = _seconds(extractor, clip)
                    wanted = _WANTED.get((model, kind), "") if threads == 2 else ""
                    rows.append(
                        (model, kind, streams, str(threads), f"{1 / wall:.1f}", wanted,
                         f"{1e3 * used:.0f} ms")
                    )  # fmt: skip
    return rows


def _streamed_mb(model: str, minutes: int) -> Mapping[str, float]:
    """Return the peak memory of a process that streams noise, and the growth by the stream."""
    command = [sys.executable, "-m", "benchmarks.loudness", model, str(minutes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _print_streamed(model: str, minutes: int) -> None:
    extractor = build_extractor(model, streams=_PATTERNS, threads=2)
    second = signal_of("noise", max(extractor.input_channels), 1.0)
    stream = extractor.open_stream()
    for _ in range(_WARM_S):
        stream.push(second)
    before = peak_mb()
    for _ in range(60 * minutes - _WARM_S):
        stream.push(second)
    stream.finish()
    print(json.dumps({"peak": peak_mb(), "growth": peak_mb() - before}))


def _memory_rows() -> list[tuple[str, ...]]:
    rows = []
    for model in ("moore2016", "glasberg2002"):
        seen = [_streamed_mb(model, minutes) for minutes in STREAMED_MINUTES]
        rows.append((model, *(f"{mb['peak']:.0f} MB ({mb['growth']:.0f} MB)" for mb in seen)))
    return rows


def main() -> None:
    """Measure and write the section."""
    note = (
        f"Clips of {CLIP_S:g} s at {FS_HZ} Hz and 74 dB SPL, float32, a frame every ms: short-term "
        "and long-term loudness at that rate, numbers of the clip, specific loudness (150 "
        "channels) at 100 frames a second. Moore2016 hears two ears with different signals, "
        "Glasberg2002 one."
    )
    speed = table(_HEAD, _speed_rows())
    memory = (
        "Memory of a stream of noise with all of these, pushed a second at a time; percentiles "
        "keep 4 bytes of every frame."
    )
    stages = (
        "Where the processor time of a second of audio goes, in ms on one thread. The bound is the "
        "six FFTs of every frame or the products here, whichever is less, and one exponential for "
        "every node below a channel. What it was before is measured in turns with what it is, on "
        f"commit {BEFORE}."
    )
    stages += f"\n\n{stages_table(signal_of)}"
    body = f"{note}\n\n{speed}\n\n{stages}\n\n{memory}\n\n{table(_MEMORY_HEAD, _memory_rows())}"
    write_section("Loudness", "python -m benchmarks.loudness", body)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _print_streamed(sys.argv[1], int(sys.argv[2]))
    else:
        main()
