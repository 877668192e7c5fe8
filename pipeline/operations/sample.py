"""Random rows of a plan, run as a small job in a private folder, and what their audio costs.

The small job is the job itself with another output, on this machine, with one worker. So the same
code reads, decodes, computes and stores the rows. The folder is removed afterwards. Rows that fail
are counted by reason, as they will be in quarantine.
"""

from __future__ import annotations

import random
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.machine import cores
from earmill.pipeline.dataset.commit_record import CommitRecord, commits
from earmill.pipeline.driver.events import RESUME
from earmill.pipeline.operations.run_job import EXIT_DONE, run_job
from earmill.pipeline.planning.estimate import Range, Sampled, ratio_range
from earmill.pipeline.planning.make_plan import SHARD_DIGITS
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard, item_seconds
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import own_folder

# A longer row costs the same from beginning to end, so only its first seconds are processed.
ROW_S = 150.0
# Shards of the sample, at least: a range needs several.
LEAST_SHARDS = 4
# Times the shard of one row that other shards must be long, so that the two can be told apart.
LONGER = 2.0
# Two runs of a job on one machine differ in time by this share, and in stored bytes by less.
TIME_DIFFERS, BYTES_DIFFER = 0.1, 0.02
SEEDS = 2**32


def sample(
    plan: Plan,
    start_s: float,
    *,
    spec: JobSpec,
    rows: int,
    seed: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Sampled:
    """Process random rows of a plan, and scale their cost by seconds of audio.

    Args:
        start_s: Seconds from the call to a warm worker.
        seed: Draws the rows; None draws a seed as well.
        on_begin: Called with a sentence before the rows are processed.
    Raises:
        SourceError: No row of the sample can be used. Else as `run_job`.
    """
    seed = random.randrange(SEEDS) if seed is None else seed
    began_s = time.monotonic()
    items = draw(plan.computed, rows, seed)
    on_begin(f"processing {len(items):,} of {plan.rows:,} rows")
    shards = _shards(plan, items)
    sampled_s = sum(shard.seconds for shard in shards)
    workers = min(spec.run.workers or 1, len(plan.computed))
    threads = spec.run.threads_per_worker or max(1, cores() // workers)
    with tempfile.TemporaryDirectory(prefix="sample-", dir=own_folder()) as folder:
        job = _small_job(spec, folder, threads)
        end = run_job(job, plan=plan_of(shards, job.sha256(), extra_types=plan.extra_types))
        if end.exit_code != EXIT_DONE:
            raise SourceError(f"the sample {end.message.removesuffix(f': {RESUME}')}")
        if not (end.rows_ok and sampled_s):
            reasons = ", ".join(f"{name} {count}" for name, count in end.bad_by_class.items())
            raise SourceError(
                f"expected a usable row among the {len(items):,} of the sample, got none: {reasons}"
            )
        records = commits(Layout.open(folder))
    left = 1 - len(items) / sum(shard.rows for shard in plan.computed)

    def scaled(cost: Callable[[CommitRecord], float], of: Sequence[Shard], least: float) -> Range:
        costs = [(cost(records[shard.shard_id]), shard.seconds) for shard in shards]
        fixed = fixed_cost(costs[-1], costs[:-1])
        found = ratio_range([(c - fixed, s) for c, s in costs], left=left, least=least)
        return found.times(sum(shard.seconds for shard in of)).plus(fixed * len(of))

    cpu = scaled(
        lambda record: float(sum(record.info["cpu_s"].values())), plan.computed, TIME_DIFFERS
    )
    # Workers share the work; where they share cores, too, these are the limit.
    computed_s = sum(shard.seconds for shard in plan.computed)
    by_workers_s = end.wall_s / sampled_s * computed_s / workers
    by_cores_s = cpu.expected / min(workers * threads, cores())
    return Sampled(
        time_s=cpu.times(max(by_workers_s, by_cores_s) / cpu.expected).plus(start_s),
        cpu_s=cpu,
        stored_bytes=scaled(lambda record: record.nbytes, plan.shards, BYTES_DIFFER),
        rows=len(items),
        bad=dict(end.bad_by_class),
        seed=seed,
        workers=workers,
        threads=threads,
        took_s=round(time.monotonic() - began_s, 2),
    )


def draw(shards: Sequence[Shard], rows: int, seed: int) -> list[Item]:
    """Return `rows` random rows of the shards in their order, every row with the same chance."""
    ends = list(accumulate(shard.rows for shard in shards))
    numbers = random.Random(seed).sample(range(ends[-1]), min(rows, ends[-1]))
    places = ((bisect_right(ends, number), number) for number in sorted(numbers))
    return [shards[index].items[number - ends[index]] for index, number in places]


def _shards(plan: Plan, items: Sequence[Item]) -> list[Shard]:
    """Return several shards, no larger than the plan's, then a shard of the shortest row."""
    rows = [
        item
        if item_seconds(item) <= ROW_S
        else replace(item, end_s=(item.start_s or 0.0) + ROW_S, seconds=ROW_S, part_of=None)
        for item in items
    ]
    shortest = rows.pop(min(range(len(rows)), key=lambda number: item_seconds(rows[number])))
    of_the_plan = sum(shard.rows for shard in plan.computed) // len(plan.computed)
    size = max(1, min(of_the_plan, len(rows) // LEAST_SHARDS))
    groups = [*(rows[first : first + size] for first in range(0, len(rows), size)), [shortest]]
    return [Shard(f"{n:0{SHARD_DIGITS}d}", tuple(group)) for n, group in enumerate(groups)]


def _small_job(spec: JobSpec, folder: str, threads: int) -> JobSpec:
    """Return the job with another output, and one worker of this machine."""
    output = {"uri": folder, "storage_options": {}}
    run: dict[str, object] = {"executor": "local", "ray_address": None, "array": None}
    run |= {"metrics": None, "max_bad_fraction": 1.0, "workers": 1, "threads_per_worker": threads}
    return spec.model_copy(
        update={
            "output": spec.output.model_copy(update=output),
            "run": spec.run.model_copy(update=run),
        }
    )


def fixed_cost(one: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Return what a shard costs whatever it holds: tables, metadata, requests.

    Shards are given as cost and seconds. The equation cost = fixed + rate * seconds holds for the
    shard of one row, and for the sum of the other shards. Where the other shards are hardly longer,
    or noise outweighs the difference, the equations say nothing, and 0 is returned.
    """
    count, cost, seconds = len(others), sum(c for c, _ in others), sum(s for _, s in others)
    if not count or seconds < LONGER * count * one[1]:
        return 0.0
    rate = (cost - count * one[0]) / (seconds - count * one[1])
    return max(0.0, one[0] - rate * one[1]) if rate > 0 else 0.0
