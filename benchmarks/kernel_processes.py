"""The bare kernel in one process after another: how much its speed depends on where memory lies.

Each process takes the same noise, on two threads; what it says is the CPU time of its fastest call.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np

from amtcore.features.build import build_extractor
from benchmarks.report import table, write_section

PROCESSES, CALLS = 16, 4
FS_HZ, CLIPS, CLIP_S = 44100, 20, 20


def cpu_ms() -> float:
    """CPU milliseconds per second of audio, of the fastest call in this process."""
    rng = np.random.default_rng(0)
    extractor = build_extractor("dau1997", fs_hz=FS_HZ, threads=2)
    extractor.extract([np.zeros(FS_HZ, np.float32)])
    clips = [(0.05 * rng.standard_normal(CLIP_S * FS_HZ)).astype(np.float32) for _ in range(CLIPS)]
    spent = []
    for _ in range(CALLS):
        begin = time.process_time()
        extractor.extract(clips)
        spent.append(1000 * (time.process_time() - begin) / (CLIPS * CLIP_S))
    return min(spent)


def main() -> None:
    """Measure and write the section; with an argument, print the figure of this process."""
    if len(sys.argv) > 1:
        print(cpu_ms())
        return
    command = [sys.executable, "-m", "benchmarks.kernel_processes", "one"]
    found = sorted(float(subprocess.check_output(command, text=True)) for _ in range(PROCESSES))
    rows = [(f"{found[0]:.2f}", f"{statistics.median(found):.2f}", f"{found[-1]:.2f}")]
    body = (
        f"Pooled Dau1997 at {FS_HZ} Hz, {CLIPS} clips of {CLIP_S} s of noise a call, two threads: "
        f"CPU ms per second of audio, the fastest of {CALLS} calls, in {PROCESSES} processes one "
        "after another.\n\n" + table(("fastest process", "median", "slowest process"), rows)
    )
    write_section("One kernel, many processes", "python -m benchmarks.kernel_processes", body)


if __name__ == "__main__":
    main()
