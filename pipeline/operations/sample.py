"""Random rows of a plan, run as a small job in a private folder, and what their audio costs. The
small job is the job itself with another output, on this machine, with one worker. The folder is
removed afterwards. Rows that fail are counted by reason."""

from __future__ import annotations

import math
import random
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.machine import cores
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.driver.events import RESUME
from earmill.pipeline.operations.run_job import EXIT_DONE, run_job
from earmill.pipeline.planning.estimate import Range, Sampled
from earmill.pipeline.planning.make_plan import SHARD_DIGITS
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard, item_seconds
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import own_folder

# Every second of a longer row costs the same, so only its first seconds are processed.
ROW_S = 150.0
LEAST_SHARDS = 4  # Shards of the sample, at least: a range needs several.
# Half the width of a range. By Student's t for five shards, 96 % of costs are within it.
STANDARD_ERRORS = 3.0
# Two runs of a job on one machine differ by this share, so no range is narrower.
RUNS_DIFFER = 0.1


def sample(
    plan: Plan,
    *,
    spec: JobSpec,
    rows: int,
    seed: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Sampled:
    """Process random rows of a plan, and scale their cost by seconds of audio."""
    seed = random.randrange(2**32) if seed is None else seed
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
    took_s = time.monotonic() - began_s
    costs = [(records[shard.shard_id], shard.seconds) for shard in shards]
    computed_s = sum(shard.seconds for shard in plan.computed)
    all_s = sum(shard.seconds for shard in plan.shards)
    cpu = scaled([(sum(one.info["cpu_s"].values()), s) for one, s in costs], computed_s)
    # Workers share the work; where they share cores, too, these are the limit.
    by_workers_s = end.wall_s / sampled_s * computed_s / workers
    work_s = max(by_workers_s, cpu.expected / min(workers * threads, cores()))
    start_s, share = max(0.0, took_s - end.wall_s), work_s / cpu.expected
    return Sampled(
        time_s=Range(*(start_s + share * s for s in (cpu.low, cpu.expected, cpu.high))),
        cpu_s=cpu,
        stored_bytes=scaled([(one.nbytes, s) for one, s in costs], all_s),
        rows=len(items),
        bad=dict(end.bad_by_class),
        seed=seed,
        workers=workers,
        threads=threads,
        took_s=round(took_s, 2),
    )


def draw(shards: Sequence[Shard], rows: int, seed: int) -> list[Item]:
    """Return `rows` random rows of the shards in their order, every row with the same chance."""
    ends = list(accumulate(shard.rows for shard in shards))
    numbers = random.Random(seed).sample(range(ends[-1]), min(rows, ends[-1]))
    places = ((bisect_right(ends, number), number) for number in sorted(numbers))
    return [shards[index].items[number - ends[index]] for index, number in places]


def _shards(plan: Plan, items: Sequence[Item]) -> list[Shard]:
    """Return several shards, where there are rows for them, no larger than the plan's."""
    rows = [
        item
        if item_seconds(item) <= ROW_S
        else replace(item, end_s=(item.start_s or 0.0) + ROW_S, seconds=ROW_S, part_of=None)
        for item in items
    ]
    of_the_plan = sum(shard.rows for shard in plan.computed) // len(plan.computed)
    size = max(1, min(of_the_plan, len(rows) // LEAST_SHARDS))
    groups = (tuple(rows[first : first + size]) for first in range(0, len(rows), size))
    return [Shard(f"{n:0{SHARD_DIGITS}d}", group) for n, group in enumerate(groups)]


def _small_job(spec: JobSpec, folder: str, threads: int) -> JobSpec:
    output = {"uri": folder, "storage_options": {}}
    run: dict[str, object] = {"executor": "local", "ray_address": None, "array": None}
    run |= {"metrics": None, "max_bad_fraction": 1.0, "workers": 1, "threads_per_worker": threads}
    return spec.model_copy(
        update={
            "output": spec.output.model_copy(update=output),
            "run": spec.run.model_copy(update=run),
        }
    )


def scaled(costs: Sequence[tuple[float, float]], audio_s: float) -> Range:
    """Return the cost of `audio_s` seconds of audio from (cost, seconds) of measured shards: the
    ratio of the sums, three standard errors to either side. One shard has no error: its range is
    all of it."""
    n, seconds = len(costs), sum(s for _, s in costs)
    rate = sum(cost for cost, _ in costs) / seconds
    wide = rate
    if n > 1:
        squares = sum((cost - rate * s) ** 2 for cost, s in costs)
        wide = STANDARD_ERRORS * math.sqrt(squares * n / (n - 1)) / seconds
    wide = max(wide, RUNS_DIFFER * rate)
    low, high = max(0.0, rate - wide), rate + wide
    return Range(low * audio_s, rate * audio_s, high * audio_s)
