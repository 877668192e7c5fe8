"""At the end of a run: what it took, held against what `earmill plan --sample` had expected."""

from __future__ import annotations

from collections.abc import Sequence

from earmill.pipeline.common.cpu_time import IDLE
from earmill.pipeline.driver.open_job import OpenJob
from earmill.pipeline.driver.shard_tracker import Committed, Result
from earmill.pipeline.planning.kept_estimate import Taken, add_taken, read_estimate
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.layout import Layout

# What a dataset has beside the files that commits name and the commits themselves.
FOLDERS = ("plan", "index", "snapshots", "revisions")
ROOT_FILES = (
    paths.DATASET_FILE,
    paths.README_FILE,
    paths.CROISSANT_FILE,
    paths.PROVENANCE_FILE,
    paths.CURRENT_FILE,
)


def settle(
    job: OpenJob, result: Result, before: Sequence[Committed], took_s: float, *, alone: bool
) -> dict[str, dict[str, float]]:
    """Add what a run took to what is kept with its job; each figure with its actual value.

    Args:
        before: Commits that are not of this run. took_s: Wall seconds of it so far.
        alone: No other driver works on the output: else nobody knows what all of them took.
    Returns:
        Nothing where there is no estimate, or shards are missing.
    """
    kept = read_estimate(job.layout, job.plan.plan_id)
    if kept is None:
        return {}
    if alone and result.done:
        kept = add_taken(job.layout, kept, _taken(result, took_s))
    committed = [*before, *result.done.values()]
    shards = len(job.plan.shards)
    if len(committed) < shards:
        return {}
    return kept.compared(
        stored_bytes=sum(record.nbytes for record in committed),
        objects=sum(record.files for record in committed) + shards + _others(job.layout),
        shards=shards,
    )


def stored_comparison(
    layout: Layout, plan_id: str, *, nbytes: int, files: int, committed: int, shards: int
) -> dict[str, dict[str, float]]:
    """The same of a dataset, from what is stored.

    Args:
        nbytes, files: Of all commits. committed: Shards that are. shards: Of the plan.
    """
    kept = read_estimate(layout, plan_id)
    if kept is None or committed < shards:
        return {}
    objects = files + shards + _others(layout)
    return kept.compared(stored_bytes=nbytes, objects=objects, shards=shards)


def _taken(result: Result, took_s: float) -> Taken:
    held = sum(result.cpu_s.values()) / result.worked_s if result.worked_s else 0.0
    spent_s = sum(seconds for part, seconds in result.cpu_s.items() if part != IDLE)
    return Taken(
        runs=1,
        shards=len(result.done),
        time_s=round(took_s, 3),
        cpu_s=round(spent_s, 3),
        core_s=round(held * took_s, 3),
    )


def _others(layout: Layout) -> int:
    """Objects beside those of shards; the estimate itself is none that was estimated."""
    files = sum(
        not name.endswith(".estimate.json") for folder in FOLDERS for name in layout.list(folder)
    )
    return files + sum(layout.exists(name) for name in ROOT_FILES)
