"""Merge small shards into larger ones, in a new snapshot; values are the same bit for bit.

Updates leave shards of a few rows, and a job may have been cut finer than its readers like. Each
merged shard is a copy of neighbours in the plan; shards that are large enough stay. A run that was
killed is gone on with by the same command, or by `extract` with --resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.commit_record import CommitRecord, commits
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.driver_lock import held
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.revision import (
    NewShard,
    begin_revision,
    carried_rows,
    carry_over,
    is_finished,
)
from earmill.pipeline.dataset.snapshot import LogEntry, read_current
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch

COMPACT = "compact"
# A copy is made in memory: merged shards have no more features than this, uncompressed.
MOST_BYTES = 512 * 2**20


def compact(
    layout: Layout,
    *,
    shard_seconds: float | None = None,
    shard_rows: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> LogEntry | None:
    """Merge neighbouring shards; the log entry of the new snapshot, None where nothing is small.

    Args:
        shard_seconds, shard_rows: Audio and rows of a merged shard, at most; None takes what the
            job says.
        on_begin: Told what takes a while.
    Raises:
        OutputError: No dataset there, or one that is not finished.
        LockedError: A driver works on it.
        OvertakenError: Another command took it over while this one gave no sign of life.
        CommitError: A shard to be copied is damaged, or the output failed.
    """
    require_dataset(layout)
    with held(layout) as fence:
        # Read with the lock: another command may have changed the dataset before.
        dataset = require_dataset(layout)
        plan = Plan.read(layout, dataset.plan_id)
        if is_finished(layout, plan):
            output = dataset.spec["output"]
            limits = (shard_seconds or output["shard_seconds"], shard_rows or output["shard_rows"])
            groups = list(_groups(plan, commits(layout), dataset, *limits))
            if not groups:
                return None
            dataset = begin_revision(
                layout,
                dataset,
                plan,
                why=COMPACT,
                dropped=[shard.shard_id for group in groups for shard in group],
                added=[_merged(group) for group in groups],
                fence=fence,
            )
            plan = Plan.read(layout, dataset.plan_id)
        _check_only_copies(layout, dataset, plan)
        fence.check(layout)
        clear_scratch(layout)
        carry_over(layout, dataset, plan, on_begin, fence)
        on_begin("writing the index")
        finalise(layout, fence=fence)
    current = read_current(layout)
    return None if current is None else current.entry


def _groups(
    plan: Plan,
    records: Mapping[str, CommitRecord],
    dataset: DatasetFile,
    shard_seconds: float,
    shard_rows: int,
) -> Iterator[list[Shard]]:
    """Neighbours that fit into one shard, two or more."""
    group: list[Shard] = []
    held = (0.0, 0, 0)
    for shard in plan.shards:
        size = _size(records[shard.shard_id], dataset)
        both = (held[0] + size[0], held[1] + size[1], held[2] + size[2])
        if group and (both[0] > shard_seconds or both[1] > shard_rows or both[2] > MOST_BYTES):
            if len(group) > 1:
                yield group
            group, both = [], size
        group.append(shard)
        held = both
    if len(group) > 1:
        yield group


def _size(record: CommitRecord, dataset: DatasetFile) -> tuple[float, int, int]:
    """Seconds, rows and bytes of features in a shard."""
    layouts = [layout_of(info) for info in dataset.streams]
    nbytes = sum(record.frames[each.name] * each.row_bytes(record.dtype) for each in layouts)
    return record.seconds, record.plan_rows, nbytes


def _merged(group: Sequence[Shard]) -> NewShard:
    rows = [(item, (shard.shard_id, item.row_id)) for shard in group for item in shard.items]
    return NewShard(tuple(item for item, _ in rows), tuple(place for _, place in rows))


def _check_only_copies(layout: Layout, dataset: DatasetFile, plan: Plan) -> None:
    """Rows that are still to be computed are a job's work."""
    there = {*commits(layout), *carried_rows(layout, dataset)}
    left = [shard.shard_id for shard in plan.shards if shard.shard_id not in there]
    if left:
        raise OutputError(
            f"{layout.url()}: expected a finished dataset, but {len(left)} of {len(plan.shards)} "
            "shards are not committed; run `earmill extract` with --resume first"
        )
