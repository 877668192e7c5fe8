"""Bytes that planning and a job read from a streamed dataset of 200 Parquet files.

A web server on this machine counts how often each byte is read. The plan is made, and the
counts are reset. Then the job runs from this plan in its own process; its two workers open the
dataset themselves.

    python -m benchmarks.streamed_source
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import table, write_section
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.counting_store import Store, served
from tests.pipeline.streamed_set import AUDIO_S, FILES, GROUP_ROWS, fill, times_given

WORKERS = 2
MOST_PLANNED = 0.02


def spec_of(url: str, folder: str) -> JobSpec:
    """Return a job with two workers of one thread, and two row groups a shard."""
    sections: dict[str, Any] = {
        "source": {"kind": "hf", "uri": f"{url}/*.parquet", "streaming": True},
        "extract": [{"model": "dau1997"}],
        "output": {
            "uri": f"{folder}/out",
            "formats": ["parquet"],
            "shard_seconds": 2 * GROUP_ROWS * AUDIO_S + 0.2,
        },
        "run": {
            "executor": "local",
            "workers": WORKERS,
            "threads_per_worker": 1,
            "device": "cpu",
        },
    }
    return JobSpec.load(sections)


def counted(store: Store) -> dict[str, int]:
    """Return bytes and requests since the last `forget`."""
    return {"bytes": store.bytes_given, **dict(store.requests)}


def row(what: str, found: dict[str, int], total: int) -> list[str]:
    """Return a line of the table."""
    share = f"{100 * found['bytes'] / total:.2f} %"
    requests = (f"{found.get(name, 0):,}" for name in ("GET", "HEAD"))
    return [what, f"{found['bytes']:,}", share, *requests]


def shards_by_worker(layout: Layout) -> list[int]:
    """Return the number of shards that each process committed, largest first."""
    found: dict[Any, int] = {}
    for record in commits(layout).values():
        pid = record.info["worker"]["pid"]
        found[pid] = found.get(pid, 0) + 1
    return sorted(found.values(), reverse=True)


def main() -> None:
    """Count and write the section."""
    with served() as (store, url), tempfile.TemporaryDirectory() as folder:
        n_rows, spec = fill(store), spec_of(url, folder)
        total = sum(map(len, store.files.values()))
        plan: Plan = make_plan(open_source(spec.source), spec)
        planning = counted(store)
        store.forget()
        end = run_job(spec, plan=plan)
        job, times = counted(store), times_given(store)
        shards = shards_by_worker(Layout.open(str(Path(folder) / "out")))
    head = ["step", "bytes read", "of all", "GET", "HEAD"]
    lines = [row("planning", planning, total), row("the job", job, total)]
    body = (
        f"{FILES} files with {n_rows} rows, {total:,} bytes, of which {times.size:,} are the audio "
        f"column; {len(plan.shards)} shards.\n\n{table(head, lines)}\n\n"
        f"Every byte of the audio column was given at least {times.min()} and at most "
        f"{times.max()} times to the job, {times.mean():.4f} times on average; what it read beside "
        f"it (footers, other columns) was {100 * (job['bytes'] - times.sum()) / total:.2f} % of "
        f"all. The job is {end.status}: {end.rows_ok} rows good, {end.rows_bad} in quarantine; its "
        f"workers committed {' and '.join(map(str, shards))} shards. Wanted: planning below "
        f"{100 * MOST_PLANNED:g} %, audio once."
    )
    write_section("A streamed source", "python -m benchmarks.streamed_source", body)


if __name__ == "__main__":
    main()
