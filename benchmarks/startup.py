"""What a start costs: importing `amtcore`, and a worker's first and second warm-up.

Each figure comes from a fresh process. The first worker starts with an empty kernel cache, the
second finds what the first compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.report import table, write_section

_IMPORT = """
import time, torch
begin = time.perf_counter()
import amtcore, amtcore.features.build
print(time.perf_counter() - begin)
"""
_WORKER = """
import time
begin = time.perf_counter()
import numpy as np
from amtcore.features.build import build_extractor
build_extractor("dau1997", fs_hz=44100).extract([np.zeros(4410, np.float32)])
print(time.perf_counter() - begin)
"""


def _run(code: str, cache: str) -> float:
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure and write the section."""
    with tempfile.TemporaryDirectory() as cache:
        imports = sorted(_run(_IMPORT, cache) for _ in range(3))
        first = _run(_WORKER, cache)
        second = sorted(_run(_WORKER, cache) for _ in range(3))
    rows = [
        ("import amtcore beyond torch (median of 3)", f"{imports[1]:.2f}"),
        ("worker start to first features, empty kernel cache", f"{first:.2f}"),
        ("the same, second start (median of 3)", f"{second[1]:.2f}"),
    ]
    body = table(("what", "seconds"), rows)
    write_section("Start-up", "python -m benchmarks.startup", body)


if __name__ == "__main__":
    main()
