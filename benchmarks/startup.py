"""Start-up times: import of `amtcore`, short commands, a worker's first features.

Each figure comes from a fresh process. The first worker starts with an empty kernel cache, the
second with the kernels of the first, the third with kernels compiled before (AMTCORE_KERNELS).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import table, write_section

_STORED = Path(__file__).parents[1] / "tests" / "data" / "layout1" / "dataset"
_IMPORT = """
import time, torch
begin = time.perf_counter()
import amtcore, amtcore.features.registry
print(time.perf_counter() - begin)
"""
_WORKER = """
import time
begin = time.perf_counter()
import numpy as np
from amtcore.features.registry import build_extractor
build_extractor("dau1997", fs_hz=44100).extract([np.zeros(4410, np.float32)])
print(time.perf_counter() - begin)
"""

_FILES = 400
_JOB = """
source: {{kind: files, uri: {folder}/clips}}
extract: [{{model: dau1997}}]
output: {{uri: {folder}/out}}
"""


def _run(code: str, cache: str, prebuilt: str = "") -> float:
    environment = os.environ | {"NUMBA_CACHE_DIR": cache, "AMTCORE_KERNELS": prebuilt}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def _command(*arguments: str) -> float:
    """Return the median wall seconds of three `earmill` processes, after one that fills caches."""
    command = [sys.executable, "-m", "earmill.jobs.start", *arguments]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[1]


def _demo(cache: str) -> str:
    """Return the seconds of the demo's worker until it is warm, from the demo's output."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "earmill.jobs.start", "demo", "--out", folder],
            env=os.environ | {"NUMBA_CACHE_DIR": cache},
            check=True,
            capture_output=True,
            text=True,
        )
    said = re.search(r"ready after ([0-9.]+) s", done.stdout)
    assert said, f"the demo does not say when its worker is ready: {done.stdout}"
    return said[1]


def _plan() -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "clips").mkdir()
        clip = np.random.default_rng(0).standard_normal(16000).astype(np.float32) / 10
        for number in range(_FILES):
            soundfile.write(folder / "clips" / f"{number:03d}.flac", clip, 16000)
        job = folder / "job.yaml"
        job.write_text(_JOB.format(folder=folder))
        return f"{_command('plan', str(job)):.2f}"


def main() -> None:
    """Measure and write the section."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as fresh:
        imports = sorted(_run(_IMPORT, cache) for _ in range(3))
        first = _run(_WORKER, cache)
        second = sorted(_run(_WORKER, cache) for _ in range(3))
        shipped = sorted(_run(_WORKER, fresh, cache) for _ in range(3))
    with tempfile.TemporaryDirectory() as cache:
        demos = _demo(cache), _demo(cache)
    rows = [
        ("import amtcore beyond torch (median of 3)", f"{imports[1]:.2f}"),
        ("worker start to first features, empty kernel cache", f"{first:.2f}"),
        ("the same, second start (median of 3)", f"{second[1]:.2f}"),
        ("the same, kernels compiled ahead (median of 3)", f"{shipped[1]:.2f}"),
        ("the demo's worker, empty kernel cache (wanted: below 6)", demos[0]),
        ("the demo's worker, second start", demos[1]),
        ("`earmill --help` (median of 3)", f"{_command('--help'):.2f}"),
        ("`earmill models`", f"{_command('models'):.2f}"),
        (f"`earmill plan` of {_FILES} FLAC files", _plan()),
        ("`earmill inspect` of two shards", f"{_command('inspect', str(_STORED)):.2f}"),
    ]
    body = table(("what", "seconds"), rows)
    write_section("Start-up", "python -m benchmarks.startup", body)


if __name__ == "__main__":
    main()
