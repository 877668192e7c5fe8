"""A whole job on this machine's GPU and on its cores: `python -m benchmarks.gpu_job [HOURS]`.

The corpus has the clips of `benchmarks.job` and 16 hours by default. Rates count from the first
warm worker to the written index. Without a GPU the script prints one line and exits with 2.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import facts_or_exit
from benchmarks.job import CLIP_S, HOUR_CLIPS, MODEL_FS_HZ, cpu_table, run_job, write_corpus
from benchmarks.report import table, write_section

HOURS = 16
#: Runs of the job by name; the CPU run is last.
WAYS: dict[str, dict[str, Any]] = {
    "GPU, one worker": {"device": "cuda"},
    "GPU, two workers": {"device": "cuda", "gpus_per_worker": 0.5},
    "GPU, four workers": {"device": "cuda", "gpus_per_worker": 0.25},
    "cores alone": {"device": "cpu"},
}
_HEAD = ("where", "audio s per s", "start-up in s", "cores busy")


def write_hours(folder: Path, hours: int) -> None:
    """Write one hour in each subfolder, in parallel."""
    with ProcessPoolExecutor() as pool:
        folders = [folder / str(k) for k in range(hours)]
        list(pool.map(write_corpus, folders, [MODEL_FS_HZ] * hours))


def measured(corpus: Path, way: str) -> dict[str, Any]:
    """Run one job; return its summary, its rate and the start of its first worker."""
    spec = {
        "source": {"kind": "files", "uri": str(corpus)},
        "extract": [{"model": "dau1997", "fs_hz": MODEL_FS_HZ}],
        "run": WAYS[way],
    }
    with tempfile.TemporaryDirectory() as folder:
        events, _ = run_job(Path(folder), spec)
    ready, end = events["workers_ready"], events["summary"]
    took_s = end["at_s"] - ready["at_s"]
    spent_s = sum(end["cpu_s"].values()) - end["cpu_s"]["idle"]
    return end | {
        "rate": end["seconds"] / took_s,
        "ready_s": ready["at_s"],
        "share": spent_s / took_s / (os.cpu_count() or 1),
    }


def main() -> None:
    """Measure all runs and write the section."""
    facts = facts_or_exit("gpu_job")
    hours, rows, ends = int((sys.argv[1:] or [HOURS])[0]), [], {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_hours(corpus, hours)
        for way in WAYS:
            ends[way] = end = measured(corpus, way)
            numbers = f"{end['rate']:.0f}", f"{end['ready_s']:.1f}", f"{end['share']:.0%}"
            rows.append((way, *numbers))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    parts = [
        f"{facts}; {os.cpu_count()} cores beside it.",
        f"{hours} hours of generated speech, {hours * HOUR_CLIPS} FLAC files of {CLIP_S:g} s at "
        f"{MODEL_FS_HZ} Hz, Dau1997 pooled to 100 Hz, float16 Zarr. One run each.",
        table(_HEAD, rows),
        "Where the CPU time went, by the job's own counters; model is what computes on cores, or "
        "waits for the GPU there.",
        cpu_table(ends),
    ]
    write_section("GPU, whole job", f"python -m benchmarks.gpu_job {hours}", "\n\n".join(parts))


if __name__ == "__main__":
    main()
