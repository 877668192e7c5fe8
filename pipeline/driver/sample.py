"""Random rows of a plan, run as a small job in a private folder, and what their audio costs.

The small job is the real one with another output, on this machine, with one worker: the same rows
are read, decoded, computed and stored by the same code. The folder is removed afterwards. Rows that
fail are counted by reason, as they will be in quarantine.
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
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.driver.summary import EXIT_DONE, RESUME
from earmill.pipeline.planning.estimate import Range, Sampled, Sampler, ratio_range
from earmill.pipeline.planning.plan import SHARD_DIGITS, Plan, Shard, item_seconds, plan_of
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.owned_folders import own_folder

# The first seconds of a row that is longer: such a row costs the same from beginning to end.
ROW_S = 150.0
# Shards of the sample, at least: a range needs several.
LEAST_SHARDS = 4
# Times the shard of one row that other shards are long, so that the two can be told apart.
LONGER = 2.0
SEEDS = 2**32
# Two runs of one job on one machine differ in time by this share, and stored bytes by less.
TIME_DIFFERS, BYTES_DIFFER = 0.1, 0.02


def sampler_of(
    spec: JobSpec,
    rows: int,
    *,
    seed: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Sampler:
    """Return a function that samples a plan of the job.

    Args:
        spec: The job.
        rows: How many rows to draw; all rows where the plan has fewer.
        seed: Draws the rows; None draws a seed as well.
        on_begin: Told how many rows are processed, before they are.
    Raises:
        ValueError: `rows` is below 1.
    """
    if rows < 1:
        raise ValueError(f"expected at least 1 row to sample, got {rows}")
    drawn_by = random.randrange(SEEDS) if seed is None else seed

    def sample(plan: Plan, start_s: float) -> Sampled:
        items = draw(plan.computed, rows, drawn_by)
        on_begin(f"processing {len(items):,} of {plan.rows:,} rows")
        return _measured(spec, plan, items, drawn_by, start_s)

    return sample


def draw(shards: Sequence[Shard], rows: int, seed: int) -> list[Item]:
    """Return `rows` random rows of the shards in their order, every row with the same chance."""
    ends = list(accumulate(shard.rows for shard in shards))
    numbers = random.Random(seed).sample(range(ends[-1]), min(rows, ends[-1]))
    found = []
    for number in sorted(numbers):
        index = bisect_right(ends, number)
        found.append(shards[index].items[number - ends[index]])
    return found


def _measured(
    spec: JobSpec, plan: Plan, items: Sequence[Item], seed: int, start_s: float
) -> Sampled:
    """Process the rows, and scale what they cost by seconds of audio."""
    began_s = time.monotonic()
    workers = min(spec.run.workers or 1, len(plan.computed))
    threads = spec.run.threads_per_worker or max(1, cores() // workers)
    shards = _shards(plan, items)
    with tempfile.TemporaryDirectory(prefix="sample-", dir=own_folder()) as folder:
        job = _small_job(spec, folder, threads)
        small = plan_of(shards, job.sha256(), extra_types=plan.extra_types)
        end = run_job(job, plan=small)
        if end.exit_code != EXIT_DONE:
            raise SourceError(f"the sample {end.message.removesuffix(f': {RESUME}')}")
        sampled_s = sum(shard.seconds for shard in shards)
        if not (end.rows_ok and sampled_s):
            reasons = ", ".join(f"{name} {count}" for name, count in end.bad_by_class.items())
            raise SourceError(
                f"expected a usable row among the {len(items):,} of the sample, got none: {reasons}"
            )
        records = commits(Layout.open(folder))
    computed_s = sum(shard.seconds for shard in plan.computed)
    left = 1 - len(items) / sum(shard.rows for shard in plan.computed)

    def scaled(cost: Callable[[CommitRecord], float], of: Sequence[Shard], least: float) -> Range:
        costs = [(cost(records[shard.shard_id]), shard.seconds) for shard in shards]
        # Tables and metadata of a shard weigh most where shards are small.
        fixed = fixed_cost(costs[-1], costs[:-1])
        found = ratio_range([(c - fixed, s) for c, s in costs], left=left, least=least)
        return found.times(sum(shard.seconds for shard in of)).plus(fixed * len(of))

    cpu = scaled(_cpu_s, plan.computed, TIME_DIFFERS)
    # One worker's time is shared by all, but for cores that they do not have.
    by_workers_s = end.wall_s / sampled_s * computed_s / workers
    by_cores_s = cpu.expected / min(workers * threads, cores())
    return Sampled(
        time_s=cpu.times(max(by_workers_s, by_cores_s) / cpu.expected).plus(start_s),
        cpu_s=cpu,
        stored_bytes=scaled(_nbytes, plan.shards, BYTES_DIFFER),
        rows=len(items),
        bad=dict(end.bad_by_class),
        seed=seed,
        workers=workers,
        threads=threads,
        took_s=round(time.monotonic() - began_s, 2),
    )


def _shards(plan: Plan, items: Sequence[Item]) -> list[Shard]:
    """Several shards, no larger than the plan's, then a shard of the shortest row."""
    rows = [_beginning(item) for item in items]
    shortest = rows.pop(min(range(len(rows)), key=lambda number: item_seconds(rows[number])))
    of_the_plan = sum(shard.rows for shard in plan.computed) // len(plan.computed)
    size = max(1, min(of_the_plan, len(rows) // LEAST_SHARDS))
    groups = [*(rows[first : first + size] for first in range(0, len(rows), size)), [shortest]]
    return [
        Shard(f"{number:0{SHARD_DIGITS}d}", tuple(group)) for number, group in enumerate(groups)
    ]


def fixed_cost(one: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Return what a shard costs whatever it holds.

    cost = fixed + rate * seconds holds for a shard of one row, and for all others on average: two
    equations. Where the others are hardly longer, nothing can be told, and nothing is lost by 0.

    Args:
        one: Cost and seconds of the shard of one row.
        others: Cost and seconds of each other shard.
    """
    count, cost, seconds = len(others), sum(c for c, _ in others), sum(s for _, s in others)
    if seconds < LONGER * count * one[1] or not count:
        return 0.0
    rate = (cost - count * one[0]) / (seconds - count * one[1])
    return max(0.0, one[0] - rate * one[1])


def _beginning(item: Item) -> Item:
    """The row, or the beginning of a long one."""
    if item_seconds(item) <= ROW_S:
        return item
    end_s = (item.start_s or 0.0) + ROW_S
    return replace(item, end_s=end_s, seconds=ROW_S, part_of=None)


def _small_job(spec: JobSpec, folder: str, threads: int) -> JobSpec:
    """The job with another output, and one worker of this machine."""
    output = spec.output.model_copy(update={"uri": folder, "storage_options": {}})
    run = {
        "executor": "local",
        "array": None,
        "workers": 1,
        "threads_per_worker": threads,
        "max_bad_fraction": 1.0,
        "metrics": None,
    }
    return spec.model_copy(update={"output": output, "run": spec.run.model_copy(update=run)})


def _cpu_s(record: CommitRecord) -> float:
    return float(sum(record.info["cpu_s"].values()))


def _nbytes(record: CommitRecord) -> float:
    return sum(file.bytes for file in record.files)
